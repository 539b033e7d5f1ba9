"""Texts state what the figures show, for people who cannot or do not want to read the curves."""

from app.pages.run.run_figures import FIGURES, summaries
from app.pages.runs.comparison import summaries as compared
from engine.runs.record.snapshot import RunSnapshot
from tests.support.folded import fold
from tests.support.synthetic_run import records, run_events


def snapshot_of(**how) -> RunSnapshot:
    return fold(records(run_events(**how)))


def test_every_figure_has_a_sentence_with_its_numbers():
    shown = summaries(snapshot_of(steps=80))
    assert set(shown) == set(FIGURES) - {"preference"}  # which is for runs of pairs
    assert "at step 80" in shown["loss"] and "validation" in shown["loss"]
    assert shown["optimizer"].startswith("Latest: rate ") and "norm" in shown["optimizer"]


def test_sentences_follow_the_run():
    before, after = (
        summaries(snapshot_of(steps=steps, total=200, ended=None)) for steps in (40, 80)
    )
    assert all(before[name] != after[name] for name in ("loss", "optimizer", "norms"))
    assert "validation" not in summaries(snapshot_of(steps=20))["loss"]


def test_a_comparison_names_every_run_and_leaves_out_what_none_has():
    names = (
        "Training loss, last (smoothed)",
        "Validation loss, last",
        "Answers right, last",
        "Learning rate, highest",
        "Speed, median of the run",
        "RAM, peak",
        "GPU memory, peak",
    )
    texts = {
        "Training loss, last (smoothed)": ["0.42", "0.31"],
        "Validation loss, last": ["–", "0.4"],
    }
    rows = [{"name": name, "texts": texts.get(name, ["–", "–"])} for name in names]
    assert compared(["One", "Two"], rows) == {
        "loss": (
            "Training loss, last (smoothed): One 0.42, Two 0.31. Validation loss, "
            "last: One –, Two 0.4."
        ),
        "accuracy": "None of these runs has made a step yet.",
        "rate": "None of these runs has made a step yet.",
        "throughput": "None of these runs has made a step yet.",
        "memory": "None of these runs has made a step yet.",
    }

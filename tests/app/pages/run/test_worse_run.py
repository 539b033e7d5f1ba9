"""A run that made its model worse is called so wherever it is shown, and nowhere green.

It is a real run with learning rate 5, recorded by `tests/support/recorded_runs.py`.
"""

from __future__ import annotations

import pytest

from app.pages.run.best import best_of
from app.pages.run.head import head
from app.pages.run.learning_figures import loss_figure
from app.pages.run.run_log import RunLog
from app.pages.runs.comparison import Compared, comparison
from app.pages.runs.key_figures import key_figures
from app.session.run_scans import scanned
from app.shared.run_bar import ShownRun, run_bar
from app.shared.run_row import RunScan, recent_row, run_row
from app.shared.run_table import Asked, ListedRun, found_runs
from app.verdict.judge import verdict
from engine.runs.record.events import (
    BestKept,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    RunEnded,
    RunStarted,
    StateChanged,
)
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.listing import summarize
from engine.runs.summaries.sparkline import Sparkline, read_sparkline
from engine.training.checkpoints.saved_on_disk import SavedSteps
from tests.app.verdict.made_runs import CONFIG, steps
from tests.support.folded import fold
from tests.support.recorded_runs import read


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of the recorded run."""
    made = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(made.path, made.id)
    for record in read("ends", "rate-5"):
        recorder.emit(record.event)
    recorder.close()
    return made


@pytest.fixture
def snapshot():
    return fold(read("ends", "rate-5"))


def test_no_evaluation_of_it_is_the_best(snapshot):
    assert min(snapshot.evals.loss[1:]) > snapshot.evals.loss[0]
    assert best_of(snapshot) is None
    assert not any("best" in line.get("name", "") for line in loss_figure(snapshot, "step")["data"])


def test_it_is_red_and_never_said_to_learn_at_any_evaluation():
    found = RunSnapshot()
    for record in read("ends", "rate-5"):
        found.apply(record)
        if len(found.steps) and found.step % 30 == 0:
            reported = verdict(found, "running")
            assert reported.main.tone == "bad"
            assert all(each.tone != "good" or each.rule == "speed" for each in reported.also)
            assert "Learning well" not in str(reported)


def test_its_row_its_curve_and_its_entry_in_the_sidebar_are_red(folder):
    run, look = summarize(folder), RunScan(read_sparkline(folder.events_path))
    row = run_row(run, scan=look)
    assert (row["word"], row["tone"], row["curve_tone"]) == ("Worse", "bad", "bad")
    assert row["worse"].startswith("Worse than before training: validation loss 6.07")
    assert row["before"] == "6.073 before training"
    whole = run_row(run, scan=scanned(folder))
    assert whole["word"] in ("Worse", "Diverged") and whole["tone"] == "bad"
    found = found_runs([ListedRun(run, scan=look)], Asked(search="worse"))
    assert len(found) == 1, "A search finds the word of a row."
    entry, unread = recent_row(run, look), recent_row(run)
    assert (entry["word"], entry["tone"]) == ("Worse", "bad")
    assert (unread["word"], unread["tone"]) == ("", "calm"), "its outcome is not known yet"


def test_its_bar_and_its_card_are_red(snapshot):
    bar = run_bar(snapshot, ShownRun("run-1", "x", is_running=False), verdict(snapshot, "finished"))
    assert bar["tone"] == "bad" and bar["title"].startswith("✗")
    assert "diverged" in bar["sentence"] and "best" not in bar["sentence"]
    judged = verdict(snapshot, "finished")
    card = head(snapshot, "finished", SavedSteps(150, 150), judged)
    assert card["tone"] == "bad" and card["title"] in ("It diverged", "Worse than before training")
    validation = next(each for each in card["facts"] if each["label"] == "Validation loss")
    assert (validation["from"], validation["since"]) == ("6.073", "before")
    alone = head(snapshot, "finished", SavedSteps(), judged)
    assert alone["tone"] == "bad" and not alone["facts"]


def test_a_run_that_memorizes_its_rows_is_amber():
    """Its badge and its card were green, and only a sentence below them said so."""
    found = fold(read("ends", "six-rows"))
    bar = run_bar(found, ShownRun("run-1", "x", is_running=False), verdict(found, "finished"))
    assert (bar["outcome"], bar["tone"]) == ("Memorized", "warn") and bar["title"].startswith("!")
    saved = SavedSteps(found.step, found.step)
    card = head(found, "finished", saved, verdict(found, "finished"))
    assert card["tone"] == "warn" and card["title"] == "It memorized its rows"
    healthy = fold(read("ends", "healthy"))
    bar = run_bar(healthy, ShownRun("run-1", "x", is_running=False))
    assert (bar["outcome"], bar["tone"]) == ("Learned", "good") and bar["title"].startswith("✓")
    saved = SavedSteps(healthy.step)
    assert head(healthy, "finished", saved, verdict(healthy, "finished"))["tone"] == "good"


@pytest.mark.parametrize(
    ("name", "tone"), [("six-rows", "warn"), ("healthy", "good"), ("rate-5", "bad")]
)
def test_a_run_has_one_color_wherever_it_is_listed(tmp_path, name, tone):
    """A run that memorizes its rows was green in Runs, in the sidebar and in a comparison."""
    made, found = create_run(tmp_path, CONFIG), RunSnapshot()
    recorder = RunRecorder(made.path, made.id)
    for record in read("ends", name):
        recorder.emit(record.event)
        found.apply(record)
    recorder.close()
    run, look = summarize(made), scanned(made)
    bar = run_bar(found, ShownRun("run-1", "x", is_running=False), verdict(found, "finished"))
    compared = comparison([Compared(run.id, "x", run.state, found, {})] * 2, "step")
    tones = [run_row(run, scan=look), recent_row(run, look), bar, *compared["runs"]]
    assert [shown["tone"] for shown in tones] == [tone] * 5
    assert run_row(run, scan=look)["curve_tone"] == tone


def best_then_worse(tmp_path, *ended):
    """Returns a run whose validation loss fell at first, and is above that before training at its
    end.
    """
    made = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(made.path, made.id)
    for event in (RunStarted(total_steps=100), StateChanged("running"), *steps(100)):
        recorder.emit(event)
    for step, loss in {0: 0.83, 33: 0.7, 66: 0.593, 90: 0.7, 100: 1.504}.items():
        recorder.emit(EvalFinished(step=step, loss=loss, loss_tokens=9000))
    for event in ended:
        recorder.emit(event)
    recorder.close()
    return made, recorder.snapshot


@pytest.mark.parametrize("exported", [(), (ExportWritten(step=66, path="export"),)])
def test_a_run_whose_better_weights_are_kept_is_amber(tmp_path, exported):
    """A red *Worse than before training* stood beside the loss of the best weights, which are
    better.
    """
    kept = BestKept(step=66, loss=0.593)
    made, found = best_then_worse(tmp_path, kept, *exported, RunEnded("finished"))
    judged = verdict(found, "finished", SavedSteps(100, 100, 66), CONFIG)
    card = head(found, "finished", SavedSteps(100, 100, 66), judged)
    said = "Best at step 66, worse after; the best weights are kept"
    assert (card["title"], card["tone"]) == (said, "warn")
    assert card["facts"][0]["to"] == "0.593"
    row, entry = run_row(summarize(made), scan=scanned(made)), recent_row(summarize(made))
    assert (row["word"], row["tone"], row["curve_tone"], row["worse"]) == (
        *("May overfit", "warn", "warn"),
        "",
    )
    unread = RunScan(read_sparkline(made.events_path))
    assert recent_row(summarize(made), unread)["word"] != "Worse" and entry["tone"] != "bad"


def test_a_going_run_whose_better_weights_are_kept_is_told_so(tmp_path):
    kept, again = BestKept(step=66, loss=0.593), EvalFinished(step=101, loss=1.6, loss_tokens=9000)
    _, found = best_then_worse(tmp_path, kept, again)
    told = verdict(found, "running", config=CONFIG).main
    assert told.tone == "warn" and told.text.startswith("Best at step 66, worse after")
    assert "1.600 now, 0.593 at step 66" in told.evidence


@pytest.mark.parametrize(
    "ended", [(), (BestKept(step=66, loss=0.593), ExportWritten(step=100, path="export"))]
)
def test_a_run_that_leaves_only_the_worse_weights_is_red(tmp_path, ended):
    made, found = best_then_worse(tmp_path, *ended, RunEnded("finished"))
    assert verdict(found, "finished").main.tone == "bad"
    row = run_row(summarize(made), scan=scanned(made))
    assert (row["word"], row["tone"], row["curve_tone"]) == ("Worse", "bad", "bad")


def test_the_least_bad_of_such_runs_is_not_the_best(snapshot):
    healthy = fold(read("ends", "healthy"))
    other = RunSnapshot()
    for record in read("ends", "rate-5"):
        if not isinstance(record.event, RunEnded):
            other.apply(record)
        if other.step == 90 and len(other.evals) == 4:
            break
    rows = {row["name"]: row for row in key_figures([snapshot, other], same_data=True)}
    assert rows["Validation loss, lowest"]["best"] is None
    assert rows["Validation loss, last"]["best"] is None
    rows = {row["name"]: row for row in key_figures([snapshot, healthy], same_data=True)}
    assert rows["Validation loss, lowest"]["best"] == 1
    # Nor is a run with a greater training loss than that of one that is worse than before.
    memorized = [fold(read("ends", name)) for name in ("six-rows", "six-other-rows")]
    rows = {row["name"]: row for row in key_figures(memorized, same_data=True)}
    assert rows["Training loss, last (smoothed)"]["best"] is None
    assert rows["Validation loss, last"]["best"] == 0


def test_answers_before_training_are_not_what_a_run_answered(tmp_path):
    """A run that was asked only before training was listed with "answered 0 of 16"."""
    made = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(made.path, made.id)
    recorder.emit(ExactMatchMeasured(0, "before", 0, 16))
    sparkline = read_sparkline(made.events_path)
    assert (sparkline.correct, sparkline.total, sparkline.accuracy) == (0, 0, None)
    shown = run_row(summarize(made), scan=RunScan(sparkline))["accuracy"]
    assert shown == {"share": "–", "count": "not tested yet"}
    recorder.emit(ExactMatchMeasured(30, "after", 4, 16))
    recorder.close()
    assert read_sparkline(made.events_path).accuracy == 0.25
    assert Sparkline().accuracy is None
    before = RunSnapshot(exact_matches=[ExactMatchMeasured(0, "before", 0, 16)])
    assert "Answers right, last" not in {row["name"] for row in key_figures([before], True)}


def test_the_log_says_finished_once(folder):
    recorder = RunRecorder(folder.path, folder.id)
    recorder.emit(RunEnded("finished", "Finished all 450 steps."))
    recorder.emit(RunEnded("failed", "The GPU was lost."))
    recorder.close()
    texts = [entry["text"] for entry in RunLog(folder.events_path).entries()["entries"]]
    assert "Finished all 450 steps." in texts and "Failed: The GPU was lost." in texts
    assert not any(text.startswith("Finished: Finished") for text in texts)

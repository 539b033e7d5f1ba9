"""Every number of the result card is of the weights that a person gets."""

from __future__ import annotations

import pytest

from app.pages.run.best import best_of
from app.pages.run.learning_figures import accuracy_figure, loss_figure
from app.pages.run.meters import meters
from app.pages.run.result import result
from app.pages.run.run_overview import details
from app.verdict.outcome import what_it_reached
from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    MemorySampled,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps
from tests.support.folded import fold
from tests.support.synthetic_run import GIB, records, run_events

LOSSES = {0: 4.0, 10: 2.0, 20: 1.5, 30: 2.5}
"""The validation losses by step: the best is not the last."""


def overfitted(exported: int | None, state="finished", evaluated=True, saved=(20, 30)):
    events = [RunStarted(name="n", total_steps=30), ExactMatchMeasured(0, "before", 1, 50)]
    for step in range(31):
        if step:
            events.append(StepFinished(step=step, loss=5.0 - step / 10, seconds=1.0))
        if evaluated and step in LOSSES:
            events.append(EvalFinished(step=step, loss=LOSSES[step], loss_tokens=900))
    events += [CheckpointWritten(step=step) for step in saved]
    events.append(ExactMatchMeasured(30, "after", 40, 50))
    if exported is not None:
        events.append(ExportWritten(step=exported, path="export"))
    return fold(records([*events, RunEnded(state)]))


def row(card, label):
    return next(row for row in card["rows"] if row["label"] == label)


def test_an_exported_best_shows_the_numbers_of_the_best():
    card = result(overfitted(20), "finished", SavedSteps(30, 30))
    assert card["title"].startswith("Finished 30 steps")
    assert "step 20, which were exported" in card["of"]
    loss = row(card, "Validation loss")
    assert (loss["from"], loss["since"], loss["to"]) == ("4", "before training", "1.5")
    assert loss["note"] == "the best of 4 evaluations"
    assert row(card, "Training loss")["to"] == "3"
    exact = row(card, "Answered exactly as expected")
    assert exact["from"] == "2 %" and exact["to"] == "not asked", "they were asked of step 30"
    assert card["actions"] == ["chat", "export", "train-on", "again"]


def test_an_exported_last_step_names_the_better_one():
    card = result(overfitted(30), "finished", SavedSteps(30, 30))
    loss = row(card, "Validation loss")
    assert loss["to"] == "2.5" and loss["note"] == "best 1.5 at step 20"
    assert row(card, "Answered exactly as expected")["to"] == "80 %"
    lost = result(overfitted(30, saved=(30,)), "finished", SavedSteps(30, 30))
    assert row(lost, "Validation loss")["note"] == "best 1.5 at step 20, whose weights are not kept"


def test_without_an_export_the_newest_checkpoint_counts():
    card = result(overfitted(None, "stopped"), "stopped", SavedSteps(20, 20))
    assert card["title"].startswith("Stopped at step 30 of 30")
    assert "step 20, the newest that were saved" in card["of"]
    assert row(card, "Validation loss")["to"] == "1.5"


def test_a_run_that_kept_its_best_is_known_by_the_best_unless_it_exports_the_last():
    stopped, saved = overfitted(None, "stopped"), SavedSteps(30, 30, best=20)
    card = result(stopped, "stopped", saved)
    assert "step 20, the best, which are kept" in card["of"]
    assert row(card, "Validation loss")["to"] == "1.5"
    card = result(stopped, "stopped", saved, "last")
    assert "step 30, the newest that were saved" in card["of"]
    alone = result(stopped, "stopped", SavedSteps(best=20), "last")
    assert "step 20, the best" in alone["of"]
    assert alone["actions"] == ["chat", "export", "train-on", "draft"]


def by_answers() -> RunSnapshot:
    """Returns a run that chose step 10, whose loss is not the lowest, by exact match."""
    events = [RunStarted(name="n", total_steps=30, best_by="exact_match")]
    events.append(ExactMatchMeasured(0, "before", 1, 50))
    for step in range(1, 31):
        events.append(StepFinished(step=step, loss=5.0 - step / 10, seconds=1.0))
        if step in LOSSES:
            events.append(EvalFinished(step=step, loss=LOSSES[step], loss_tokens=900))
            correct = {10: 45, 20: 30, 30: 40}[step]
            events.append(ExactMatchMeasured(step, "during", correct, 50))
    events += [BestKept(10, LOSSES[10], correct=45, total=50), ExportWritten(10, "export")]
    events.append(ExactMatchMeasured(10, "after", 45, 50))
    return fold(records([*events, RunEnded("finished")]))


def test_a_run_that_chose_by_exact_match_says_so_everywhere():
    snapshot = by_answers()
    card = result(snapshot, "finished", SavedSteps(30, 30, best=10))
    assert "step 10, which were exported" in card["of"]
    exact = row(card, "Answered exactly as expected")
    assert (exact["from"], exact["to"]) == ("2 %", "90 %")
    assert exact["note"] == "of 50 validation prompts; the best of 3 evaluations"
    loss = row(card, "Validation loss")
    assert loss["to"] == "2" and loss["note"] == "", "the lowest loss is not what was chosen by"
    other = result(snapshot, "finished", SavedSteps(30, 30, best=10), "last")
    assert row(other, "Answered exactly as expected") == exact
    shown = what_it_reached(snapshot)
    assert "exact match 2 % → 90 %, best 90 % at step 10" in shown
    assert "validation loss 2 → 2.5, lowest 1.5 at step 20" in shown
    loss_names = [trace["name"] for trace in loss_figure(snapshot, "step")["data"]]
    assert "best by exact match: step 10" in loss_names
    points, star = accuracy_figure(snapshot, "step")["data"]
    assert (list(star["x"]), list(star["y"])) == ([10], [90]) and len(points["x"]) == 5
    # What is shown before and after has no answers from in between.
    assert set(details(snapshot)["answers"]["scores"]) == {"before", "after"}


def test_without_evaluations_it_says_so():
    card = result(overfitted(30, evaluated=False), "finished", SavedSteps(30, 30))
    assert "nobody knows whether it learned more" in card["of"]
    assert [each["label"] for each in card["rows"]] == [
        "Answered exactly as expected",
        "Training loss",
    ]


@pytest.mark.parametrize(("state", "saved"), [("failed", None), ("discarded", None)])
def test_without_weights_there_is_nothing_to_export(state, saved):
    card = result(overfitted(None, state), state, NOTHING_SAVED)
    assert card["of"] == "No weights are left of this run." and card["rows"] == []
    assert card["actions"] == ["draft"]


def test_a_run_that_goes_on_or_has_no_step_has_no_card():
    going = fold(records(run_events(20, ended=None)))
    assert result(going, "running", NOTHING_SAVED) is None
    assert result(RunSnapshot(), "failed", NOTHING_SAVED) is None


def test_a_checkpoint_keeps_the_best_too():
    snapshot = overfitted(30)
    assert (best_of(snapshot).step, best_of(snapshot).kept) == (20, True)
    assert best_of(overfitted(30, saved=(30,))).kept is False
    assert best_of(RunSnapshot()) is None


def sampled(**values) -> RunSnapshot:
    return fold(records([StateChanged("running"), MemorySampled(step=1, **values)]))


def test_meters_tell_memory_against_its_limit():
    (host,) = meters(sampled(host_rss=100 * GIB, host_total=128 * GIB))
    assert host["text"] == "100 GiB of 128 GiB" and host["tone"] == "good"
    assert host["share"] == pytest.approx(100 / 128, abs=1e-4) and host["predicted"] is None
    full, gpu = meters(
        sampled(
            host_rss=127 * GIB, host_total=128 * GIB, gpu_allocated=40 * GIB, gpu_total=80 * GIB
        )
    )
    assert full["tone"] == "warn" and (gpu["name"], gpu["share"]) == ("GPU memory", 0.5)
    assert meters(sampled(host_rss=100 * GIB)) == [], "a limit that is not known is not drawn"
    assert meters(RunSnapshot()) == []

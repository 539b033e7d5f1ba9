"""Every number of the result is of the weights that a person gets."""

from __future__ import annotations

import pytest

from app.pages.run.best import best_of
from app.pages.run.facts import answers, validation_loss
from app.pages.run.learning_figures import accuracy_figure, loss_figure
from app.pages.run.result import result
from app.shared.run_bar import shown_tone
from app.verdict.judge import verdict
from app.verdict.outcome import what_it_reached
from engine.config.settings import TrainConfig
from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    RunEnded,
    RunStarted,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps
from tests.app.verdict.made_runs import CONFIG, steps
from tests.app.verdict.made_runs import fold as made_run
from tests.support.folded import fold
from tests.support.synthetic_run import records, run_events

LOSSES = {0: 4.0, 10: 2.0, 20: 1.5, 30: 2.5}
"""The validation losses by step: the best is not the last."""


def overfitted(
    exported: int | None, state="finished", evaluated=True, saved=(20, 30), right=(1, 40)
):
    before, after = right
    events = [RunStarted(name="n", total_steps=30), ExactMatchMeasured(0, "before", before, 50)]
    for step in range(31):
        if step:
            events.append(StepFinished(step=step, loss=5.0 - step / 10, seconds=1.0))
        if evaluated and step in LOSSES:
            events.append(EvalFinished(step=step, loss=LOSSES[step], loss_tokens=900))
    events += [CheckpointWritten(step=step) for step in saved]
    events.append(ExactMatchMeasured(30, "after", after, 50))
    if exported is not None:
        events.append(ExportWritten(step=exported, path="export"))
    return fold(records([*events, RunEnded(state)]))


def card_of(snapshot, saved, state="finished", export_from="best"):
    """What is shown of a run that is over, with all of its numbers."""
    return result(snapshot, state, saved, verdict(snapshot, state, saved), export_from)


def fact(card, label):
    return next(each for each in card["facts"] if each["label"] == label)


def test_an_exported_best_shows_the_numbers_of_the_best():
    snapshot = overfitted(20)
    card = card_of(snapshot, SavedSteps(30, 30))
    assert "Best model: step 20, exported." in card["text"]
    assert card["title"] == "Learned: validation loss fell from 4.000 to 1.500"
    loss = validation_loss(snapshot, 20, best_of(snapshot))
    assert (loss["since"], loss["at"]) == ("before", "best (step 20)")
    assert "Training loss" not in [each["label"] for each in card["facts"]]
    right = fact(card, "Answers right")
    assert (right["from"], right["to"]) == ("2 %", "not tested yet"), "they were asked of step 30"
    assert card["actions"] == ["chat", "export", "train-on", "draft"]


def test_an_exported_last_step_names_the_better_one():
    snapshot = overfitted(30)
    card = card_of(snapshot, SavedSteps(30, 30))
    loss = fact(card, "Validation loss")
    assert loss["to"] == "2.500" and loss["at"] == "step 30; best 1.500 (step 20)"
    assert card["title"] == "Learned it: 2 % right before, 80 % after"
    lost = card_of(overfitted(30, saved=(30,)), SavedSteps(30, 30))
    assert fact(lost, "Validation loss")["at"] == "step 30; best 1.500 (step 20, not kept)"


def test_a_run_without_a_right_answer_is_not_green_however_its_loss_fell():
    snapshot, saved = overfitted(30, right=(0, 0)), SavedSteps(30, 30)
    card = card_of(snapshot, saved)
    assert (
        card["title"] == "Validation loss fell from 4.000 to 2.500, but no tested answer is right"
    )
    assert verdict(snapshot, "finished", saved).main.tone == "calm"
    assert shown_tone(snapshot, "finished") == "calm"
    known = overfitted(30, right=(50, 50))
    assert shown_tone(known, "finished") == "good", "there was no answer to learn"


def test_a_model_of_an_example_is_called_too_small_for_other_data_where_it_answers_nothing_right():
    def shown(data, right=(0, 0)):
        values = CONFIG.to_dict() | {"data": {"source": data}}
        config = TrainConfig.from_dict(values | {"model": {"source": "assets/starter-model"}})
        snapshot, saved = overfitted(30, right=right), SavedSteps(30, 30)
        judged = verdict(snapshot, "finished", saved, config)
        card = result(snapshot, "finished", saved, judged)
        return card["text"], card["actions"][0]

    small = "This model was made for its example: choose a larger one for your own data."
    text, first = shown("own.csv")
    assert text.startswith(small) and first == "larger", "the button does what the text says"
    for text, first in (shown("own.csv", (0, 1)), shown("assets/starter.jsonl")):
        assert small not in text and first == "chat"


def test_without_an_export_the_newest_checkpoint_counts():
    card = card_of(overfitted(None, "stopped"), SavedSteps(20, 20), "stopped")
    assert card["title"] == "Stopped at step 30 of 30"
    assert "Best model: step 20." in card["text"]
    assert fact(card, "Validation loss")["to"] == "1.500"


def test_a_run_that_kept_its_best_is_known_by_the_best_unless_it_exports_the_last():
    stopped, saved = overfitted(None, "stopped"), SavedSteps(30, 30, best=20)
    card = card_of(stopped, saved, "stopped")
    assert "Best model: step 20." in card["text"]
    assert fact(card, "Validation loss")["to"] == "1.500"
    card = card_of(stopped, saved, "stopped", "last")
    assert "Newest saved model: step 30." in card["text"]
    alone = card_of(stopped, SavedSteps(best=20), "stopped", "last")
    assert "Best model: step 20." in alone["text"]
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
    saved = SavedSteps(30, 30, best=10)
    card = card_of(snapshot, saved)
    assert "step 10, exported" in card["text"]
    assert card["title"] == "Learned it: 2 % right before, 90 % after"
    right = answers(snapshot, 10, best_of(snapshot))
    assert (right["from"], right["to"], right["at"]) == ("2 %", "90 %", "of 50, best (step 10)")
    loss = fact(card, "Validation loss")
    assert loss["to"] == "2.000" and "best" not in loss["at"], "the loss is not what was chosen by"
    assert card_of(snapshot, saved, export_from="last")["title"] == card["title"]
    shown = what_it_reached(snapshot)
    assert "answers right 2 % → 90 %, best 90 % at step 10" in shown
    assert "validation loss 2.000 → 2.500, lowest 1.500 at step 20" in shown
    loss_names = [trace["name"] for trace in loss_figure(snapshot, "step")["data"]]
    assert "best by answers right: step 10" in loss_names
    points, star = accuracy_figure(snapshot, "step")["data"]
    assert (list(star["x"]), list(star["y"])) == ([10], [90]) and len(points["x"]) == 5


def test_a_rate_that_was_too_low_is_told_with_the_one_to_try():
    for state, is_told in (("finished", True), ("stopped", False)):
        fell = steps(200, loss=lambda step: 5 - step / 200)
        begin, end = (
            EvalFinished(step=step, loss=loss, loss_tokens=900)
            for step, loss in ((0, 5.0), (200, 4.2))
        )
        made = [begin, *fell, end, CheckpointWritten(step=200)]
        snapshot = made_run(*made, RunEnded(state), total=200)
        judged = verdict(snapshot, state, SavedSteps(200, 200), CONFIG)
        shown = result(snapshot, state, SavedSteps(200, 200), judged)
        sentence = "The loss was still falling at the end: try a learning rate of 0.0009 or more"
        assert (sentence in shown["text"]) == is_told
        assert shown["title"].startswith("Learned: validation" if is_told else "Stopped at")
        assert ("place" in (judged.to_dict()["offer"] or {})) == is_told


def test_without_evaluations_it_says_so():
    card = card_of(overfitted(30, evaluated=False), SavedSteps(30, 30))
    assert "may only have memorized its rows" in card["text"]
    assert [each["label"] for each in card["facts"]] == ["Training loss"]


@pytest.mark.parametrize(
    ("state", "says"),
    [("failed", "Nothing was saved."), ("discarded", "No weights are left of this run.")],
)
def test_without_weights_there_is_nothing_to_export(state, says):
    card = card_of(overfitted(None, state), NOTHING_SAVED, state)
    assert card["text"].endswith(says) and card["facts"] == []
    assert card["actions"] == ["draft"]


def test_a_run_that_goes_on_or_has_no_step_has_no_result():
    going = fold(records(run_events(20, ended=None)))
    assert card_of(going, NOTHING_SAVED, "running") is None
    assert card_of(RunSnapshot(), NOTHING_SAVED, "failed") is None


def test_an_interrupted_run_says_once_that_nothing_is_lost():
    snapshot = overfitted(None, "failed")
    kept = card_of(snapshot, SavedSteps(30, 30), "interrupted")
    assert kept["title"] == "Interrupted at step 30 of 30"
    assert kept["text"].startswith("Nothing is lost. Resume continues from step 30.")
    older = card_of(snapshot, SavedSteps(20, 20), "interrupted")
    assert older["text"].startswith("Resume continues from step 20.")


def no_better(*more):
    events = [RunStarted(name="n", total_steps=30), EvalFinished(0, 2.0, 900)]
    events += [StepFinished(step=step, loss=2.0, seconds=1.0) for step in range(1, 31)]
    return fold(records([*events, *more, EvalFinished(30, 2.0, 900), RunEnded("finished")]))


def test_a_run_that_is_no_better_is_amber_unless_it_answers_more():
    snapshot = no_better()
    judged = verdict(snapshot, "finished")
    assert card_of(snapshot, SavedSteps(30, 30))["title"] == "No better than before training"
    assert shown_tone(snapshot, "finished") == judged.main.tone == "warn"
    asked = [ExactMatchMeasured(0, "before", 1, 50), ExactMatchMeasured(30, "after", 40, 50)]
    better = no_better(*asked)
    assert (
        card_of(better, SavedSteps(30, 30))["title"] == "Learned it: 2 % right before, 80 % after"
    )
    assert shown_tone(better, "finished") == "good"


def test_a_checkpoint_keeps_the_best_too():
    snapshot = overfitted(30)
    assert (best_of(snapshot).step, best_of(snapshot).kept) == (20, True)
    assert best_of(overfitted(30, saved=(30,))).kept is False
    assert best_of(RunSnapshot()) is None

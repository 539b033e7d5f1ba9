"""The headline of a run says what the run's own record says."""

from __future__ import annotations

import math

import pytest

from app.view.headline import headline
from app.view.learning_signs import divergence, held_out
from app.view.run_bar import ShownRun, run_bar, sentence
from app.view.run_figures import alarms, summaries
from app.words import in_digits
from engine.checkpoints.saved_steps import NOTHING_SAVED, SavedSteps
from engine.config.settings import TrainConfig
from engine.runs.events import (
    EvalFinished,
    ExactMatchMeasured,
    MemorySampled,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.snapshot import RunSnapshot
from tests.support.synthetic_run import GIB, records, run_events

CONFIG = TrainConfig.from_dict(
    {
        "model": {"source": "m"},
        "data": {"source": "d"},
        "train": {"batch_size": 16, "steps": 100, "learning_rate": 3e-4},
    }
)


def fold(*events, total=100, device="cpu"):
    snapshot = RunSnapshot()
    begun = [RunStarted(device=device, total_steps=total), StateChanged("running")]
    for record in records([*begun, *events]):
        snapshot.apply(record)
    return snapshot


def falling(step):
    """A loss that falls from 4 to almost nothing, with noise."""
    return 0.01 + 4 * math.exp(-step / 12) + 0.02 * math.sin(1.7 * step)


def steps(count=100, loss=falling, **exposed):
    return [
        StepFinished(step=step, loss=loss(step), seconds=1.0, exposed=exposed)
        for step in range(1, count + 1)
    ]


def evaluated(*losses, tokens=2000):
    every = 100 // len(losses)
    return [
        EvalFinished(step=every * (place + 1), loss=loss, loss_tokens=tokens)
        for place, loss in enumerate(losses)
    ]


def growing(count=40, limit=100):
    return [
        MemorySampled(step=step, host_rss=GIB * (10 + step), host_total=limit * GIB)
        for step in range(1, count + 1)
    ]


OVERFIT = evaluated(1.67, 1.9, 2.4, 2.9, 3.25)


# ------------------------------------------------------------------ a run that is over


def test_a_finished_run_says_what_it_reached():
    matches = [
        ExactMatchMeasured(step=step, moment=moment, correct=correct, total=50)
        for step, moment, correct in ((0, "before", 1), (100, "after", 40))
    ]
    good = fold(*steps(), *evaluated(2.0, 1.0, 0.5), *matches, RunEnded("finished"))
    told = headline(good, "finished", SavedSteps(100, 100), CONFIG)
    assert (told.tone, told.advice, told.also, told.offer) == ("good", "", (), None)
    last = in_digits(good.loss)
    assert told.text == (
        f"Finished 100 steps: the last loss is {last}; held-out loss 2 → 0.5; exact match 2 % → "
        "80 %."
    )
    plain = headline(fold(*steps(), RunEnded("finished")), "finished")
    assert plain.text == f"Finished 100 steps: the last loss is {last}."


def test_a_finished_run_that_overfits_is_not_green_and_says_where_it_was_best():
    told = headline(
        fold(*steps(), *OVERFIT, RunEnded("finished")), "finished", SavedSteps(100, 100), CONFIG
    )
    assert told.tone == "warn" and "Compute-bound" not in told.text
    assert "held-out loss 1.67 → 3.25, lowest 1.67 at step 20" in told.text
    (remark,) = told.also
    assert remark.startswith("Held-out loss rises while the training loss falls: 3.25 now, 1.67")


def test_too_few_evaluations_make_no_verdict_but_no_green_either():
    risen = fold(*steps(), *evaluated(1.0, 2.0), RunEnded("finished"))
    told = headline(risen, "finished")
    assert (told.tone, told.also) == ("calm", ())
    assert "held-out loss 1 → 2, lowest 1 at step 50" in told.text


def test_memory_that_grew_in_a_finished_run_is_a_remark_with_its_numbers():
    grown = fold(*steps(), *growing(limit=400), RunEnded("finished"))
    told = headline(grown, "finished", SavedSteps(100, 100), CONFIG)
    assert told.text.startswith("Finished 100 steps") and told.tone == "good"
    assert told.also == ("Host memory grew by 20.0 GiB after step 21, to 50.0 GiB of 400 GiB.",)
    assert not alarms(grown) and "growing: 20.0 GiB" in summaries(grown)["memory"]
    assert "fresh memory" not in str(told)


def test_the_speed_of_a_run_that_is_over_is_a_remark():
    told = headline(
        fold(*steps(optimizer=0.3), RunEnded("finished")), "finished", SavedSteps(100, 100), CONFIG
    )
    assert told.text.startswith("Finished") and told.also[0].startswith("The optimizer takes 30 %")
    assert told.offer.changes["train.batch_size"] == 32


@pytest.mark.parametrize("saved, then", [(40, "checkpoint of step 40"), (None, "Start again")])
def test_a_failed_run_says_why_and_what_can_be_done(saved, then):
    failed = fold(*steps(0), RunEnded("failed", "Line 4 of rows.jsonl is not valid JSON."))
    told = headline(failed, "failed", SavedSteps(saved, saved), CONFIG)
    assert (told.text, told.tone) == ("Line 4 of rows.jsonl is not valid JSON.", "bad")
    assert then in told.advice and told.also == () and "first step" not in str(told)


@pytest.mark.parametrize("state", ["stopped", "failed", "interrupted", "discarded"])
@pytest.mark.parametrize("made", [0, 3])
def test_a_run_that_is_over_never_has_a_first_step_under_way(state, made):
    ended = [] if state == "interrupted" else [RunEnded(state)]
    told = headline(fold(*steps(made), *ended), state)
    assert "under way" not in told.text and told.text.endswith(".") and told.tone != "good"


@pytest.mark.parametrize(
    "saved, begins_anew, then", [(40, False, "Resume goes on"), (None, True, "Start again")]
)
def test_resume_is_offered_only_where_something_is_saved(saved, begins_anew, then):
    interrupted = fold(*steps(50))
    bar = run_bar(
        interrupted, ShownRun("run-1", "x", is_running=False, saved=SavedSteps(saved, saved))
    )
    assert (bar["actions"], bar["begins_anew"]) == (["resume"], begins_anew)
    assert then in bar["sentence"]
    paused = fold(*steps(5), StateChanged("paused"))
    assert run_bar(paused, ShownRun("run-1", "x", is_running=True))["begins_anew"] is False


def test_weights_alone_are_not_resumed_but_trained_on_from():
    ended = RunEnded("failed", "The GPU was lost.")
    alone, older = SavedSteps(40, None), SavedSteps(40, 30)
    told = headline(fold(*steps(50), ended), "failed", alone, CONFIG)
    assert (
        "new run from the weights of step 40; there is no full checkpoint" in told.advice
        and "Train on" in told.advice
    )
    told = headline(fold(*steps(50), ended), "failed", older, CONFIG)
    assert told.advice == "Resume goes on from the checkpoint of step 30."
    interrupted = fold(*steps(50))
    for saved, actions in ((alone, []), (older, ["resume"]), (NOTHING_SAVED, ["resume"])):
        bar = run_bar(interrupted, ShownRun("run-1", "x", is_running=False, saved=saved))
        assert bar["actions"] == actions and bar["begins_anew"] == (saved == NOTHING_SAVED)
    paused = fold(*steps(5), StateChanged("paused"))
    assert "resume" in run_bar(paused, ShownRun("r", "x", True, saved=alone))["actions"]


def test_a_run_without_checkpoints_offers_no_saving():
    running = fold(*steps(5))
    bar = run_bar(running, ShownRun("run-1", "x", True, saves=False))
    assert "stop" in bar["actions"] and "save" not in bar["actions"] and not bar["stop_saves"]
    asked = run_bar(running, ShownRun("run-1", "x", True, pending="stop", saves=False))
    assert asked["sentence"] == "Stop requested: finishing the step." and not asked["actions"]
    asked = run_bar(running, ShownRun("run-1", "x", True, pending="stop"))
    assert asked["sentence"] == "Stop requested: finishing the step, then saving."


# ------------------------------------------------------------------ an active run


def test_learning_comes_before_memory_and_memory_before_speed():
    snapshot = fold(*steps(40, optimizer=0.3), *growing())
    told = headline(snapshot, "running", config=CONFIG)
    assert told.text == "Host memory grows all along: 20.0 GiB more since step 21, 50.0 GiB now."
    full = int(told.advice.removeprefix("At this rate it is full at about step ").split()[0])
    assert 80 <= full <= 95
    assert told.also[0].startswith("The optimizer takes 30 %") and alarms(snapshot) == {"memory"}
    worse = headline(fold(*steps(), *OVERFIT, *growing(), total=200), "running", config=CONFIG)
    assert worse.tone == "warn" and worse.text.startswith("Held-out loss rises while")
    assert worse.also[0].startswith("Host memory grows all along")


def test_memory_that_lasts_to_the_end_is_no_headline():
    snapshot = fold(*steps(40), *growing(), total=45)
    told = headline(snapshot, "running", config=CONFIG)
    assert told.text.startswith("Compute-bound") and not alarms(snapshot)
    assert told.also[0].endswith("50.0 GiB now. At this rate it lasts to the end.")
    assert sentence(snapshot, "running") == told.text


def test_a_loss_that_diverges_is_the_headline_and_a_lower_rate_is_offered():
    rising = fold(*steps(60, loss=lambda step: falling(step) if step < 40 else 2.0 * (step - 39)))
    told = headline(rising, "running", config=CONFIG)
    assert told.tone == "warn" and told.text.startswith("The training loss rises: ")
    assert told.offer.changes == {"train.learning_rate": 1e-4}
    over = fold(*steps(60, loss=lambda step: 2.0 * step), RunEnded("finished"))
    assert headline(over, "finished", config=CONFIG).tone == "warn"


# ------------------------------------------------------------------ signs


def test_noise_a_spike_and_a_long_record_are_no_divergence():
    noisy = steps(200, loss=lambda step: 2 + 0.4 * math.sin(37 * step))
    spiked = steps(200, loss=lambda step: 50.0 if step == 197 else falling(step))
    for snapshot in (fold(*noisy), fold(*spiked), fold(*steps(29, loss=lambda step: 9.0 * step))):
        assert divergence(snapshot) is None
    whole = RunSnapshot()
    for record in records(run_events(300)):
        whole.apply(record)
    assert divergence(whole) is None and not held_out(whole).overfits


def test_a_small_rise_over_few_tokens_is_no_overfitting():
    few = fold(*steps(), *evaluated(1.0, 1.1, 1.2, 1.2, 1.2, tokens=100))
    assert not held_out(few).overfits
    many = fold(*steps(), *evaluated(1.0, 1.1, 1.2, 1.2, 1.2, tokens=10_000))
    assert held_out(many).overfits and held_out(many).best_step == 20
    rising = fold(*steps(loss=lambda step: 1 + step / 100), *evaluated(1.0, 1.5, 1.5, 1.5))
    assert not held_out(rising).overfits

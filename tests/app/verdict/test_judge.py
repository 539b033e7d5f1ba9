"""The headline of a run says what the run's own record says."""

from __future__ import annotations

import math

import pytest

from app.labels import in_loss
from app.pages.run.run_figures import alarms, summaries
from app.shared.run_bar import ShownRun, run_bar, sentence
from app.verdict.findings import Finding, Offer, Verdict
from app.verdict.judge import verdict
from engine.runs.record.events import (
    ExactMatchMeasured,
    PlanBuilt,
    RunEnded,
    StateChanged,
    StepSkipped,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps
from tests.app.verdict.made_runs import CONFIG, OVERFIT, evaluated, falling, fold, growing, steps


def rules(told):
    return [told.main.rule, *(found.rule for found in told.also)]


def fitted(count=100, **exposed):
    """Returns steps whose loss ends at 1, so that no row is known by heart."""
    return steps(count, loss=lambda step: 1 + falling(step), **exposed)


def matches(before, after, total=50):
    return [
        ExactMatchMeasured(step=step, moment=moment, correct=correct, total=total)
        for step, moment, correct in ((0, "before", before), (100, "after", after))
    ]


# ------------------------------------------------------------------ a run that is over


def test_a_finished_run_says_what_it_reached():
    good = fold(*steps(), *evaluated(2.0, 1.0, 0.5), *matches(1, 40), RunEnded("finished"))
    found = verdict(good, "finished", SavedSteps(100, 100), CONFIG)
    assert (found.main.tone, found.main.advice, found.offer) == ("good", "", None)
    assert rules(found) == ["doing well"]
    last = in_loss(good.loss)
    assert found.main.text == (
        f"Finished 100 steps: the last loss is {last}; validation loss 2.000 → 0.500; answers "
        "right 2 % → 80 %."
    )
    plain = verdict(fold(*steps(), RunEnded("finished")), "finished")
    assert plain.main.text == f"Finished 100 steps: the last loss is {last}."
    empty = verdict(fold(RunEnded("finished")), "finished").main
    assert (empty.text, empty.tone) == ("Finished 0 steps.", "calm")


def test_a_finished_run_that_overfits_says_so_first_and_where_it_was_best():
    found = verdict(
        fold(*fitted(), *OVERFIT, RunEnded("finished")), "finished", SavedSteps(100, 100), CONFIG
    )
    assert (found.main.rule, found.main.tone) == ("possibly overfitting", "warn")
    assert found.main.text.startswith("Finished 100 steps, but it possibly overfits: ")
    assert "validation loss 1.670 → 3.250, best 1.670 at step 20" in found.main.text
    assert "learns its rows by heart" in found.main.advice
    # The line over the run is no greener than the card below it.
    bar = sentence(fold(*fitted(), *OVERFIT, RunEnded("finished")), "finished", judged=found)
    assert bar == found.main.text
    alone = sentence(fold(*steps(), *evaluated(2.0, 1.0, 1.5), RunEnded("finished")), "finished")
    assert alone.endswith("validation loss 2.000 → 1.500, best 1.000 at step 66.")
    assert "3 of 5 evaluations" in found.main.evidence


def test_too_few_evaluations_make_no_alarm():
    risen = fold(*steps(), *evaluated(1.0, 2.0), RunEnded("finished"))
    found = verdict(risen, "finished")
    assert not found.main.is_alarm and rules(found) == ["doing well"]
    assert "validation loss 1.000 → 2.000, best 1.000 at step 50" in found.main.text
    assert found.main.tone == "calm"  # it ended above its best, by more than the noise


def test_a_loss_that_falls_without_an_exact_answer_is_no_failure_and_not_green():
    found = verdict(fold(*steps(), *matches(0, 0), RunEnded("finished")), "finished")
    assert found.main.tone == "calm" and "answers right 0 % → 0 %" in found.main.text
    assert rules(found)[1] == "nothing exact" and not found.also[0].is_alarm
    few = verdict(fold(*steps(), *matches(0, 0, total=19), RunEnded("finished")), "finished")
    assert "nothing exact" not in rules(few)


def test_memory_and_speed_of_a_finished_run_are_remarks():
    events = [*steps(optimizer=0.3), *growing(limit=400), RunEnded("finished")]
    grown = fold(*events, device="cuda")
    found = verdict(grown, "finished", SavedSteps(100, 100), CONFIG)
    assert found.main.text.startswith("Finished 100 steps") and found.main.tone == "good"
    assert rules(found) == ["doing well", "memory", "speed"]
    assert found.also[0].text == ("RAM grew by 30.0 GiB after step 31, to 70.0 GiB of 400 GiB.")
    assert not alarms(grown) and "growing: 30.0 GiB" in summaries(grown)["memory"]
    assert "free the memory" not in str(found)
    assert found.also[1].text.startswith("The GPU waits 30 % of the time for the CPU optimizer")
    assert found.offer.changes["train.batch_size"] == 32


@pytest.mark.parametrize(
    "saved, then", [(40, "Resume continues from step 40"), (None, "Nothing was saved.")]
)
def test_a_failed_run_says_why_and_what_can_be_done(saved, then):
    failed = fold(*steps(0), RunEnded("failed", "Line 4 of rows.jsonl is not valid JSON."))
    reported = verdict(failed, "failed", SavedSteps(saved, saved), CONFIG)
    found = reported.main
    assert (found.text, found.tone) == ("Line 4 of rows.jsonl is not valid JSON.", "bad")
    assert then in found.advice
    assert reported.also == ()
    assert "first step" not in str(reported)


def test_the_speed_of_a_stopped_run_is_a_remark_and_of_a_failed_one_no_matter():
    slow = fold(*steps(optimizer=0.3), device="cuda")
    found = verdict(slow, "interrupted", config=CONFIG)
    assert rules(found) == ["ended", "speed"] and found.offer is not None
    assert rules(verdict(slow, "failed", config=CONFIG)) == ["ended"]


def test_a_failed_run_that_diverged_has_neither_a_green_headline_nor_one_of_the_machine():
    ended = RunEnded("failed", "The loss of step 61 is not a finite number.")
    risen = steps(60, loss=lambda step: 5.0 if step < 40 else 10.0 ** (step - 39))
    reported = verdict(fold(*risen, *growing(), ended), "failed", config=CONFIG)
    assert (reported.main.rule, reported.main.tone) == ("ended", "bad")
    assert reported.main.text == ended.reason
    assert reported.also[0].rule == "diverging"
    assert reported.offer.changes == {"train.learning_rate": 1e-4}
    assert all(found.tone != "good" for found in reported.also) and "ompute" not in str(reported)


@pytest.mark.parametrize("state", ["stopped", "failed", "interrupted", "discarded"])
@pytest.mark.parametrize("made", [0, 3])
def test_a_run_that_is_over_never_has_a_first_step_under_way(state, made):
    ended = [] if state == "interrupted" else [RunEnded(state)]
    found = verdict(fold(*steps(made), *ended), state).main
    assert "under way" not in found.text
    assert found.text.endswith(".")
    assert found.tone != "good"


@pytest.mark.parametrize(
    "saved, begins_anew, then", [(40, False, "Resume continues"), (None, True, "Start again")]
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
    # What failed with nothing saved would fail again.
    failed = fold(*steps(50), RunEnded("failed"))
    kept = SavedSteps(saved, saved)
    bar = run_bar(failed, ShownRun("run-1", "x", is_running=False, saved=kept))
    assert bar["actions"] == ([] if begins_anew else ["resume"])


def test_weights_alone_are_not_resumed_but_trained_on_from():
    ended = RunEnded("failed", "The GPU was lost.")
    alone, older = SavedSteps(40, None), SavedSteps(40, 30)
    found = verdict(fold(*steps(50), ended), "failed", alone, CONFIG).main
    assert (
        "It cannot be resumed. Continue training from here starts a new run from step 40."
        in found.advice
    )
    assert "Continue training from here" in found.advice
    found = verdict(fold(*steps(50), ended), "failed", older, CONFIG).main
    assert found.advice == "Resume continues from step 30."
    interrupted = fold(*steps(50))
    for saved, actions in ((alone, []), (older, ["resume"]), (NOTHING_SAVED, ["resume"])):
        bar = run_bar(interrupted, ShownRun("run-1", "x", is_running=False, saved=saved))
        assert bar["actions"] == actions and bar["begins_anew"] == (saved == NOTHING_SAVED)
    paused = fold(*steps(5), StateChanged("paused"))
    assert "resume" in run_bar(paused, ShownRun("r", "x", True, saved=alone))["actions"]


def test_a_run_without_checkpoints_offers_no_saving():
    running = fold(*steps(5))
    bar = run_bar(running, ShownRun("run-1", "x", True, saves=False))
    assert "stop" in bar["actions"]
    assert "save" not in bar["actions"]
    assert not bar["stop_saves"]
    asked = run_bar(running, ShownRun("run-1", "x", True, pending="stop", saves=False))
    assert asked["sentence"] == "Stop requested: finishing the step." and not asked["actions"]
    asked = run_bar(running, ShownRun("run-1", "x", True, pending="stop"))
    assert asked["sentence"] == "Stop requested: finishing the step, then saving."


# ------------------------------------------------------------------ an active run


def test_before_the_first_step():
    def said(snapshot, state):
        return verdict(snapshot, state, config=CONFIG).main.text

    assert said(RunSnapshot(), "preparing") == "Preparing: the first step has not begun."
    assert said(RunSnapshot(state="running"), "running") == "The first step is under way."
    compiled = fold(PlanBuilt(choices={"compiled": True}))
    assert said(compiled, "running").startswith("The first step is under way. It also compiles")


def test_findings_stand_in_their_order():
    late = {"optimizer": 0.3}
    soon = [*growing(per_step=1.2)]
    events = [*steps(60, **late), *soon]
    found = verdict(fold(*events, device="cuda"), "running", config=CONFIG)
    assert rules(found) == ["memory ends soon", "speed", "doing well"]
    events = [*fitted(100, **late), *OVERFIT, *growing(100, per_step=0.5, limit=200)]
    found = verdict(fold(*events, total=5000, device="cuda"), "running", config=CONFIG)
    assert rules(found) == ["memory ends soon", "possibly overfitting", "speed"]
    slow = fold(*events, total=5000, device="cuda")
    for place in range(len(slow.steps)):
        slow.steps.seconds[place] = 100.0
        slow.steps.exposed["optimizer"][place] = 30.0
    found = verdict(slow, "running", config=CONFIG)
    assert rules(found) == ["possibly overfitting", "memory in danger", "speed"]
    skipped = verdict(fold(*steps(50), StepSkipped(51, "loss", [3])), "running", config=CONFIG)
    assert rules(skipped)[:2] == ["skipped steps", "doing well"]
    assert skipped.main.text.startswith("1 step was skipped of the latest 100")


def test_calm_findings_of_memory_and_speed_stand_under_what_the_run_learns():
    snapshot = fold(*steps(60), *growing(limit=400), total=65)
    found = verdict(snapshot, "running", config=CONFIG)
    assert rules(found) == ["doing well", "speed", "memory"] and not alarms(snapshot)
    assert found.also[1].text == "RAM grows, but lasts to the end: 70.0 GiB of 400 GiB now."
    assert sentence(snapshot, "running") == found.main.text


def test_a_full_disk_is_the_headline():
    full = StateChanged("paused", "The disk is full: free 3 GiB.", "checkpoint")
    diverged = steps(60, loss=lambda step: 1.0 if step < 40 else 90.0)
    found = verdict(fold(*diverged, full), "paused", config=CONFIG)
    assert rules(found)[:2] == ["disk", "diverging"]
    assert found.main.text == "Paused: the disk is full"
    assert found.main.advice == "Free 3 GiB. The run goes on by itself once there is space."
    before = verdict(fold(full), "paused", config=CONFIG)
    assert before.main.rule == "disk" and before.also[0].text == "No step was made yet."


def test_a_paused_run_says_whether_it_learns():
    found = verdict(fold(*steps(60), StateChanged("paused")), "paused")
    assert found.main.rule == "doing well"


# ------------------------------------------------------------------ what pages receive


def test_pages_receive_every_finding_with_its_evidence_and_the_first_offer():
    offer = Offer("engine.slots: auto", {"engine.slots": "auto"})
    found = Verdict(
        Finding("overfitting", "warn", "One.", "Two.", "Three."),
        (Finding("speed", "warn", "engine.slots was set.", evidence="Four.", offer=offer),),
    )
    assert found.to_dict() == {
        "rule": "overfitting",
        "tone": "warn",
        "text": "One.",
        "advice": "Two.",
        "evidence": "Three.",
        "offer": {
            "label": "Slots: auto",
            "changes": {"engine.slots": "auto"},
            "place": "reasons",
            "stops": False,
        },
        "also": [
            {
                "rule": "speed",
                "tone": "warn",
                "text": "Slots was set.",
                "advice": "",
                "evidence": "Four.",
            }
        ],
    }
    assert Verdict(found.main).to_dict()["offer"] is None


def test_every_sentence_ends_and_every_alarm_has_its_evidence():
    nothing = fold(*steps(120, loss=lambda step: 5 + 0.01 * math.sin(step)), total=300)
    diverged = fold(*steps(60, loss=lambda step: 1.0 if step < 40 else 90.0), *growing())
    for snapshot in (nothing, diverged, fold(*steps(), *OVERFIT), fold(*steps(7))):
        reported = verdict(snapshot, "running", config=CONFIG)
        for found in (reported.main, *reported.also):
            assert found.text.endswith(".") and (found.evidence.endswith(".") or not found.is_alarm)

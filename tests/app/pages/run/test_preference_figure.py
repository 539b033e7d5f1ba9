"""The figure of pairs, its sentence, and the number of the head."""

from __future__ import annotations

from app.pages.run.facts import preferred
from app.pages.run.preference_figure import preference_figure, preference_summary
from engine.runs.record.events import EvalFinished, Record, RunEnded, RunStarted, StepFinished
from engine.runs.record.snapshot import RunSnapshot


def snapshot_of(*events) -> RunSnapshot:
    snapshot = RunSnapshot()
    for number, event in enumerate(events, 1):
        snapshot.apply(Record("run", number, float(number), event))
    return snapshot


def figures(margin: float, ahead: float) -> dict[str, float]:
    return {
        "rewards/chosen": margin / 2,
        "rewards/rejected": -margin / 2,
        "rewards/margins": margin,
        "rewards/accuracies": ahead,
    }


def test_a_run_of_pairs_is_drawn_and_told():
    snapshot = snapshot_of(
        EvalFinished(0, 0.69, preference=figures(0.0, 0.0)),
        StepFinished(1, 0.69, preference=figures(0.1, 0.5)),
        StepFinished(2, 0.5, preference=figures(0.5, 1.0)),
        EvalFinished(2, 0.5, preference=figures(0.4, 0.75)),
        RunEnded("finished"),
    )
    drawn = preference_figure(snapshot, "step")
    assert not drawn.get("is_absent")
    by_name = {trace["name"]: trace for trace in drawn["data"]}
    assert by_name["margin, validation"]["y"] == [0, 0.4]
    assert by_name["ahead, validation"]["y"] == [0, 75]
    assert preference_summary(snapshot) == "validation: margin 0.4, chosen ahead in 75 % at step 2"
    fact = preferred(snapshot, 2)
    # Before training, all rewards are 0, which says nothing.
    assert (fact["from"], fact["to"], fact["at"]) == ("", "75 %", "mean margin 0.400")


def test_steps_without_good_or_bad_answers_leave_the_curves_of_kto():
    good, bad = {"rewards/chosen": 0.5, "kl": 0.0}, {"rewards/rejected": -0.5, "kl": 0.0}
    events = []
    for step in range(1, 121):
        own = (good, bad, good | bad | {"rewards/margins": step / 100})[step % 3]
        events.append(StepFinished(step, 0.5, preference=own))
    snapshot = snapshot_of(*events, StepFinished(121, 0.5, preference=good))
    drawn = {trace["name"]: trace for trace in preference_figure(snapshot, "step")["data"]}
    assert drawn["chosen"]["y"] == [0.5] * 81 and drawn["chosen"]["x"][-1] == 121
    assert drawn["rejected"]["y"] == [-0.5] * 80 and drawn["rejected"]["x"][-1] == 119
    margins = drawn["margin"]
    assert margins["x"] == list(range(2, 121, 3))
    assert None not in margins["y"] and margins["y"] == sorted(margins["y"])
    assert preference_summary(snapshot) == "margin 1.19 at step 119"


def test_other_runs_have_no_such_figure():
    snapshot = snapshot_of(StepFinished(1, 0.69), EvalFinished(1, 0.5))
    assert preference_figure(snapshot, "step")["is_absent"]
    assert preference_summary(snapshot) == ""


def test_a_resume_drops_the_figures_of_later_steps():
    snapshot = snapshot_of(
        StepFinished(1, 0.6, preference=figures(0.1, 0.5)),
        StepFinished(2, 0.6),
        StepFinished(3, 0.5, preference=figures(0.5, 1.0)),
        RunStarted(resumed_step=1),
        StepFinished(2, 0.5, preference=figures(0.3, 1.0)),
    )
    assert snapshot.steps.preference["rewards/margins"].tolist() == [0.1, 0.3]

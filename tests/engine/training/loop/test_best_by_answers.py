"""A run may choose its best weights by exact match: what it keeps, exports, ends early by and tells
then is all of one step.
"""

from __future__ import annotations

import json

import pytest

import launch
from engine.config.export_choice import ExportChoice
from engine.errors import RunError
from engine.runs.record.events import (
    EvalFinished,
    ExactMatchMeasured,
    LogLine,
    StepFinished,
)
from engine.runs.record.validation import Score
from engine.training.checkpoints.saved_on_disk import saved_best, saved_steps
from engine.training.export.export import export_run
from engine.training.loop.run import Run, resume_run, start_run
from tests.support.folders import WORDS, make_config
from tests.support.overfitting import overfitting
from tests.support.trained_runs import events_of, execute

BY_ANSWERS = {
    "output.keep_best": "exact_match",
    "output.exact_match_samples": 12,
    "train.learning_rate": 8e-3,
}
"""With this rate the lowest loss comes after the most exact answers."""


def started(tmp_path, name: str = "runs", **values) -> Run:
    return start_run(overfitting(tmp_path, **BY_ANSWERS | values), tmp_path / name)


def asked_during(run: Run) -> dict[int, int]:
    asked = events_of(run, ExactMatchMeasured)
    return {event.step: event.correct for event in asked if event.moment == "during"}


def losses_of(run: Run) -> dict[int, float]:
    return {event.step: event.loss for event in events_of(run, EvalFinished)}


def expected_best(run: Run) -> int:
    """Returns the first step with the most answers and, of these, the lowest loss."""
    correct, losses = asked_during(run), losses_of(run)
    return min(correct, key=lambda step: (-correct[step], losses[step], step))


def log_of(run: Run) -> str:
    return "\n".join(line.text for line in events_of(run, LogLine))


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_the_best_by_exact_match_is_kept_exported_and_told_everywhere(tmp_path, capsys):
    run = started(tmp_path, **{"output.export": True})
    assert execute(run).state == "finished"
    assert list(asked_during(run)) == [6, 12, 18, 24, 30, 36]
    step, losses = expected_best(run), losses_of(run)
    by_loss = min((of for of in losses if of), key=losses.__getitem__)
    assert step not in (by_loss, 36), "this run cannot tell one criterion from the other"
    snapshot = run.recorder.snapshot
    score = Score(step, losses[step], asked_during(run)[step], 12)
    best = snapshot.best
    assert best.kept and best.by == "exact_match"
    assert (best.step, best.loss, best.correct, best.total) == (step, score.loss, score.correct, 12)
    assert saved_best(run.folder.best_path) == score
    assert snapshot.exported_step == step
    found = f"The weights of step {step} are exported: they answer {score.correct} of 12 validation"
    assert found in log_of(run)
    after = events_of(run, ExactMatchMeasured)[-1]
    assert (after.moment, after.step, after.correct) == ("after", step, score.correct)
    assert len(after.samples) == 8, "the answers are those of these weights"
    # The command line says the same.
    runs = ["--runs-dir", str(tmp_path / "runs")]
    assert launch.main(["runs", *runs]) == 0
    (head, line) = capsys.readouterr().out.splitlines()
    assert "best" in head and f"step {step}, exact {score.correct}/12" in line
    assert launch.main(["runs", "--json", *runs]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["best"] == {
        "step": step,
        "loss": losses[step],
        "correct": score.correct,
        "total": 12,
        "by": "exact_match",
    }
    home = ["export", run.id, str(tmp_path / "home"), *runs, "--weights", "best"]
    assert launch.main(home) == 0 and f"the model of step {step}" in capsys.readouterr().out


def test_a_run_by_loss_says_so_in_the_list_and_one_without_best_says_nothing(tmp_path, capsys):
    by_loss = {"output.keep_best": "loss", "train.steps": 6}
    run = started(tmp_path, **by_loss)
    assert execute(run).state == "finished" and not asked_during(run)
    none = started(tmp_path, **by_loss | {"output.keep_best": "none"})
    assert execute(none).state == "finished"
    runs = ["--runs-dir", str(tmp_path / "runs")]
    assert launch.main(["runs", *runs]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    loss = losses_of(run)[6]
    assert f"step 6, loss {loss:.4f}" in lines[run.id] and "step 6" not in lines[none.id]
    assert launch.main(["runs", "--json", *runs]) == 0
    best = {each["id"]: each["best"] for each in json.loads(capsys.readouterr().out)}
    assert best[run.id]["by"] == "loss" and best[none.id] is None


def test_a_patience_waits_for_exact_match(tmp_path):
    run = started(tmp_path, **{"train.patience": 2, "output.export": True})
    reason = execute(run).reason
    step = expected_best(run)
    assert reason.startswith(
        f"Ended early, after step {step + 12} of 36: the share of right answers was best"
    )
    assert f"at step {step}, and 2 evaluations since were not better" in reason
    assert run.recorder.snapshot.exported_step == step


@pytest.mark.slow("it tries a fault at many moments of a run")
@pytest.mark.parametrize("stop", [15, 27])
def test_a_resume_goes_on_with_the_same_best(tmp_path, stop):
    whole = started(tmp_path, "whole")
    execute(whole)
    run = started(tmp_path)
    assert execute(run, {stop: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert asked_during(again) == asked_during(whole)
    ours, theirs = (one.recorder.snapshot for one in (again, whole))
    assert ours.best == theirs.best and ours.validation == theirs.validation
    assert saved_best(again.folder.best_path) == saved_best(whole.folder.best_path)


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_a_resume_that_chooses_by_answers_begins_to_compare(tmp_path):
    """What was kept for its loss makes way for the next evaluation, however high its loss."""
    run = started(tmp_path, **{"output.keep_best": "loss"})
    assert execute(run, {21: "stop"}).state == "stopped" and not asked_during(run)
    assert saved_steps(run.folder.checkpoints_path, run.folder.best_path).best == 18
    again = resume_run(tmp_path / "runs", run.id, ["output.keep_best=exact_match"])
    assert execute(again).state == "finished"
    assert "output.keep_best was loss up to step" in log_of(again)
    assert "are not compared with later ones" in log_of(again)
    assert list(asked_during(again)) == [24, 30, 36]
    best = again.recorder.snapshot.best
    assert best.step == expected_best(again)
    assert best.kept
    assert best.by == "exact_match"


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_a_resume_that_chooses_by_loss_knows_all_losses(tmp_path):
    run = started(tmp_path)
    assert execute(run, {27: "stop"}).state == "stopped" and asked_during(run)
    again = resume_run(tmp_path / "runs", run.id, ["output.keep_best=loss"])
    assert execute(again).state == "finished"
    losses = losses_of(again)
    best = again.recorder.snapshot.best
    assert best.by == "loss" and best.step == min((s for s in losses if s), key=losses.get)
    # The step before the resume was not kept if it had fewer exact answers.
    assert best.kept == (saved_best(again.folder.best_path).step == best.step)


def test_rows_without_prompts_leave_the_last_and_say_what_to_do(tmp_path):
    texts = tmp_path / "texts.jsonl"
    rows = [json.dumps({"text": f"{WORDS[place % 7]} {WORDS[place % 5]}"}) for place in range(30)]
    texts.write_text("\n".join(rows), encoding="utf-8")
    values = {
        "data.source": str(texts),
        "data.eval_fraction": 0.3,
        "train.steps": 4,
        "output.eval_every": 2,
        "output.export": True,
    }
    config = make_config(tmp_path, **BY_ANSWERS | values)
    run = start_run(config, tmp_path / "runs")
    assert execute(run).state == "finished"
    assert "output.keep_best: exact_match compares nothing" in log_of(run)
    assert "set it to loss" in log_of(run)
    snapshot = run.recorder.snapshot
    assert snapshot.best is None and snapshot.exported_step == 4
    assert not run.folder.best_path.exists()


def test_a_run_with_the_best_alone_says_what_is_kept_and_is_trained_on_from(tmp_path):
    run = started(tmp_path, **{"output.checkpoint": "none", "output.keep_best": "loss"})
    reason = execute(run, {20: "stop"}).reason
    assert "the best weights, those of step 18, are kept, and a resume begins anew" in reason
    assert not run.folder.checkpoints_path.exists()
    found = saved_steps(run.folder.checkpoints_path, run.folder.best_path)
    assert (found.newest, found.best, found.trained_on) == (None, 18, 18)
    assert found.exported("best") == found.exported("last") == 18
    values = {"model.start_from": str(run.folder.path), "train.steps": 1}
    again = start_run(overfitting(tmp_path, **values), tmp_path / "again")
    assert execute(again).state == "finished"
    assert events_of(again, EvalFinished)[0].loss == losses_of(run)[18]
    assert events_of(again, StepFinished)[-1].step == 1
    # An export that asks for the last takes what there is; one that insists is refused.
    runs = ["--runs-dir", str(tmp_path / "runs")]
    run.folder.save_config(run.folder.config.with_values({"output.export_from": "last"}))
    assert launch.main(["export", run.id, str(tmp_path / "home"), *runs]) == 0
    with pytest.raises(RunError, match="has no checkpoint; take its best weights"):
        export_run(tmp_path / "runs", run.id, tmp_path / "o", ExportChoice(weights="last"))

"""A run that makes its model worse keeps nothing as the best, and says so to its last line."""

from __future__ import annotations

import json

import pytest

import launch
from engine.runs.record.before_training import worse_than_before
from engine.runs.record.events import EvalFinished, LogLine
from engine.runs.summaries.sparkline import read_sparkline
from engine.tools.cli.train import show_run
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.loop.run import start_run
from tests.support.overfitting import overfitting
from tests.support.trained_runs import events_of, execute

EXPLODES = {
    "train.learning_rate": 5.0,
    "train.schedule": "constant",
    "train.max_grad_norm": None,
    "output.export": True,
}


def losses_of(run):
    return {event.step: event.loss for event in events_of(run, EvalFinished)}


@pytest.fixture(scope="module")
def exploded(tmp_path_factory):
    place = tmp_path_factory.mktemp("exploded")
    run = start_run(overfitting(place, **EXPLODES), place / "runs")
    ended = execute(run)
    losses = losses_of(run)
    assert all(loss > 2 * losses[0] for step, loss in losses.items() if step)
    return run, ended


def test_nothing_is_kept_as_the_best_and_the_log_says_why(exploded):
    run, ended = exploded
    losses, snapshot = losses_of(run), run.recorder.snapshot
    assert snapshot.best is None and snapshot.validation.kept is None
    assert saved_steps(run.folder.checkpoints_path, run.folder.best_path).best is None
    assert snapshot.exported_step == 36
    found = [line for line in events_of(run, LogLine) if line.level == "warning"]
    assert any(
        line.text == "The weights of the last step are exported, though no evaluation was better "
        f"than that before training (validation loss {losses[0]:.4f})."
        for line in found
    )
    card = (run.folder.export_path / "README.md").read_text(encoding="utf-8")
    assert "**Worse than before training: the validation loss is" in card
    assert "Lowest validation loss" not in card
    assert ended.reason == (
        "Finished all 36 steps. Worse than before training: the validation loss is "
        f"{losses[36]:.4f}, and was {losses[0]:.4f} before training."
    )


def test_the_list_in_a_terminal_says_it(exploded, capsys):
    run, _ = exploded
    losses = losses_of(run)
    runs = ["--runs-dir", str(run.folder.path.parent)]
    assert launch.main(["runs", *runs]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert f"none: validation {losses[36]:.4f}, before {losses[0]:.4f}" in line
    assert launch.main(["runs", "--json", *runs]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["best"] is None
    assert listed["worse_than_before_training"]["of"] == "validation"


def test_a_glance_judges_as_the_whole_record_does(exploded):
    run, _ = exploded
    sparkline = read_sparkline(run.folder.events_path)
    worse = worse_than_before(run.recorder.snapshot)
    assert worse is not None
    assert sparkline.worse == worse
    assert sparkline.before == worse.before


def test_the_last_lines_of_the_command_say_it(tmp_path, capsys):
    values = EXPLODES | {"train.steps": 12, "output.export": False}
    run = start_run(overfitting(tmp_path, **values), tmp_path / "runs")
    assert show_run(run, tmp_path / "runs") == 0
    out = capsys.readouterr().out
    losses = losses_of(run)
    assert f"Step 6: validation loss {losses[6]:.4f}, above the {losses[0]:.4f} before" in out
    assert "warning: No weights are kept as the best: no evaluation was better" in out
    assert "the best weights so far" not in out
    assert out.rstrip().endswith(
        f"Worse than before training: the validation loss is {losses[12]:.4f}, and was "
        f"{losses[0]:.4f} before training."
    )


def test_patience_counts_from_before_training(tmp_path):
    values = EXPLODES | {"train.patience": 2, "output.export": False}
    run = start_run(overfitting(tmp_path, **values), tmp_path / "runs")
    reason = execute(run).reason
    assert reason.startswith(
        "Ended early, after step 12 of 36: the validation loss was best before training, and 2 "
        "evaluations since were not better (train.patience)."
    )


def test_without_evaluations_the_first_step_is_what_was_before(tmp_path):
    values = EXPLODES | {"output.eval_every": 0, "data.eval_fraction": 0.0}
    run = start_run(overfitting(tmp_path, **values | {"output.export": False}), tmp_path / "runs")
    ended = execute(run)
    assert "Worse than before training: the training loss is" in ended.reason
    worse = worse_than_before(run.recorder.snapshot)
    assert worse.of == "training" and worse.before == run.recorder.snapshot.steps.loss[0]
    assert read_sparkline(run.folder.events_path).worse == worse

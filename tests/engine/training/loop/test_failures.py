"""A step that fails before its updates loses nothing: the last good step is saved, or the run gets
over the failure by itself.
"""

from __future__ import annotations

import pytest
import torch

from engine.errors import NonFiniteError, RunError
from engine.planning.schedule.choices import PlanChoices
from engine.runs.record.events import (
    CheckpointWritten,
    EvalFinished,
    LogLine,
    RunStarted,
    StateChanged,
    StepFinished,
    StepSkipped,
)
from engine.runs.record.following import replay
from engine.runtime.host.plane_version import PlaneVersion
from engine.runtime.step.executor import Executor
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.loop import step_loop
from engine.training.loop.run import resume_run, start_run
from engine.training.loop.step_loop import refuse_further
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed, tiny_config
from tests.support.trained_runs import events_of, execute, planes_on_disk

# ---------------------------------------------------------------------- numbers


def test_a_loss_that_is_not_finite_saves_the_step_before(tmp_path, bad_row):
    run = start_run(bad_row(), tmp_path / "runs")
    ended = execute(run)
    assert (ended.state, ended.error_type) == ("failed", "NonFiniteError")
    assert "step 2" in ended.reason and "step 1 is saved" in ended.reason
    assert "train.nonfinite=skip" in ended.reason
    assert [c.step for c in events_of(run, CheckpointWritten)] == [1]


def test_a_resume_goes_on_with_skip_and_equals_a_run_that_skipped_from_the_start(tmp_path, bad_row):
    runs = tmp_path / "runs"
    stopped = start_run(bad_row(), runs)
    assert execute(stopped).state == "failed"
    again = resume_run(runs, stopped.id, ["train.nonfinite=skip"])
    assert execute(again).state == "finished"
    assert events_of(again, RunStarted)[-1].resumed_step == 1
    whole = start_run(bad_row(**{"train.nonfinite": "skip"}), runs)
    assert execute(whole).state == "finished"
    assert planes_on_disk(again) == planes_on_disk(whole)

    skipped = events_of(whole, StepSkipped)
    assert [(event.step, event.what, event.rows) for event in skipped] == [
        (2, "loss", [4, 5, 6, 7]),
        (4, "loss", [12, 13, 14, 15]),
    ]
    assert [event.step for event in events_of(whole, StepFinished)] == [1, 3, 5, 6, 7, 8]
    logged = [line.text for line in events_of(whole, LogLine) if line.level == "warning"]
    assert any("Step 2 is skipped" in text and "4, 5, 6, 7" in text for text in logged)
    replayed = fold(replay(whole.folder.events_path))
    assert replayed == whole.recorder.snapshot and replayed.damaged_lines == 0
    assert [event.step for event in replayed.skipped] == [2, 4] and replayed.step == 8


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_stopping_around_skipped_steps_changes_no_bit(tmp_path, bad_row, stop_at):
    """The checkpoint keeps which steps were skipped, since AdamW does not count them."""
    config = bad_row(**{"train.nonfinite": "skip"})
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    part = start_run(config, tmp_path / "runs")
    assert execute(part, {stop_at: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    assert planes_on_disk(again) == planes_on_disk(whole)


def test_a_last_step_that_is_skipped_ends_the_run(tmp_path, bad_row):
    run = start_run(bad_row(**{"train.nonfinite": "skip", "train.steps": 2}), tmp_path / "runs")
    assert execute(run).state == "finished"
    assert [c.step for c in events_of(run, CheckpointWritten)] == [2]
    assert run.recorder.snapshot.step == 2


def test_what_falls_due_after_a_skipped_step_is_done(tmp_path, bad_row):
    """Steps 2 and 4 are skipped. Their state is that of the step before, and it is saved."""
    values = {
        "train.nonfinite": "skip",
        "data.eval_fraction": 0.1,
        "output.checkpoint_every": 2,
        "output.keep_checkpoints": 9,
        "output.eval_every": 2,
    }
    run = start_run(bad_row(**values), tmp_path / "runs")
    assert execute(run).state == "finished"
    skipped = [event.step for event in events_of(run, StepSkipped)]
    assert len(skipped) == 2
    assert any(step % 2 == 0 and step < 8 for step in skipped)
    assert [c.step for c in events_of(run, CheckpointWritten)] == [2, 4, 6, 8]
    assert [e.step for e in events_of(run, EvalFinished)] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("is_home", [True, False], ids=["device", "host"])
def test_a_loss_that_is_not_finite_beside_another_error_leaves_no_mixture(
    tmp_path, monkeypatch, is_home
):
    """Updates on the device begin before the norm is known, and then change nothing."""
    run = start_run(make_config(tmp_path, **{"output.checkpoint_every": 0}), tmp_path / "runs")
    train_step, drain = StreamingEngine.train_step, StreamingEngine.drain
    broken = []

    def failing(self, number, *arguments):
        if number == 5:
            drain(self)
            if is_home:
                self._states.held.begin(5, "head")
            broken.append(number)
            raise RuntimeError("the kernel failed")
        train_step(self, number, *arguments)

    def draining(self):
        if len(broken) == 1:
            broken.append(0)
            raise NonFiniteError("The loss of step 5 is not a finite number.", 5, "loss")
        drain(self)

    monkeypatch.setattr(StreamingEngine, "train_step", failing)
    monkeypatch.setattr(StreamingEngine, "drain", draining)
    ended = execute(run)
    assert ended.state == "failed" and "the kernel failed" in ended.reason
    assert "mixture" not in ended.reason and "step 4 is saved" in ended.reason
    assert [c.step for c in events_of(run, CheckpointWritten)] == [4]


def test_skipping_is_bounded(tmp_path, bad_row, monkeypatch):
    monkeypatch.setattr(step_loop, "MOST_SKIPPED", 1)
    run = start_run(bad_row(**{"train.nonfinite": "skip"}), tmp_path / "runs")
    ended = execute(run)
    assert ended.state == "failed" and "of step 4" in ended.reason
    assert "has skipped 1 step already, which is the most" in ended.reason
    assert [c.step for c in events_of(run, CheckpointWritten)] == [3]


def test_weights_that_are_at_fault_are_told_from_rows():
    error = NonFiniteError("no", 9)
    refuse_further(error, 9, [2, 5, 6, 7, 8])
    with pytest.raises(NonFiniteError, match="5 steps before it .* weights are at fault"):
        refuse_further(error, 9, [4, 5, 6, 7, 8])


def test_a_skipped_step_is_one_that_torch_does_not_take():
    """The schedule goes on, AdamW's moments and its count do not: as with torch's GradScaler."""
    rates = {1: 1e-2, 2: 2e-2, 3: 3e-2, 4: 4e-2}
    plain = plain_model(tiny_config("qwen3"))
    run = streamed(plain, PlanChoices().changed(micro_batches=2), weight_decay=0.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0, eps=1e-5, weight_decay=0.0)
    for step, rate in rates.items():
        batches = random_batches(2, seed=step)
        if step == 2:
            run.host_states.held.skip(step)
            continue
        run.engine.train_step(step, batches, rate)
        run.engine.drain()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        plain_loss(plain, batches).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    theirs = dict(plain.named_parameters())
    for unit in run.model.units:
        for spec in unit.layout.parameters:
            ours = run.host_states.parameters.master(unit.name, spec.name)
            # One update more in AdamW's count would change weights by several thousandths.
            torch.testing.assert_close(ours, theirs[spec.full_name].data, rtol=0, atol=1e-4)
    run.close()


# ---------------------------------------------------------------------- which step the planes hold


def test_a_held_step_is_whole_or_mixed():
    held = PlaneVersion()
    assert (held.step, held.is_mixed) == (0, False)
    held.begin(1, "head")
    assert (held.step, held.is_mixed, held.writing) == (0, True, 1)
    held.complete(1)
    assert (held.step, held.is_mixed) == (1, False)
    held.skip(2)
    held.begin(3, "head")
    held.abort()
    assert (held.step, held.is_mixed, held.update_number(3)) == (2, False, 2)
    held.restore(7, [2, 5])
    assert (held.step, held.skipped, held.update_number(8)) == (7, (2, 5), 6)


@pytest.mark.parametrize("kind", ["prefetch", "forward", "loss", "backward", "reduce", "clip"])
def test_a_step_that_fails_in_any_op_before_its_updates_keeps_the_step_before(
    tmp_path, monkeypatch, kind
):
    """A kernel fails; what failed is told, and the run goes on to the bit."""
    config = make_config(tmp_path, **{"output.checkpoint_every": 0})
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    real = Executor.work

    def work(self, op, step):
        if step.inputs.number == 4 and op.kind == kind:
            raise RuntimeError("Triton Error [CUDA]: the kernel failed")
        return real(self, op, step)

    with monkeypatch.context() as broken:
        broken.setattr(Executor, "work", work)
        run = start_run(config, tmp_path / "runs")
        ended = execute(run)
    assert ended.state == "failed" and "the kernel failed" in ended.reason
    assert "step 3 is saved" in ended.reason
    states = [event.state for event in events_of(run, StateChanged)]
    assert states[-2:] == ["saving", "stopping"]
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert events_of(again, RunStarted)[-1].resumed_step == 3
    assert planes_on_disk(again) == planes_on_disk(whole)


def test_a_step_that_cannot_be_saved_is_told(tmp_path, monkeypatch):
    from engine.errors import CheckpointError

    def broken(*_, **__):
        raise CheckpointError("The disk is gone.")

    real = Executor.work

    def work(self, op, step):
        if step.inputs.number == 5:
            monkeypatch.setattr("engine.training.loop.saving.write_checkpoint", broken)
            raise ZeroDivisionError("division by zero")
        return real(self, op, step)

    monkeypatch.setattr(Executor, "work", work)
    ended = execute(start_run(make_config(tmp_path), tmp_path / "runs"))
    assert ended.error_type == "ZeroDivisionError"
    assert "Step 4 could not be saved (The disk is gone)" in ended.reason
    assert "from the checkpoint of step 3" in ended.reason


def test_a_record_that_cannot_be_written_is_no_reason_to_save_again(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RunError("The record cannot be written.")

    run = start_run(make_config(tmp_path, **{"output.checkpoint_every": 0}), tmp_path / "runs")
    monkeypatch.setattr(StreamingEngine, "train_step", refuse)
    assert execute(run).reason == "The record cannot be written."
    assert not run.folder.checkpoints_path.exists()

"""A step for which the GPU's memory does not last is planned with less, and the run goes on."""

from __future__ import annotations

import errno
import shutil

import pytest

from engine.runs.record.events import (
    CheckpointWritten,
    LogLine,
    PlanBuilt,
    PlannedAnew,
    RunStarted,
    StepFinished,
)
from engine.runtime.step.executor import Executor
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import resume_run, start_run
from tests.support.failing import full_at
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, execute, planes_on_disk

pytestmark = pytest.mark.slow("it tries a fault at many moments of a run")


@pytest.mark.parametrize("kind", ["forward", "backward", "loss"])
def test_out_of_memory_the_step_is_planned_with_less_and_the_run_goes_on(
    tmp_path, monkeypatch, kind
):
    """On the CPU the first plan keeps every block, the second none. The bits are the same."""
    config = make_config(tmp_path)
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    run = start_run(config, tmp_path / "runs")
    with monkeypatch.context() as full:
        tried = full_at(full, 5, kind, times=1)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    assert len(tried) == 1
    (anew,) = events_of(run, PlannedAnew)
    first, second = events_of(run, PlanBuilt)
    assert (anew.step, anew.attempt, anew.changes_rounding) == (5, 1, False)
    assert anew.after["device_bytes"] < anew.before["device_bytes"]
    assert (
        second.choices["blocks_without_recompute"] < first.choices["blocks_without_recompute"] == 3
    )
    assert [event.step for event in events_of(run, StepFinished)] == list(range(1, 9))
    assert planes_on_disk(run) == planes_on_disk(whole)
    logged = [line for line in events_of(run, LogLine) if "planned anew" in line.text]
    assert [line.level for line in logged] == ["warning"]
    assert "before the updates of step 5" in logged[0].text
    assert "No result changes by that." in logged[0].text


def test_out_of_memory_again_the_micro_batch_is_made_smaller_and_that_is_recorded(
    tmp_path, monkeypatch
):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    with monkeypatch.context() as full:
        tried = full_at(full, 5, "backward", times=2)
        assert execute(run, {6: "stop"}).state == "stopped", run.recorder.snapshot.reason
    assert tried == [2, 2]
    events = events_of(run, PlannedAnew)
    assert [event.attempt for event in events] == [1, 2]
    assert events[-1].changes_rounding
    last = events_of(run, PlanBuilt)[-1].choices
    assert (last["micro_batch_size"], last["micro_batches"]) == (1, 4)
    assert any("in another order" in line.text for line in events_of(run, LogLine))
    assert [event.step for event in events_of(run, StepFinished)][:6] == list(range(1, 7))
    # A resume goes on with the plan that fits, though the settings ask for two rows.
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert events_of(again, PlanBuilt)[-1].choices["micro_batch_size"] == 1


def test_a_run_that_is_killed_after_that_goes_on_to_the_bit(tmp_path, monkeypatch):
    """The checkpoint before the step that was planned anew says how later sums are rounded."""
    values = {"output.checkpoint_every": 4, "output.keep_checkpoints": 5}
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    killed = tmp_path / "killed" / run.id

    def copy(record):
        if isinstance(record.event, StepFinished) and record.event.step == 7:
            shutil.copytree(run.folder.path, killed)

    run.recorder.subscribe(copy)
    with monkeypatch.context() as full:
        full_at(full, 5, "backward", times=2)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    assert events_of(run, PlannedAnew)[-1].changes_rounding
    again = resume_run(tmp_path / "killed", run.id)
    assert execute(again).state == "finished"
    assert events_of(again, RunStarted)[-1].resumed_step == 4
    assert planes_on_disk(again) == planes_on_disk(run)


def test_a_checkpoint_that_cannot_take_the_new_rounding_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.training.loop.saving.change_state", refuse)
    run = start_run(make_config(tmp_path, **{"output.checkpoint_every": 4}), tmp_path / "runs")
    with monkeypatch.context() as full:
        full_at(full, 5, "backward", times=2)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    found = [line.text for line in events_of(run, LogLine) if line.level == "warning"]
    assert any("step 4 does not tell of the new plan (No space left" in text for text in found)


def test_a_damaged_newest_checkpoint_leaves_the_plan_to_the_one_before(tmp_path, monkeypatch):
    """Step 4 was saved with two rows a micro-batch, step 6 with one."""
    values = {"output.checkpoint_every": 4, "output.keep_checkpoints": 5}
    config = make_config(tmp_path, **values)
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    run = start_run(config, tmp_path / "runs")
    with monkeypatch.context() as full:
        full_at(full, 6, "backward", times=2)
        assert execute(run, {6: "stop"}).state == "stopped", run.recorder.snapshot.reason
    newest = newest_checkpoint(run.folder.checkpoints_path)
    assert newest.step == 6 and newest.state["rounding"]["micro_batch_size"] == 1
    planes = max(newest.path.glob("*.planes"), key=lambda path: path.stat().st_size)
    content = bytearray(planes.read_bytes())
    content[len(content) // 2] ^= 1
    planes.write_bytes(content)
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert events_of(again, RunStarted)[-1].resumed_step == 4
    assert events_of(again, PlanBuilt)[-1].choices["micro_batch_size"] == 2
    assert planes_on_disk(again) == planes_on_disk(whole)


def test_out_of_memory_with_the_minimum_plan_ends_the_run_saved(tmp_path, monkeypatch):
    run = start_run(make_config(tmp_path, **{"output.checkpoint_every": 0}), tmp_path / "runs")
    full_at(monkeypatch, 5, "backward", times=9)
    ended = execute(run)
    assert (ended.state, ended.error_type) == ("failed", "GpuMemoryError")
    assert "no plan takes less" in ended.reason and "step 4 is saved" in ended.reason
    assert "lower data.max_seq_len" in ended.reason and "micro_batch" not in ended.reason
    assert [c.step for c in events_of(run, CheckpointWritten)] == [4]
    assert len(events_of(run, PlannedAnew)) <= 3


def test_out_of_memory_in_the_dry_run_is_planned_with_less(tmp_path, monkeypatch):
    run = start_run(make_config(tmp_path, **{"train.steps": 12}), tmp_path / "runs")
    full_at(monkeypatch, 0, "backward", times=1)
    assert execute(run, {2: "stop"}).state == "stopped", run.recorder.snapshot.reason
    (anew,) = events_of(run, PlannedAnew)
    assert (anew.step, anew.attempt) == (0, 1)
    assert any("in the dry run" in line.text for line in events_of(run, LogLine))


@pytest.mark.parametrize("command", ["stop", "discard"])
def test_a_dry_run_is_ended_at_once(tmp_path, monkeypatch, command):
    run = start_run(make_config(tmp_path, **{"train.steps": 12}), tmp_path / "runs")
    real, ops = Executor.work, []

    def work(self, op, under_way):
        ops.append(op)
        run.request(command)
        return real(self, op, under_way)

    monkeypatch.setattr(Executor, "work", work)
    assert run.execute().state == {"stop": "stopped", "discard": "discarded"}[command]
    assert len(ops) < 5 and not events_of(run, StepFinished)

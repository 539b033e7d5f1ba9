"""Checkpoints that are written on a GPU machine while steps go on, with lanes that work at the same
time, hold one step's state, wherever optimizers run.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from engine.errors import NonFiniteError
from engine.planning.fit import checkpoint_sizes, requirements
from engine.planning.schedule.ops import OpKind
from engine.runs.record.events import CheckpointWritten, PlanBuilt, StepSkipped
from engine.runtime.step import copy_ops
from engine.training.checkpoints import chunk_files, staging, unit_files
from engine.training.loop import planning
from engine.training.loop.run import Run, start_run
from tests.support.gpu_configs import gpu_config
from tests.support.trained_runs import events_of, execute, files_of

pytestmark = pytest.mark.gpu

UNITS = ("embed", "block 0", "block 1", "head")
VALUES = {
    "train.steps": 24,
    "output.checkpoint_every": 1,
    "output.keep_checkpoints": 24,
    "output.eval_every": 0,
    "engine.kernels": "eager",
}


@pytest.fixture
def small(monkeypatch):
    """Even this model is written beside training, in small chunks, more slowly than it trains."""
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    for place, name in ((checkpoint_sizes, "STAGING_CHUNK_BYTES"), (staging, "CHUNK_BYTES")):
        monkeypatch.setattr(place, name, 64 << 10)
    monkeypatch.setattr(unit_files, "ALIGNED_BYTES", 64 << 10)
    write = chunk_files.ChunkFile.write

    def slowly(self, chunk, offset):
        time.sleep(0.003)
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", slowly)


@pytest.fixture(
    params=[((), 0), (UNITS, 0), (("block 1",), 0), ((), 3)],
    ids=["host", "device", "mixed", "GPU-resident"],
)
def device_updates(request, monkeypatch):
    """Optimizers of these units run on the device, or so many units live there."""
    choose, (units, gpu_resident) = requirements.choose, request.param

    def with_homes(job, target, *coarse):
        chosen = choose(job, target, *coarse)
        choices = chosen.choices.changed(
            device_updated_units=units,
            gpu_resident_units=gpu_resident,
            blocks_kept_in_slots=0,
            update_buffers=2 if units else 0,
        )
        return replace(chosen, choices=choices)

    for planner in (requirements, planning):
        monkeypatch.setattr(planner, "choose", with_homes)
    return units


def trained(tmp_path, **values) -> Run:
    run = start_run(gpu_config(tmp_path, "bfloat16", **VALUES | values), tmp_path / "runs")
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    return run


@pytest.mark.parametrize("room", [0, 1 << 20, 1 << 30], ids=["waits", "both", "copies"])
def test_each_is_that_of_a_run_that_stood_still(
    deterministic, tmp_path, monkeypatch, small, device_updates, room
):
    with monkeypatch.context() as standing:
        standing.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
        standing.setattr(time, "sleep", lambda seconds: None)
        still = files_of(trained(tmp_path))
    whole = checkpoint_sizes._in_chunks
    monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *job: min(room, whole(*job)))
    run = trained(tmp_path)
    (built,) = events_of(run, PlanBuilt)
    assert tuple(built.choices["device_updated_units"]) == device_updates
    beside = files_of(run)
    assert set(beside) <= set(still)
    assert 1 in beside
    assert 24 in beside
    assert len(beside) > 2
    for step, files in beside.items():
        assert files == still[step], step
    first = events_of(run, CheckpointWritten)[0]
    assert (first.copied_bytes > 0) == (room > 0)


def test_a_step_that_is_skipped_just_before_its_checkpoint_leaves_no_one_waiting(
    deterministic, tmp_path, monkeypatch, small, device_updates
):
    """The checkpoint of step 5 is asked for while that step runs, and then the step fails."""
    clip = copy_ops._clip

    def failing(context, op, step):
        if step.inputs.number == 5:
            raise NonFiniteError("The loss of step 5 is not a finite number.", 5, "loss")
        clip(context, op, step)

    monkeypatch.setitem(copy_ops.WORK, OpKind.CLIP, failing)
    with monkeypatch.context() as standing:
        standing.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
        standing.setattr(time, "sleep", lambda seconds: None)
        still = files_of(trained(tmp_path, **{"train.nonfinite": "skip"}))
    run = trained(tmp_path, **{"train.nonfinite": "skip", "output.checkpoint_every": 5})
    assert [event.step for event in events_of(run, StepSkipped)] == [5]
    written = events_of(run, CheckpointWritten)
    assert written[-1].step == 24 and min(event.step for event in written) in range(5, 12)
    assert set(still) == set(range(1, 25))
    for step, files in files_of(run).items():
        assert files == still[step], step

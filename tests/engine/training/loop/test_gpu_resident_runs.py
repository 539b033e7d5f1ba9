"""Runs in which units live on the device: what they write is what a run with all planes in RAM
writes, and the border may move when they are resumed.
"""

from __future__ import annotations

import pytest
import torch

from engine.errors import GpuMemoryError
from engine.planning.schedule.ops import OpKind
from engine.runs.record.events import PlanBuilt, PlannedAnew, RunEnded
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.step import compute_ops, copy_ops
from engine.training.loop import oom_recovery
from engine.training.loop.run import resume_run
from tests.support.disk_offloading import train
from tests.support.failing import full_at
from tests.support.gpu_resident_runs import UNITS, Written
from tests.support.trained_runs import events_of, execute, files_of

pytestmark = pytest.mark.computing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 3, UNITS])
def test_a_run_writes_what_a_run_with_all_planes_in_ram_writes(
    tmp_path, in_ram, keep_on_gpu, dtype, count
):
    values = {"model.dtype": dtype, "output.eval_every": 2, "output.export": True}
    expected = in_ram(**values)
    keep_on_gpu(count)
    run = train(tmp_path, "GPU-resident", **values)
    assert events_of(run, PlanBuilt)[0].choices["gpu_resident_units"] == count
    assert Written.by(run) == expected and expected.exported


@pytest.mark.parametrize("before, after", [(0, 3), (UNITS, 2), (2, 0)])
def test_the_border_moves_at_a_resume(tmp_path, in_ram, keep_on_gpu, before, after):
    expected = in_ram()
    keep_on_gpu(before)
    run = train(tmp_path, "moves", at_step={3: "stop"})
    keep_on_gpu(after)
    again = resume_run(tmp_path / "moves", run.folder.id)
    execute(again)
    assert events_of(again, PlanBuilt)[-1].choices["gpu_resident_units"] == after
    assert files_of(again)[8] == expected.files[8]


def test_units_go_back_to_ram_where_the_device_runs_out_of_memory(
    tmp_path, in_ram, monkeypatch, keep_on_gpu
):
    expected = in_ram()
    keep_on_gpu(UNITS)
    failed = full_at(monkeypatch, 4, OpKind.LOSS, times=1)
    run = train(tmp_path, "runs-out")
    (anew,) = events_of(run, PlannedAnew)
    assert (anew.step, anew.before["gpu_resident_units"], anew.after["gpu_resident_units"]) == (
        4,
        UNITS,
        0,
    )
    assert events_of(run, RunEnded)[-1].state == "finished" and failed
    assert files_of(run)[8] == expected.files[8]
    assert (torch.OutOfMemoryError, GpuMemoryError) == oom_recovery.OUT_OF_MEMORY


def test_a_lost_device_takes_what_lived_there_and_the_newest_checkpoint_counts(
    tmp_path, monkeypatch, keep_on_gpu
):
    keep_on_gpu(2)
    lost, loss = [], compute_ops.loss

    def loses_the_device(context, op, step):
        if step.inputs.number == 5 and step.inputs.training:
            lost.append(op)
            raise RuntimeError("CUDA error: unspecified launch failure")
        loss(context, op, step)

    def download(self, tensor):
        if lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return tensor.clone()

    monkeypatch.setitem(copy_ops.WORK, OpKind.LOSS, loses_the_device)
    monkeypatch.setattr(CpuBackend, "download", download)
    run = train(tmp_path, "lost", **{"output.checkpoint_every": 3})
    ended = events_of(run, RunEnded)[-1]
    assert ended.state == "failed" and lost
    assert "that lived on the GPU cannot be read any more" in ended.reason
    assert "checkpoint of step 3" in ended.reason
    assert set(files_of(run)) == {3}

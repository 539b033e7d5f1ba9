"""Runs that two GPUs compute, through NCCL: what they record and save is what one GPU does, and a
rank that is lost ends the run within a bounded time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.runs.record.events import (
    EvalFinished,
    MemorySampled,
    PlanBuilt,
    RunStarted,
    StepFinished,
)
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import Run, resume_run, start_run
from tests.support.folders import make_config
from tests.support.gpu_resident_runs import figures
from tests.support.rank_runs import assert_close, planes
from tests.support.trained_runs import events_of, execute, files_of
from tests.support.worker_groups import workers_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]

BOUND_SECONDS = 90
"""A run whose rank is killed ends within so many seconds."""


def start(folder: Path, ranks: int, **values) -> Run:
    """Starts a run of eight steps on so many GPUs."""
    settings = {
        "engine.device": "cuda",
        "engine.gpus": ranks,
        "train.micro_batch_size": 1,
        "output.checkpoint_every": 4,
        "output.keep_checkpoints": 9,
    }
    return start_run(make_config(folder, **settings | values), folder / "runs")


def train(folder: Path, ranks: int, **values) -> Run:
    run = start(folder, ranks, **values)
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    assert [event.choices["ranks"] for event in events_of(run, PlanBuilt)] == [ranks]
    assert not workers_of(os.getpid())
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gpus")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("states", ["host", "auto"])
def test_two_gpus_do_what_one_does(folder, deterministic, dtype, states):
    values = {"model.dtype": dtype, "engine.states": states}
    one, two = train(folder, 1, **values), train(folder, 2, **values)
    again = train(folder, 2, **values)
    assert files_of(again) == files_of(two) and figures(again) == figures(two)
    assert len(events_of(two, EvalFinished)) == len(events_of(one, EvalFinished)) > 0
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for ours, theirs in zip(figures(two), figures(one), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    if dtype == "float32":
        assert_close(planes(two, 8), planes(one, 8))


def test_every_gpu_s_memory_is_told(folder):
    two = train(folder, 2)
    memory = events_of(two, MemorySampled)[-1]
    assert len(memory.ranks) == 2
    assert all(0 < rank["gpu_allocated"] <= rank["gpu_peak"] for rank in memory.ranks)


@pytest.mark.parametrize("others", [1, 2])
def test_a_checkpoint_of_two_gpus_goes_on_with(folder, others):
    part = start(folder, 2)
    assert execute(part, {5: "stop"}).state == "stopped"
    saved = newest_checkpoint(part.folder.checkpoints_path).step
    again = resume_run(folder / "runs", part.id, [f"engine.gpus={others}"])
    assert execute(again).state == "finished"
    assert events_of(again, RunStarted)[-1].resumed_step == saved
    assert_close(planes(again, 8), planes(train(folder, 1), 8))


@pytest.mark.parametrize("gpu_resident", [0, 2])
def test_a_rank_that_is_killed_ends_the_run_with_one_sentence(folder, keep_on_gpu, gpu_resident):
    keep_on_gpu(gpu_resident)
    run = start(folder, 2, **{"train.steps": 400, "output.checkpoint_every": 3})
    killed: list[float] = []

    def kill() -> None:
        time.sleep(0.05)
        os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
        killed.append(time.monotonic())

    def react(record):
        if isinstance(record.event, StepFinished) and record.event.step == 7:
            threading.Thread(target=kill).start()

    run.recorder.subscribe(react)
    ended = run.execute()
    assert time.monotonic() - killed[0] < BOUND_SECONDS
    assert ended.state == "failed" and ended.error_type == "RankError", ended.reason
    assert ended.reason.startswith("Rank 1 of 2 is lost: its process was killed (SIGKILL)")
    assert not workers_of(os.getpid())
    saved = newest_checkpoint(run.folder.checkpoints_path)
    assert saved is not None and saved.step >= 6
    torch.ones(8, device="cuda").sum().item()  # this GPU still computes
    again = resume_run(folder / "runs", run.id, ["engine.gpus=2", f"train.steps={saved.step + 3}"])
    assert execute(again).state == "finished"


def test_a_rank_without_memory_ends_the_run_with_one_sentence(folder, monkeypatch):
    plain = StreamingEngine.train_shard
    steps: list[int] = []

    def train_shard(self, *given):
        steps.append(1)
        if len(steps) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return plain(self, *given)

    monkeypatch.setattr(StreamingEngine, "train_shard", train_shard)
    run = start(folder, 2, **{"train.steps": 30})
    began = time.monotonic()
    ended = run.execute()
    assert ended.state == "failed" and time.monotonic() - began < BOUND_SECONDS
    assert "memory" in ended.reason and "\n" not in ended.reason
    assert not workers_of(os.getpid())

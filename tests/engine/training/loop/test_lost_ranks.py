"""A run whose ranks are killed at any moment loses nothing but the steps since its newest
checkpoint, says what was lost and what is saved, and goes on with any number of ranks.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.paths import PROGRAM_ROOT
from engine.planning.schedule.ops import OpKind
from engine.runs.record.events import (
    CheckpointWritten,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.summaries.listing import list_runs
from engine.runtime.distributed.worker_group import WorkerGroup
from engine.runtime.step import compute_ops, copy_ops
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop import prepare
from engine.training.loop.run import Run, resume_run, start_run
from tests.support.folders import make_config
from tests.support.forked_processes import ForkedProcess
from tests.support.killed import ONE_THREAD
from tests.support.rank_runs import assert_close, on, planes
from tests.support.sets import slow_but
from tests.support.trained_runs import events_of, files_of
from tests.support.worker_groups import (
    FORK_RANKS,
    forked_workers,  # noqa: F401  a fixture
    wait_for_end,
    workers_of,
)

PATIENCE = 120
STEPS = 12
EVERY = {
    "train.steps": STEPS,
    "output.checkpoint_every": 4,
    "output.keep_checkpoints": 9,
    "output.eval_every": 0,
}
MOMENTS = "it kills ranks at several moments; a plain run has the first of them"
KILLS = int(os.environ.get("RAMSTREAM_KILLS", "2"))
"""Rank 0 and a worker are killed at so many random moments each; each time takes some ten seconds.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def whole(folder) -> Run:
    """Returns a run that nothing has disturbed."""
    run = start_run(make_config(folder, **on(2, **EVERY)), folder / "whole")
    assert run.execute().state == "finished"
    return run


def continues(runs: Path, run_id: str, ranks: int, whole: Run) -> Run:
    """Resumes a run with so many ranks, and checks that no saved step is computed again and that
    the end is that of the undisturbed run.
    """
    (folder,) = (path for path in runs.iterdir() if path.name == run_id)
    newest = newest_checkpoint(folder / "checkpoints")
    saved = newest.step if newest is not None else 0
    run = resume_run(runs, run_id, [f"engine.gpus={ranks}"])
    ended = run.execute()
    assert ended.state == "finished", ended.reason
    assert not workers_of(os.getpid())
    resumed = events_of(run, RunStarted)[-1].resumed_step or 0
    assert resumed == saved
    steps = [event.step for event in events_of(run, StepFinished)]
    assert steps[-(STEPS - saved) :] == list(range(saved + 1, STEPS + 1))
    assert_close(planes(run, STEPS), planes(whole, STEPS))
    if ranks == 2:
        assert files_of(run)[STEPS] == files_of(whole)[STEPS]
    return run


# --------------------------------------------------------------------- a worker


def kill_a_worker(run: Run, step: int, delay: float, number: int = signal.SIGKILL) -> RunEnded:
    """Executes a run, of which a worker gets a signal a while after a step."""

    def kill() -> None:
        time.sleep(delay)
        for pid in workers_of(os.getpid())[:1]:
            os.kill(pid, number)

    def react(record):
        if isinstance(record.event, StepFinished) and record.event.step == step:
            threading.Thread(target=kill).start()

    run.recorder.subscribe(react)
    ended = run.execute()
    assert not workers_of(os.getpid())
    return ended


def check_told(run: Run, ended: RunEnded) -> None:
    """Checks that the reason names the rank, and that what it says is saved is there."""
    assert ended.state == "failed" and ended.error_type == "RankError"
    assert ended.reason.startswith("Rank 1 of 2 is lost: its process was killed (SIGKILL)")
    assert "\n" not in ended.reason
    newest = newest_checkpoint(run.folder.checkpoints_path)
    if "mixture of two steps" in ended.reason:
        assert newest is None or f"checkpoint of step {newest.step}" in ended.reason
    else:
        assert f"No finished step is lost: step {newest.step} is saved" in ended.reason
        assert newest.step == events_of(run, StepFinished)[-1].step
    recorded = events_of(run, RunEnded)[-1]
    assert msgspec.structs.replace(recorded, paused_seconds=0) == ended


def draws(count: int) -> list[tuple[int, float, int]]:
    """Returns moments: a step, seconds after it, and the number of ranks of the resume."""
    draw = random.Random(5)
    return [(draw.randint(1, 9), draw.uniform(0, 0.1), (2, 1, 4)[k % 3]) for k in range(count)]


@pytest.mark.parametrize("moment", slow_but(draws(KILLS), draws(1), MOMENTS))
def test_a_worker_that_is_killed_costs_no_finished_step(folder, whole, moment):
    step, delay, ranks = moment
    runs = folder / f"worker-{step}-{delay}"
    run = start_run(make_config(folder, **on(2, **EVERY)), runs)
    ended = kill_a_worker(run, step, delay)
    if ended.state == "finished":
        assert files_of(run)[STEPS] == files_of(whole)[STEPS]
        return
    check_told(run, ended)
    continues(runs, run.id, ranks, whole)


@pytest.mark.slow("it tries a fault at many moments of a run")
@pytest.mark.parametrize("count", [0, 3])
def test_one_that_is_killed_among_the_updates_leaves_a_mixture_that_is_not_saved(
    folder,
    whole,
    monkeypatch,
    keep_on_gpu,
    count,
):
    plain = WorkerGroup.go

    def kill(self: WorkerGroup, step: int) -> None:
        if step == 6:
            self._processes[0].process.kill()
            self._processes[0].process.wait()
        plain(self, step)

    monkeypatch.setattr(WorkerGroup, "go", kill)
    if count:
        keep_on_gpu(count)
    runs = folder / f"mixture-{count}"
    run = start_run(make_config(folder, **on(2, **EVERY)), runs)
    ended = run.execute()
    check_told(run, ended)
    assert "updates of step 6" in ended.reason and "mixture" in ended.reason
    assert "a resume goes on from the checkpoint of step 4" in ended.reason
    assert set(files_of(run)) == {4}
    monkeypatch.setattr(WorkerGroup, "go", plain)
    continues(runs, run.id, 2, whole)


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_what_lived_on_the_device_of_a_lost_rank_is_lost_and_the_checkpoint_counts(
    folder,
    whole,
    monkeypatch,
    keep_on_gpu,
):
    loss = compute_ops.loss

    def kill(context, op, step):
        if step.inputs.number == 6 and step.inputs.training:
            for pid in workers_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
                wait_for_end(pid)
        loss(context, op, step)

    monkeypatch.setitem(copy_ops.WORK, OpKind.LOSS, kill)
    keep_on_gpu(2)
    runs = folder / "device"
    run = start_run(make_config(folder, **on(2, **EVERY)), runs)
    ended = run.execute()
    assert ended.reason.startswith("Rank 1 of 2 is lost: its process was killed (SIGKILL)")
    assert "Step 5 could not be saved" in ended.reason
    assert ended.reason.endswith("a resume goes on from the checkpoint of step 4.")
    assert set(files_of(run)) == {4}
    assert not list(run.folder.checkpoints_path.glob(".*"))
    monkeypatch.setitem(copy_ops.WORK, OpKind.LOSS, loss)
    keep_on_gpu(0)
    continues(runs, run.id, 1, whole)


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_one_that_is_killed_while_the_run_is_paused_costs_nothing(folder, whole):
    runs = folder / "paused"
    run = start_run(make_config(folder, **on(2, **EVERY)), runs)

    def react(record):
        match record.event:
            case StepFinished(step=5):
                run.request("pause")
            case StateChanged(state="paused"):
                pids = workers_of(os.getpid())
                os.kill(pids[0], signal.SIGKILL)
                wait_for_end(*pids)
                run.request("resume")

    run.recorder.subscribe(react)
    check_told(run, run.execute())
    continues(runs, run.id, 2, whole)


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_one_that_is_killed_while_a_checkpoint_is_written_leaves_it_whole(
    folder, whole, monkeypatch
):
    """The planes hold the step, and no other rank is needed to write it."""
    runs = folder / "checkpoint"
    run = start_run(make_config(folder, **on(2, **EVERY)), runs)
    killed = []

    def react(record):
        if isinstance(record.event, StateChanged) and record.event.state == "saving" and not killed:
            killed.extend(workers_of(os.getpid()))
            os.kill(killed[0], signal.SIGKILL)

    run.recorder.subscribe(react)
    ended = run.execute()
    check_told(run, ended)
    assert events_of(run, CheckpointWritten)[0].step == 4
    continues(runs, run.id, 2, whole)


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_one_that_is_lost_before_the_first_step_is_told(folder, monkeypatch):
    plain = prepare.build_engines

    def kill(workers, *given):
        workers._processes[0].kill()
        return plain(workers, *given)

    monkeypatch.setattr(prepare, "build_engines", kill)
    run = start_run(make_config(folder, **on(2, **EVERY)), folder / "prepare")
    ended = run.execute()
    assert ended.reason.startswith("Rank 1 of 2 is lost: its process was killed (SIGKILL)")
    assert ended.state == "failed" and not workers_of(os.getpid())


# --------------------------------------------------------------------- rank 0

PROGRAM = """
import sys
from pathlib import Path
from engine.config.settings import TrainConfig
from engine.training.loop.run import start_run
run = start_run(TrainConfig.load(Path(sys.argv[1])), Path(sys.argv[2]))
ended = run.execute()
sys.exit(ended.state != "finished")
"""


@pytest.mark.slow("it tries a fault at many moments of a run")
@pytest.mark.parametrize("moment", slow_but(draws(KILLS), draws(1), MOMENTS))
def test_rank_0_that_is_killed_costs_the_steps_since_the_newest_checkpoint(folder, whole, moment):
    step, delay, ranks = moment
    runs = folder / f"rank-0-{step}-{delay}"
    config = make_config(folder, **on(2, **EVERY))
    preset = folder / "preset.yaml"
    config.save(preset)
    rank_zero = ForkedProcess(
        [sys.executable, "-c", FORK_RANKS + PROGRAM, str(preset), str(runs)],
        cwd=PROGRAM_ROOT,
        env=os.environ | ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + PATIENCE
    while not (runs.exists() and list_runs(runs) and list_runs(runs)[0].step >= step):
        assert rank_zero.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    time.sleep(delay)
    workers = workers_of(rank_zero.pid)
    rank_zero.kill()
    output = rank_zero.communicate(timeout=PATIENCE)
    assert output == ("", "")
    wait_for_end(*workers)
    (found,) = list_runs(runs)
    if found.state != "finished":
        continues(runs, found.id, ranks, whole)


def test_planes_of_runs_compare_as_numbers(whole):
    """`assert_close` would miss nothing: planes of another step differ."""
    with pytest.raises(AssertionError):
        assert_close(planes(whole, 4), planes(whole, STEPS))
    assert all(np.isfinite(held).all() for held in planes(whole, STEPS).values())

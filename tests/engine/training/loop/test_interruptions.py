"""Each fault that can occur during a run is provoked: signals, the clock, numbers, memory and
devices. The run ends with one sentence and a complete record, and loses at most the steps since the
last checkpoint.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import engine.training.loop.memory_watch
import engine.training.loop.planning
from app.labels import in_time
from app.verdict.outcome import how_it_ended
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import (
    CheckpointWritten,
    EvalFinished,
    LogLine,
    StateChanged,
    StepFinished,
)
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.plane_version import PlaneVersion
from engine.runtime.step.executor import Executor
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.text import MIB
from engine.training.checkpoints.plane_snapshot import Snapshot
from engine.training.loop.run import start_run
from tests.support.clocks import DAYS_40, WallClock
from tests.support.failing import (
    MOMENTS,
    at_event,
    at_step,
    command,
    equals,
    failed,
    intact,
    resumes_to_the_end,
    whole_checkpoints,
)
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.forked_processes import ForkedProcess
from tests.support.trained_runs import events_of, execute

ROOT = PROGRAM_ROOT
PATIENCE = 120


# ---------------------------------------------------------------------- signals and the clock


@pytest.mark.parametrize(
    "moment, number",
    [
        *((moment, signal.SIGINT) for moment in MOMENTS),
        ("in a step", signal.SIGTERM),
        ("in a checkpoint", signal.SIGHUP),
    ],
)
def test_a_signal_at_any_moment_stops_and_saves(
    capsys, preset, runs, monkeypatch, whole, moment, number
):
    if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("under nohup it is ignored, as it should be")
    with monkeypatch.context() as interrupted:
        at_event(interrupted, MOMENTS[moment], lambda: signal.raise_signal(number))
        code, out, _ = command(capsys, "--runs-dir", runs, "train", preset)
    assert code == 0 and "--resume" in out
    run = list_runs(runs)[0]
    assert run.state == "stopped"
    intact(Path(run.path))
    assert whole_checkpoints(Path(run.path)) == (run.step or None), "what was trained is saved"
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.parametrize(
    "moment, reported",
    [("before the data is read", "nothing is lost"), ("while the weights are read", "--resume")],
)
def test_a_signal_while_a_resumed_run_loads_loses_nothing(
    capsys, runs, stopped_run, monkeypatch, whole, moment, reported
):
    with monkeypatch.context() as interrupted:
        at_event(interrupted, MOMENTS[moment], lambda: signal.raise_signal(signal.SIGINT))
        code, out, _ = command(capsys, "--runs-dir", runs, "train", "--resume", stopped_run.id)
    assert code == 0
    assert reported in out
    assert whole_checkpoints(stopped_run.folder.path) >= 6
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_second_signal_leaves_now_and_resume_equals_the_undisturbed_run(
    capsys, preset, runs, whole
):
    """The run is in a separate process, which ends itself."""
    twice = f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
import launch
from engine.runs.record.events import StepFinished
from engine.runs.record.recorder import RunRecorder
real = RunRecorder.emit
def emit(self, event):
    if isinstance(event, StepFinished) and event.step == 5:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    return real(self, event)
RunRecorder.emit = emit
launch.main(sys.argv[1:])
"""
    process = ForkedProcess(
        [sys.executable, "-c", twice, "--runs-dir", runs, "train", preset],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "again to leave at once" in said
    run = list_runs(runs)[0]
    assert run.state == "interrupted" and whole_checkpoints(Path(run.path)) == 3
    resumes_to_the_end(capsys, runs, whole)
    found = [r.event.text for r in intact(Path(run.path)) if isinstance(r.event, LogLine)]
    assert "Step 4 was trained before and not saved; it is trained again." in found


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_pipe_that_nobody_reads_ends_no_run(preset, runs):
    line = (
        f"{sys.executable} {ROOT / 'launch.py'} --runs-dir {runs} train {preset} | true; exit "
        f"${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert list_runs(runs)[0].state == "finished"


@pytest.mark.parametrize("set_by", [DAYS_40, -DAYS_40])
def test_a_clock_that_is_set_in_mid_run_changes_no_duration(
    capsys, preset, runs, monkeypatch, whole, set_by
):
    began = time.monotonic()
    with monkeypatch.context() as patch:
        clock = WallClock(patch)
        at_event(patch, at_step(3), lambda: clock.set_by(set_by))
        code, out, _ = command(capsys, "--runs-dir", runs, "train", preset)
    took = time.monotonic() - began
    assert code == 0 and ", for which training waited at most 0" in out
    run = list_runs(runs)[0]
    records = intact(Path(run.path))
    assert abs(records[-1].time - records[0].time - set_by) <= took
    elapsed = [record.elapsed for record in records]
    assert elapsed == sorted(elapsed) and elapsed[0] == 0 < elapsed[-1] <= took
    snapshot = fold(records)
    assert run.seconds == pytest.approx(elapsed[-1])
    assert snapshot.seconds == pytest.approx(elapsed[-1], abs=1e-5)
    assert f" in {in_time(elapsed[-1])}" in how_it_ended(snapshot, "finished")
    timed = (StepFinished, CheckpointWritten, EvalFinished)
    taken = [event.seconds for event in (r.event for r in records) if isinstance(event, timed)]
    assert len(taken) > 10 and all(0 < seconds <= took for seconds in taken)
    equals(RunFolder(Path(run.path)), whole)


# ---------------------------------------------------------------------- an op without end


def block_in_step(monkeypatch, number: int, act: Callable[[], None]) -> None:
    """Calls `act` within the first backward op of a step, which goes on once it returns."""
    real, acted = Executor.work, []

    def work(self, op, step):
        begin = real(self, op, step)
        if step.inputs.number != number or op.kind != "backward" or acted:
            return begin
        acted.append(op)

        def blocked():
            act()
            begin()

        return blocked

    monkeypatch.setattr(Executor, "work", work)


def saved_in_time(monkeypatch) -> threading.Event:
    """Returns an event that is set once the checkpoint of step 4 is recorded."""
    saved = threading.Event()
    real = RunRecorder.emit

    def emit(self, event):
        record = real(self, event)
        if isinstance(event, CheckpointWritten) and event.step == 4:
            saved.set()
        return record

    monkeypatch.setattr(RunRecorder, "emit", emit)
    return saved


@pytest.mark.parametrize("is_expected", [False, True], ids=["asked", "expected"])
def test_a_step_is_saved_while_a_long_op_of_the_next_goes_on(
    capsys, tmp_path, runs, monkeypatch, whole, is_expected
):
    """The op goes on until the checkpoint is whole: no stop can interrupt it. Where the op is
    computed by the main thread, the stop is only expected until the op is over.
    """
    run = start_run(make_config(tmp_path), runs)
    with monkeypatch.context() as long:
        saved = saved_in_time(long)

        def asked() -> None:
            if is_expected:
                run.expect_stop()
                assert saved.wait(PATIENCE)
            run.stop(is_urgent=True)
            assert saved.wait(PATIENCE)

        block_in_step(long, 5, asked)
        ended = execute(run)
    assert ended.state == "stopped" and "saved at step 4" in ended.reason, ended
    assert whole_checkpoints(run.folder.path) == 4
    written = [event.step for event in events_of(run, CheckpointWritten)]
    assert written == [3, 4]
    resumes_to_the_end(capsys, runs, whole)


def test_a_step_that_ends_while_the_one_before_it_is_being_saved_is_saved(
    capsys, tmp_path, runs, monkeypatch, whole
):
    """Its updates wait for the planes, until the checkpoint gives way to them."""
    run = start_run(make_config(tmp_path), runs)
    begun = threading.Event()
    with monkeypatch.context() as long:
        real = PlaneVersion.begin

        def begin(self, step, unit):
            if step == 5 and not begun.is_set():
                run.stop(is_urgent=True)
                assert begun.wait(PATIENCE)
            real(self, step, unit)

        wait = Snapshot.wait_until_ready

        def wait_until_ready(self):
            begun.set()
            wait(self)

        long.setattr(Snapshot, "wait_until_ready", wait_until_ready)
        long.setattr(PlaneVersion, "begin", begin)
        ended = execute(run)
    assert ended.state == "stopped" and "saved at step 5" in ended.reason, ended
    assert whole_checkpoints(run.folder.path) == 5
    resumes_to_the_end(capsys, runs, whole)


# ---------------------------------------------------------------------- numbers, memory and devices


def low_from(monkeypatch, step: int, *available: int) -> None:
    """Makes the machine report these `available` bytes after `step`, one per sample, and then the
    last of them forever.
    """
    rest = list(available)

    def start():
        monkeypatch.setattr(engine.training.loop.memory_watch, "POLL_SECONDS", 0.0)
        monkeypatch.setattr("engine.training.loop.measurements.POLL_SECONDS", 0.0)
        monkeypatch.setattr(
            engine.training.loop.memory_watch,
            "sample_host_memory",
            lambda: (3 << 30, rest.pop(0) if len(rest) > 1 else rest[0]),
        )

    at_event(monkeypatch, at_step(step), start)


@pytest.mark.parametrize(
    "left", [(60 * MIB,), (100 * MIB, 90 * MIB)], ids=["suddenly", "lastingly"]
)
def test_host_memory_that_runs_low_stops_with_a_checkpoint(
    capsys, preset, runs, monkeypatch, whole, left
):
    with monkeypatch.context() as low:
        low_from(low, 4, *left)
        sentence = failed(capsys, runs, preset, code=1)
    assert "other programs took " in sentence
    assert "more than when the plan was made (this process takes 3.0 GiB: planes " in sentence
    saved = whole_checkpoints(Path(list_runs(runs)[0].path))
    assert saved >= 4 and f"step {saved} is saved" in sentence
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_host_memory_that_runs_low_within_a_step_gives_that_step_up(
    capsys, preset, runs, monkeypatch, whole
):
    """The step may take longer than the memory lasts; no part of it is applied, and the previous
    step is saved.
    """
    with monkeypatch.context() as low:
        real, ops = Executor.work, []

        def work(self, op, step):
            if step.inputs.number == 5 and op.kind == "backward":
                ops.append(op)
                low.setattr(engine.training.loop.memory_watch, "POLL_SECONDS", 0.0)
                low.setattr(
                    engine.training.loop.memory_watch, "sample_host_memory", lambda: (3 << 30, MIB)
                )
            return real(self, op, step)

        low.setattr(Executor, "work", work)
        sentence = failed(capsys, runs, preset, code=1)
    assert len(ops) == 1 and "step 4 is saved" in sentence
    assert whole_checkpoints(Path(list_runs(runs)[0].path)) == 4
    resumes_to_the_end(capsys, runs, whole)


def test_a_short_peak_of_another_program_ends_no_run(capsys, preset, runs, monkeypatch):
    low_from(monkeypatch, 4, 100 * MIB, 8 << 30)
    assert command(capsys, "--runs-dir", runs, "train", preset)[0] == 0


def test_host_memory_that_runs_low_in_a_pause(tmp_path, runs, monkeypatch):
    at_event(
        monkeypatch,
        lambda e: isinstance(e, StateChanged) and e.state == "paused",
        lambda: monkeypatch.setattr(
            engine.training.loop.memory_watch, "sample_host_memory", lambda: (3 << 30, MIB)
        ),
    )
    run = start_run(make_config(tmp_path), runs)
    ended = execute(run, {2: "pause"})
    assert ended.error_type == "HostMemoryError" and "is saved" in ended.reason
    assert whole_checkpoints(run.folder.path) >= 2


@pytest.mark.parametrize(
    "error, reported",
    [
        (MemoryError(), "The host ran out of memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 4096 bytes.\nC++ trace"
            ),
            "The host ran out of memory",
        ),
        (
            RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
                "asynchronously reported"
            ),
            "The GPU failed (CUDA error: an illegal memory access was encountered)",
        ),
        (
            RuntimeError("CUDA error: unspecified launch failure"),
            "then start this program again",
        ),
        (
            RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
            "The GPU failed",
        ),
        (OSError(errno.EMFILE, "Too many open files", "/x"), "Too many open files"),
        (
            ZeroDivisionError("division by zero"),
            "An error in the program ended the run (ZeroDivisionError",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_device_system_and_program(
    capsys, preset, runs, monkeypatch, whole, error, reported
):
    """An op of step 5 raises the error; drain and close fail as well, as they do after a device is
    lost.
    """
    with monkeypatch.context() as broken:
        real = StreamingEngine.train_step

        def train_step(self, number, *arguments):
            if number == 5:
                broken.setattr(
                    CpuBackend, "drain", lambda self: (_ for _ in ()).throw(RuntimeError("gone"))
                )
                broken.setattr(
                    CpuBackend, "close", lambda self: (_ for _ in ()).throw(RuntimeError("gone"))
                )
                raise error
            real(self, number, *arguments)

        broken.setattr(StreamingEngine, "train_step", train_step)
        sentence = failed(capsys, runs, preset, code=1)
    assert reported in sentence and "gone" not in sentence
    run = list_runs(runs)[0]
    logged = [
        r.event.text
        for r in replay(Path(run.path) / "events.jsonl")
        if isinstance(r.event, LogLine)
    ]
    assert any("train_step" in text for text in logged), "the record keeps where it happened"
    assert whole_checkpoints(Path(run.path)) == 4 and "step 4 is saved" in sentence
    resumes_to_the_end(capsys, runs, whole)


def test_a_device_that_is_too_small_while_the_engine_is_built_is_told_by_item(
    capsys, preset, runs, monkeypatch
):
    def build(self, *arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(StreamingEngine, "__init__", build)
    assert "The GPU ran out of memory" in failed(capsys, runs, preset, code=1)


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_an_update_that_fails_half_way_is_not_saved(capsys, preset, runs, monkeypatch, whole):
    with monkeypatch.context() as broken:
        real, calls = HostAdamW.update, []

        def update(self, unit, *arguments):
            calls.append(unit)
            if len(calls) == 22:  # within step 5
                raise MemoryError
            real(self, unit, *arguments)

        broken.setattr(HostAdamW, "update", update)
        sentence = failed(capsys, runs, preset, code=1)
    assert "of step 5 were being written" in sentence and "checkpoint of step 3" in sentence
    assert whole_checkpoints(Path(list_runs(runs)[0].path)) == 3
    resumes_to_the_end(capsys, runs, whole)

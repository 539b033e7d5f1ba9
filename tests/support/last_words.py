"""Programs that a signal ends at a chosen moment of a run, and what they keep for the test."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from engine.runs.record.events import (
    EvalFinished,
    Event,
    JobProgressed,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import summarize
from tests.support.ports import free_port
from tests.support.strangers import beyond_loopback, listening

PATIENCE = 120
KEPT_IN = "RAMSTREAM_TEST_FOLDER"
"""What a program under test keeps for the test is in the folder that this variable names."""


def state(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StateChanged) and event.state == name


def job(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, JobProgressed) and event.job == name


def step(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StepFinished) and event.step == number


LONG_OP = "in a long op"
LONG_STEP = "in a long step of two ranks"
OPS_BEFORE = 12
"""So many ops of that step are over when the signal comes; the ranks wait for each other in some of
them.
"""
MOMENTS: dict[str, Callable[[Event], bool]] = {
    "starting": state("preparing"),
    "tokenizing": job("tokenize"),
    "before the first step": lambda event: isinstance(event, RunStarted),
    "in the first step": step(1),
    "while a step ends": step(4),
    "in a checkpoint": job("checkpoint"),
    "in an evaluation": lambda event: isinstance(event, EvalFinished) and event.step == 4,
}
"""The signal arrives just before the first event of a run that one of these takes."""


def send_to_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def signal_at(moment: str, number: int) -> None:
    """Sends a signal at a moment of the run that is started."""
    if moment == LONG_STEP:
        signal_in_a_long_step(number)
        return
    if moment == LONG_OP:
        signal_in_a_long_op(number)
        return
    if moment == "in mid step":
        from engine.runtime.step.streaming_engine import StreamingEngine

        real = StreamingEngine._training_step

        def begin(self, step_number, *given):
            if step_number == 5:
                send_to_itself(number)
            return real(self, step_number, *given)

        StreamingEngine._training_step = begin
        return
    chosen = {
        **MOMENTS,
        "in the export": job("export"),
        "between two runs": lambda event: isinstance(event, RunEnded),
    }[moment]
    real_emit, done = RunRecorder.emit, []

    def emit(self, event):
        if not done and chosen(event):
            done.append(event)
            send_to_itself(number)
        return real_emit(self, event)

    RunRecorder.emit = emit


def signal_in_a_long_step(number: int) -> None:
    """Sends a signal after some ops of step 5 of two ranks, which would have no end: an op that is
    submitted once the run knows of it waits for ever. Where both listen is kept for the test.
    """
    from engine.runtime.device.cpu_backend import CpuBackend
    from engine.runtime.step.streaming_engine import StreamingEngine
    from engine.training.loop.run import Run

    begins, submit, stop = StreamingEngine._training_step, CpuBackend.submit, Run.stop
    ops: list[int] = []
    known = threading.Event()

    def begin(self, step_number, *given):
        if step_number == 5:
            ops.append(0)
        return begins(self, step_number, *given)

    def submitted(self, lane, waits, work):
        if ops:
            ops[0] += 1
        if ops == [OPS_BEFORE]:
            found = [
                len(seen(os.getpid(), *descendants())) for seen in (listening, beyond_loopback)
            ]
            Path(os.environ[KEPT_IN], "listening.json").write_text(json.dumps(found))
            send_to_itself(number)
            while not known.is_set():
                time.sleep(0.01)
        elif ops and ops[0] > OPS_BEFORE:
            threading.Event().wait()
        return submit(self, lane, waits, work)

    def stopped(self, is_urgent):
        stop(self, is_urgent)
        known.set()

    StreamingEngine._training_step, CpuBackend.submit, Run.stop = begin, submitted, stopped


def signal_in_a_long_op(number: int) -> None:
    """Sends a signal in the first op of step 5, which goes on until step 4 is saved, and in which
    the main thread hears of no signal.
    """
    from engine.runs.record.events import CheckpointWritten
    from engine.runtime.device.cpu_backend import CpuBackend
    from engine.runtime.step.streaming_engine import StreamingEngine

    begins, submit, emit = StreamingEngine._training_step, CpuBackend.submit, RunRecorder.emit
    threads, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    is_long, saved = threading.Event(), threading.Event()
    steps: list[int] = []

    def begin(self, step_number, *given):
        steps.append(step_number)
        return begins(self, step_number, *given)

    def end_the_op() -> None:
        threads.pthread_mutex_lock(mutex)
        is_long.set()
        send_to_itself(number)
        saved.wait(PATIENCE)
        threads.pthread_mutex_unlock(mutex)

    def submitted(self, lane, waits, work):
        if steps[-1:] == [5] and not is_long.is_set():
            threading.Thread(target=end_the_op, daemon=True).start()
            is_long.wait()
            threads.pthread_mutex_lock(mutex)
            assert saved.is_set()
        return submit(self, lane, waits, work)

    def emitted(self, event):
        record = emit(self, event)
        if isinstance(event, CheckpointWritten) and event.step == 4:
            saved.set()
        return record

    StreamingEngine._training_step, CpuBackend.submit = begin, submitted
    RunRecorder.emit = emitted


def descendants() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def train(moment: str, number: int, preset: str, runs: str) -> None:
    """Trains by the command line."""
    import launch

    signal_at(moment, number)
    sys.exit(launch.main(["train", preset, "--runs-dir", runs]))


def app(moment: str, number: int, preset: str, runs: str) -> None:
    """Serves the app, and starts what the moment needs once the page is there."""
    import launch
    from app import main
    from app.session.session import Session
    from engine.config.settings import TrainConfig

    config = TrainConfig.load(preset)
    if moment not in ("idle", "beside a detached run"):
        signal_at(moment, number)

    async def begin(session: Session) -> None:
        threading.Thread(target=start, args=(session,), daemon=True).start()

    def start(session: Session) -> None:
        if moment == "beside a detached run":
            run_id = session.start_detached(config)
            wait_until(lambda: summarize(RunFolder(session.runs_dir / run_id)).step >= 3)
        elif moment == "between two runs":
            session.queue.add(config)
            session.queue.add(config)
        elif moment != "idle":
            session.start(config)
        if moment in ("idle", "beside a detached run"):
            send_to_itself(number)

    main.read_ahead = begin
    sys.exit(launch.main(["--no-browser", "--port", str(free_port()), "--runs-dir", runs]))


def train_and_save_slowly() -> None:
    import launch

    real = RunRecorder.emit

    def emit(self, event):
        if state("saving")(event):
            time.sleep(1)
        return real(self, event)

    RunRecorder.emit = emit
    sys.exit(launch.main())


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)

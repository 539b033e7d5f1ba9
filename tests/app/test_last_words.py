"""SIGTERM and SIGHUP end the app as Ctrl-C does, at any moment of a run: the run stops, the last
finished step is saved, and a resume equals a run that nothing has broken, to the bit.

The app is a process of its own, with its page, session and queue. Its runs are started by a hook,
and another hook sends the signal at one moment of a run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT
from engine.runs.events import (
    Event,
    EvalFinished,
    ExportWritten,
    JobProgressed,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.folder import RunFolder
from engine.runs.following import replay
from engine.runs.recorder import RunRecorder
from engine.summaries.listing import list_runs
from engine.train.run import start_run
from tests.support.failing import equals, intact, resumes_to_the_end, whole_checkpoints
from tests.support.folders import make_config
from tests.support.ports import free_port
from tests.support.trained_runs import execute

PATIENCE = 120
DETACHED = {"train.steps": 400, "output.checkpoint_every": 0, "output.eval_every": 0}


def state(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StateChanged) and event.state == name


def job(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, JobProgressed) and event.job == name


def step(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StepFinished) and event.step == number


MOMENTS: dict[str, Callable[[Event], bool]] = {
    "starting": state("preparing"),
    "tokenizing": job("tokenise"),
    "before the first step": lambda event: isinstance(event, RunStarted),
    "in the first step": step(1),
    "while a step ends": step(4),
    "in a checkpoint": job("checkpoint"),
    "in an evaluation": lambda event: isinstance(event, EvalFinished) and event.step == 4,
}
"""The signal arrives just before the first event of a run that one of these takes."""


# ---------------------------------------------------------------------- in the app's process


def send_to_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def signal_at(moment: str, number: int) -> None:
    """Sends a signal at a moment of the run that is started."""
    if moment == "in mid step":
        from engine.runtime.streaming_engine import StreamingEngine

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
            while session.watch(run_id).poll() is None or session.watch(run_id).snapshot.step < 3:
                time.sleep(0.05)
        elif moment == "between two runs":
            session.queue.add(config)
            session.queue.add(config)
        elif moment != "idle":
            session.start(config)
        if moment in ("idle", "beside a detached run"):
            send_to_itself(number)

    main.read_ahead = begin
    sys.exit(launch.main(["--no-browser", "--port", str(free_port()), "--runs-dir", runs]))


# ---------------------------------------------------------------------- outside


def ended_app(tmp_path: Path, moment: str, number: int, **values) -> tuple[Path, str]:
    """An app that a signal has ended; its runs, and what it said."""
    preset, runs = tmp_path / "preset.yaml", tmp_path / "runs"
    make_config(tmp_path, **values).save(preset)
    call = f"import tests.app.test_last_words as it; it.app({moment!r}, {int(number)}, *sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {call}", str(preset), str(runs)],
        capture_output=True,
        text=True,
        cwd=PROGRAM_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        timeout=PATIENCE,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, (done.returncode, said)
    return runs, said


def queued(runs: Path) -> int:
    path = runs / "queue.json"
    return len(json.loads(path.read_text())["runs"]) if path.exists() else 0


@pytest.mark.everything("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
@pytest.mark.parametrize("moment", [*MOMENTS, "in mid step"])
def test_a_signal_at_any_moment_of_an_apps_run_saves_its_last_finished_step(
    capsys, tmp_path, moment, number
):
    runs, said = ended_app(tmp_path, moment, number)
    (run,) = list_runs(runs)
    assert run.state == "stopped", run
    intact(Path(run.path))
    assert whole_checkpoints(Path(run.path)) == (run.step or None), "what was trained is saved"
    if moment == "in mid step":
        assert run.step == 4 and "Step 4 is being saved: " in said
    whole = start_run(make_config(tmp_path), tmp_path / "whole")
    execute(whole)
    resumes_to_the_end(capsys, runs, whole)

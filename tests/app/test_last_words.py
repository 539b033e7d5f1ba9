"""SIGTERM and SIGHUP end the app as Ctrl-C does, at any moment of a run: the run stops, the last
finished step is saved, and a resume equals a run that nothing has broken, to the bit.

The app is a process of its own, with its page, session and queue. Its runs are started by a hook,
and another hook sends the signal at one moment of a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from app.session.detached import process_of_its_own
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import (
    EvalFinished,
    Event,
    ExportWritten,
    JobProgressed,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs, summarize
from engine.training.loop.run import start_run
from tests.support.failing import intact, resumes_to_the_end, whole_checkpoints
from tests.support.folders import make_config
from tests.support.ports import free_port
from tests.support.strangers import beyond_loopback, listening
from tests.support.trained_runs import execute

PATIENCE = 120
KEPT_IN = "RAMSTREAM_TEST_FOLDER"
"""What a program under test keeps for the test is in the folder that this variable names."""
DETACHED = {"train.steps": 400, "output.checkpoint_every": 0, "output.eval_every": 0}


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


# ---------------------------------------------------------------------- outside


def ended_app(
    tmp_path: Path,
    moment: str,
    number: int,
    within: Sequence[str] = (),
    program: Callable = app,
    **values,
) -> tuple[Path, str]:
    """An app, or another program, that a signal has ended; its runs, and what it said."""
    preset, runs = tmp_path / "preset.yaml", tmp_path / "runs"
    make_config(tmp_path, **values).save(preset)
    call = (
        "import tests.app.test_last_words as it; "
        f"it.{program.__name__}({moment!r}, {int(number)}, *sys.argv[1:])"
    )
    done = subprocess.run(
        [*within, sys.executable, "-c", f"import sys; {call}", str(preset), str(runs)],
        capture_output=True,
        text=True,
        cwd=PROGRAM_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", KEPT_IN: str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        timeout=PATIENCE,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, (done.returncode, said)
    return runs, said


def queued(runs: Path) -> int:
    path = runs / "queue.json"
    return len(json.loads(path.read_text())["runs"]) if path.exists() else 0


@pytest.mark.slow("it tries a signal at many moments of a run")
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


@pytest.mark.slow("a process is started, which trains")
@pytest.mark.parametrize("program", [train, app])
def test_a_step_is_saved_while_a_long_op_of_the_next_goes_on(capsys, tmp_path, program):
    """A container gives ten seconds, and no signal ends an op. It is computed in the main thread
    by the command line, and in another one by the app.
    """
    runs, said = ended_app(tmp_path, LONG_OP, signal.SIGTERM, program=program)
    (run,) = list_runs(runs)
    assert run.state == "stopped" and run.step == 4 and "saved at step 4" in said + run.reason
    whole = start_run(make_config(tmp_path), tmp_path / "whole")
    execute(whole)
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.slow("two ranks are started, three times")
def test_a_long_step_of_two_ranks_is_given_up_and_the_one_before_it_saved(capsys, tmp_path):
    """As with one rank, the end of the step is not waited for: a container gives ten seconds. The
    app starts such a run by the same command.
    """
    values = {"engine.gpus": 2}
    runs, said = ended_app(tmp_path, LONG_STEP, signal.SIGTERM, program=train, **values)
    (run,) = list_runs(runs)
    assert run.state == "stopped" and run.step == 4, run
    intact(Path(run.path))
    assert whole_checkpoints(Path(run.path)) == 4
    assert "Step 4 is being saved: " in said
    everywhere, beyond = json.loads((tmp_path / "listening.json").read_text())
    assert everywhere and not beyond
    whole = start_run(make_config(tmp_path, **values), tmp_path / "whole")
    execute(whole)
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.slow("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_signal_in_the_export_leaves_a_run_that_is_finished(tmp_path, number):
    runs, _ = ended_app(tmp_path, "in the export", number, **{"output.export": True})
    (run,) = list_runs(runs)
    assert run.state == "finished" and run.step == 8
    assert any(isinstance(record.event, ExportWritten) for record in intact(Path(run.path)))
    assert (Path(run.path) / "export" / "model.safetensors").is_file()


@pytest.mark.slow("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_signal_between_two_queued_runs_starts_no_other(tmp_path, number):
    runs, _ = ended_app(tmp_path, "between two runs", number)
    assert [run.state for run in list_runs(runs)] == ["finished"] and queued(runs) == 1


@pytest.mark.slow("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_signal_ends_an_idle_app(tmp_path, number):
    runs, said = ended_app(tmp_path, "idle", number)
    assert not list_runs(runs) and "Stopping" not in said


@pytest.mark.slow("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_detached_run_outlives_the_app_that_a_signal_ends(tmp_path, number):
    runs, said = ended_app(tmp_path, "beside a detached run", number, **DETACHED)
    (run,) = list_runs(runs)
    folder = RunFolder(Path(run.path))
    assert run.state == "running" and run.id not in said
    before = run.step
    wait_until(lambda: list_runs(runs)[0].step > before)
    os.kill(process_of_its_own(folder), signal.SIGTERM)
    wait_until(lambda: list_runs(runs)[0].state == "stopped")


@pytest.mark.slow("it tries a signal at many moments of a run")
def test_the_first_process_of_a_container_stops_and_saves_detached_runs(tmp_path):
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("this account may not make a namespace of processes")
    moment = "beside a detached run"
    runs, said = ended_app(tmp_path, moment, signal.SIGTERM, container, **DETACHED)
    (run,) = list_runs(runs)
    assert run.state == "stopped" and run.step >= 3 and f"Stopping and saving {run.id}" in said
    assert whole_checkpoints(Path(run.path)) == run.step


# ---------------------------------------------------------------------- a second signal


HANDLER = """
import os, signal, sys, time
from engine.tools.cli.end_signals import EndSignals
with EndSignals(lambda number, urgent: print(number, urgent, flush=True)) as signals:
    for wait, number in {pairs}:
        time.sleep(wait)
        os.kill(os.getpid(), number)
    print("still there")
"""
TERM, HUP, INT = int(signal.SIGTERM), int(signal.SIGHUP), int(signal.SIGINT)


@pytest.mark.parametrize(
    "pairs, code",
    [
        ([(0, INT), (0, INT)], 128 + INT),
        ([(0, HUP), (0, INT)], 128 + INT),
        ([(0, TERM), (1.1, TERM)], 128 + TERM),
        ([(0, INT), (1.1, TERM)], 128 + TERM),
        # One event tells them several times: a terminal that closes, a service that ends.
        ([(0, HUP), (0, HUP), (1.1, HUP)], 0),
        ([(0, TERM), (0, HUP), (0, TERM)], 0),
    ],
)
def test_a_second_signal_leaves_at_once_unless_it_belongs_to_the_first(pairs, code):
    done = handled(pairs)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[0] == f"{pairs[0][1]} {pairs[0][1] != INT}"
    assert done.stdout.count("\n") == (2 if code == 0 else 1)


IN_A_LONG_OP = """
import ctypes, os, signal, threading
from engine.tools.cli.end_signals import EndSignals
threads, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
expected, is_long, said = threading.Event(), threading.Event(), []
def end_the_op():
    threads.pthread_mutex_lock(mutex)
    is_long.set()
    os.kill(os.getpid(), {number})
    said.append(expected.wait({seconds}))
    threads.pthread_mutex_unlock(mutex)
with EndSignals(lambda *given: said.append(given), expected.set):
    other = threading.Thread(target=end_the_op)
    other.start()
    is_long.wait()
    threads.pthread_mutex_lock(mutex)  # as an op that computes, it hears of no signal
    other.join()
print(sorted(said, key=str))
"""


@pytest.mark.parametrize("number, seconds", [(TERM, PATIENCE), (HUP, PATIENCE), (INT, 0.0)])
def test_a_signal_of_a_machine_is_expected_while_the_main_thread_computes(number, seconds):
    done = handled([], program=IN_A_LONG_OP.format(number=number, seconds=seconds))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(number, number != INT), number != INT]}\n"


def test_who_started_with_nohup_hears_of_no_closed_terminal():
    ignored = handled([(0, HUP)], signal.SIG_IGN)
    assert ignored.stdout == "still there\n"


def handled(pairs, hup=signal.SIG_DFL, program=HANDLER):
    return subprocess.run(
        [sys.executable, "-c", program.format(pairs=pairs)],
        capture_output=True,
        text=True,
        cwd=PROGRAM_ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hup),
        timeout=PATIENCE,
    )


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_run_in_a_terminal_that_closes_is_saved(tmp_path):
    """bash and the system both tell a run in its foreground that the terminal is closed, mostly at
    once, so that Python sees one signal; here, one more comes a moment later.
    """
    preset, runs = tmp_path / "preset.yaml", tmp_path / "runs"
    make_config(tmp_path, **DETACHED | {"train.steps": 4000}).save(preset)
    shell, terminal = pty.fork()
    if shell == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(PROGRAM_ROOT)
        os.execvpe("bash", ["bash", "--norc", "-i"], os.environ | {"OMP_NUM_THREADS": "1"})
    program = "from tests.app.test_last_words import train_and_save_slowly as it; it()"
    line = [sys.executable, "-c", program, "--runs-dir", runs, "train", preset]
    os.write(terminal, f"{shlex.join(map(str, line))}\n".encode())
    reader = threading.Thread(target=read_all, args=(terminal,), daemon=True)
    reader.start()
    wait_until(lambda: list_runs(runs) and list_runs(runs)[0].step >= 3)
    wait_until(lambda: list_runs(runs)[0].state == "running")
    hang_up(terminal, reader)
    os.waitpid(shell, 0)
    wait_until(lambda: list_runs(runs)[0].state in ("stopping", "saving"))
    started = [record.event for record in replay(runs / list_runs(runs)[0].id / "events.jsonl")]
    os.kill(next(one.pid for one in started if isinstance(one, RunStarted)), signal.SIGHUP)
    wait_until(lambda: list_runs(runs)[0].state not in ("running", "stopping", "saving"))
    (run,) = list_runs(runs)
    assert run.state == "stopped" and whole_checkpoints(Path(run.path)) == run.step


def train_and_save_slowly() -> None:
    import launch

    real = RunRecorder.emit

    def emit(self, event):
        if state("saving")(event):
            time.sleep(1)
        return real(self, event)

    RunRecorder.emit = emit
    sys.exit(launch.main())


def read_all(terminal: int) -> None:
    """Reads what a terminal shows until its end is near, so that nobody waits to write."""
    with contextlib.suppress(OSError):
        while select.select([terminal], [], [], 0.1) and terminal not in CLOSING:
            if select.select([terminal], [], [], 0)[0]:
                os.read(terminal, 65_536)


CLOSING: set[int] = set()
"""These terminals are about to be closed."""


def hang_up(terminal: int, reader: threading.Thread) -> None:
    """Closes a terminal, as an emulator or sshd does."""
    CLOSING.add(terminal)
    reader.join()
    os.close(terminal)


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)

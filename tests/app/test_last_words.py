"""SIGTERM and SIGHUP end the app as Ctrl-C does, at any moment of a run: the run stops, the last
finished step is saved, and a resume equals a run that nothing has broken, to the bit.

The app is a process of its own, with its page, session and queue. Its runs are started by a hook,
and another hook sends the signal at one moment of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from app.session.detached import process_of_its_own
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import ExportWritten, RunStarted
from engine.runs.record.following import replay
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs
from engine.training.loop.run import start_run
from tests.support.failing import intact, resumes_to_the_end, whole_checkpoints
from tests.support.folders import make_config
from tests.support.forked_processes import ForkedProcess
from tests.support.last_words import (
    KEPT_IN,
    LONG_OP,
    LONG_STEP,
    MOMENTS,
    PATIENCE,
    app,
    train,
    wait_until,
)
from tests.support.trained_runs import execute

DETACHED = {"train.steps": 400, "output.checkpoint_every": 0, "output.eval_every": 0}


# ---------------------------------------------------------------------- in the app's process


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
        "import tests.support.last_words as it; "
        f"it.{program.__name__}({moment!r}, {int(number)}, *sys.argv[1:])"
    )
    # A forked process has imported all that training needs, but not the app.
    start = ForkedProcess if program is train and number == signal.SIGTERM else subprocess.Popen
    process = start(
        [*within, sys.executable, "-c", f"import sys; {call}", str(preset), str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=PROGRAM_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", KEPT_IN: str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in text, (process.returncode, text)
    return runs, text


def queued(runs: Path) -> int:
    path = runs / "queue.json"
    return len(json.loads(path.read_text())["runs"]) if path.exists() else 0


@pytest.mark.slow("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
@pytest.mark.parametrize("moment", [*MOMENTS, "in mid step"])
def test_a_signal_at_any_moment_of_an_apps_run_saves_its_last_finished_step(
    capsys, tmp_path, moment, number
):
    runs, shown = ended_app(tmp_path, moment, number)
    (run,) = list_runs(runs)
    assert run.state == "stopped", run
    intact(Path(run.path))
    assert whole_checkpoints(Path(run.path)) == (run.step or None), "what was trained is saved"
    if moment == "in mid step":
        assert run.step == 4 and "Step 4 is being saved: " in shown
    whole = start_run(make_config(tmp_path), tmp_path / "whole")
    execute(whole)
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.slow("a process is started, which trains")
@pytest.mark.parametrize("program", [train, app])
def test_a_step_is_saved_while_a_long_op_of_the_next_goes_on(capsys, tmp_path, program):
    """A container gives ten seconds, and no signal ends an op. It is computed in the main thread
    by the command line, and in another one by the app.
    """
    runs, shown = ended_app(tmp_path, LONG_OP, signal.SIGTERM, program=program)
    (run,) = list_runs(runs)
    assert run.state == "stopped"
    assert run.step == 4
    assert "saved at step 4" in shown + run.reason
    whole = start_run(make_config(tmp_path), tmp_path / "whole")
    execute(whole)
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.slow("two ranks are started, three times")
def test_a_long_step_of_two_ranks_is_given_up_and_the_one_before_it_saved(capsys, tmp_path):
    """As with one rank, the end of the step is not waited for: a container gives ten seconds. The
    app starts such a run by the same command.
    """
    values = {"engine.gpus": 2}
    runs, shown = ended_app(tmp_path, LONG_STEP, signal.SIGTERM, program=train, **values)
    (run,) = list_runs(runs)
    assert run.state == "stopped" and run.step == 4, run
    intact(Path(run.path))
    assert whole_checkpoints(Path(run.path)) == 4
    assert "Step 4 is being saved: " in shown
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
    runs, shown = ended_app(tmp_path, "idle", number)
    assert not list_runs(runs) and "Stopping" not in shown


@pytest.mark.slow("it tries a signal at many moments of a run")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_detached_run_outlives_the_app_that_a_signal_ends(tmp_path, number):
    runs, shown = ended_app(tmp_path, "beside a detached run", number, **DETACHED)
    (run,) = list_runs(runs)
    folder = RunFolder(Path(run.path))
    assert run.state == "running" and run.id not in shown
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
    runs, shown = ended_app(tmp_path, moment, signal.SIGTERM, container, **DETACHED)
    (run,) = list_runs(runs)
    assert run.state == "stopped"
    assert run.step >= 3
    assert f"Stopping and saving {run.id}" in shown
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
    program = "from tests.support.last_words import train_and_save_slowly as it; it()"
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

"""`launch.py train` with two ranks, as a process that a person starts in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch
from engine.config.settings import TrainConfig
from engine.runs.summaries.listing import list_runs
from tests.support.folders import make_config
from tests.support.forked_processes import ForkedProcess
from tests.support.killed import ONE_THREAD
from tests.support.worker_groups import FORK_RANKS, wait_for_end, workers_of

pytestmark = pytest.mark.slow("it starts processes and waits for them, for five seconds or more")

ROOT = Path(launch.__file__).parent
PATIENCE = 120
TWO = {"engine.gpus": 2, "train.micro_batch_size": 1}


AS_IN_A_TERMINAL = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""A process that nohup has started ignores SIGHUP, and so would what it starts."""
PLAIN = (
    f"import os, sys; {AS_IN_A_TERMINAL}os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
FORKED = (
    f"{FORK_RANKS}{AS_IN_A_TERMINAL}"
    "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Terminal:
    """A command in a process group of its own, as a terminal starts it. forked: all of its
    processes are forked from one that has imported.
    """

    def __init__(self, *arguments: str, forked: bool = True):
        start = ForkedProcess if forked else subprocess.Popen
        program = [sys.executable, "-c", FORKED if forked else PLAIN]
        self.process = start(
            [*program, str(ROOT / "launch.py"), "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            env=os.environ | ONE_THREAD,
        )

    def press(self, number: int) -> None:
        """Sends a signal to the whole group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def output(self) -> tuple[int, str, str]:
        """Returns the exit code, and what was written to stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=PATIENCE)
        except BaseException:
            self.press(signal.SIGKILL)  # the run goes on otherwise
            raise
        return self.process.returncode, out, err


def preset_of(folder: Path, **values) -> str:
    config: TrainConfig = make_config(folder, **TWO | values)
    config.save(folder / "preset.yaml")
    return str(folder / "preset.yaml")


def wait_for_step(runs: Path, terminal: Terminal, step: int) -> list[int]:
    """Waits until a run has done a step; returns the workers."""
    until = time.monotonic() + PATIENCE
    while not (runs.exists() and list_runs(runs) and list_runs(runs)[0].step >= step):
        assert terminal.process.poll() is None, terminal.output()
        assert time.monotonic() < until
        time.sleep(0.05)
    workers = workers_of(terminal.process.pid)
    assert len(workers) == 1
    return workers


def test_ctrl_c_stops_and_saves_and_resume_finishes(tmp_path):
    runs = tmp_path / "runs"
    preset = preset_of(tmp_path, **{"train.steps": 100_000, "train.schedule": "constant"})
    terminal = Terminal(preset, "--runs-dir", str(runs), forked=False)
    workers = wait_for_step(runs, terminal, 3)
    terminal.press(signal.SIGINT)
    code, out, err = terminal.output()
    assert code == 0 and "Stopped and saved at step" in out, (out, err)
    wait_for_end(*workers)
    (run,) = list_runs(runs)
    assert run.state == "stopped"

    steps = ["--set", f"train.steps={run.step + 2}"]
    code, out, err = Terminal("--resume", run.id, "--runs-dir", str(runs), *steps).output()
    assert code == 0 and "Finished all" in out, (out, err)
    for text in (out, err):
        for noise in ("Traceback", "gloo", "Gloo", "Warning", "rank0]", "[W", "c10d"):
            assert noise not in text, text
    assert list_runs(runs)[0].step == run.step + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ways_to_end_it_save_too(tmp_path, number):
    runs = tmp_path / "runs"
    preset = preset_of(tmp_path, **{"train.steps": 100_000, "train.schedule": "constant"})
    terminal = Terminal(preset, "--runs-dir", str(runs))
    workers = wait_for_step(runs, terminal, 2)
    terminal.press(number)
    code, out, err = terminal.output()
    assert code == 0 and "Stopped and saved at step" in out, (out, err)
    wait_for_end(*workers)


def test_a_rank_that_is_lost_is_one_sentence_and_exit_code_1(tmp_path):
    runs = tmp_path / "runs"
    preset = preset_of(tmp_path, **{"train.steps": 100_000, "train.schedule": "constant"})
    terminal = Terminal(preset, "--runs-dir", str(runs))
    workers = wait_for_step(runs, terminal, 2)
    os.kill(workers[0], signal.SIGKILL)
    code, out, err = terminal.output()
    assert code == 1
    found = [each for each in err.splitlines() if each.startswith("ramstream: ")]
    assert len(found) == 1 and found[0].startswith("ramstream: Rank 1 of 2 is lost: "), err
    assert "Traceback" not in out + err and "terminate" not in err
    wait_for_end(*workers)


def test_ctrl_z_and_fg_go_on(tmp_path):
    runs = tmp_path / "runs"
    preset = preset_of(tmp_path, **{"train.steps": 100_000, "train.schedule": "constant"})
    terminal = Terminal(preset, "--runs-dir", str(runs))
    workers = wait_for_step(runs, terminal, 2)
    terminal.press(signal.SIGSTOP)
    time.sleep(2.0)
    step = list_runs(runs)[0].step
    terminal.press(signal.SIGCONT)
    assert wait_for_step(runs, terminal, step + 1) == workers
    terminal.press(signal.SIGINT)
    code, out, _ = terminal.output()
    assert code == 0 and "Stopped and saved at step" in out

"""A whole job in the app beside the same job on the command line: `python -m tests.gpu.job_in_app
[MODEL ROWS TOKENS STEPS OPTIMIZER]`.

The app's own process starts a run of random weights, as Start does. Ten clients then ask for what
an open page asks for. By requests, the run gets another learning rate, is paused, goes on, is
stopped and saved, is resumed from its checkpoint and is discarded. Prints how long a step took on
the command line, in the app alone, with ten clients and after the resume, the RAM and GPU memory
beside what was predicted, and how long each request took.

The disk must hold one checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import yaml

from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import CheckpointWritten, RunEnded, SettingsChanged, StepFinished
from engine.runs.record.following import replay
from engine.text import in_gib
from engine.tools.cli.runs import prediction_check_of
from engine.training.loop import planning
from tests.gpu.forecasts import STARTER_TOKENS, folder_of
from tests.gpu.watchers import start_app
from tests.support.ports import free_port

WARM_UP = 3
"""A run's first steps compile kernels, and are not counted."""
RATE = 2e-6
"""The run gets this learning rate while it goes on."""
PAUSED_SECONDS = 3.0
LONGEST_WAIT = 300.0


def settings(model: str, rows: int, tokens: int, optimizer: str, place: Path) -> TrainConfig:
    """Returns the settings of the run, whose model and data are written to `place`."""
    data = place / "data.jsonl"
    lines = (PROGRAM_ROOT / "assets" / "starter.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines * (1 + 2 * rows * tokens // STARTER_TOKENS)) + "\n")
    return TrainConfig.from_dict(
        {
            "name": "A whole job",
            "model": {"source": str(folder_of(model, place / "model")), "init": "random"},
            "data": {"source": str(data), "max_seq_len": tokens, "eval_fraction": 0.0},
            "train": {
                "steps": 1000,
                "batch_size": rows,
                "learning_rate": 1e-6,
                "optimizer": optimizer,
                "schedule": "constant",
            },
            "output": {"export": False, "eval_every": 0, "checkpoint_every": 0},
        }
    )


def steps_of(events: Path) -> list[StepFinished]:
    """Returns the steps of a record."""
    return [at.event for at in replay(events) if isinstance(at.event, StepFinished)]


def on_the_command_line(config: TrainConfig, steps: int, place: Path) -> Path:
    """Trains so many steps by `launch.py train`, and returns the folder of the run."""
    preset = place / "preset.yaml"
    changes = {"train.steps": steps, "output.checkpoint": "none"}
    preset.write_text(yaml.safe_dump(config.with_values(changes).to_dict()))
    runs = place / "command-line"
    command = [sys.executable, str(PROGRAM_ROOT / "launch.py"), "train", str(preset)]
    subprocess.run([*command, "--runs-dir", str(runs)], check=True)
    return next(path for path in runs.iterdir() if (path / "events.jsonl").exists())


def ask(address: str, body: object = None) -> dict:
    """Returns the answer of the app to a request. An HTTP error is raised."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, content, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_until(holds: Callable[[], bool], what: str) -> float:
    """Waits until `holds()`, and returns how many seconds that took."""
    begin = time.monotonic()
    while not holds():
        if time.monotonic() - begin > LONGEST_WAIT:
            raise SystemExit(f"{LONGEST_WAIT:g} s have passed: {what}")
        time.sleep(0.02)
    return time.monotonic() - begin


@contextlib.contextmanager
def ten_clients(address: str) -> Iterator[None]:
    """While its context is open, a process of ten clients follows the run at `address`."""
    command = [sys.executable, "-m", "tests.gpu.watchers", "--watch", address]
    clients = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert clients.stdin is not None
    clients.stdin.write("on\n")
    clients.stdin.flush()
    try:
        yield
    finally:
        clients.kill()
        clients.wait()


class Job:
    """A run of the app, asked by HTTP for what a page asks for."""

    def __init__(self, session, address: str, run_id: str):
        self._session = session
        self._address = address
        self._id = run_id
        self.live = f"{address}/api/live/{run_id}"
        self.events = session.runs_dir / run_id / "events.jsonl"

    def state(self) -> str:
        return ask(self.live)["bar"]["state"]

    def steps(self) -> list[StepFinished]:
        return steps_of(self.events)

    def wait_for_steps(self, more: int) -> list[StepFinished]:
        """Waits for `more` steps, and returns them."""
        first = len(self.steps())
        while len(self.steps()) < first + more:
            if self._session.active_id is None and self.state() not in ("running", "preparing"):
                raise SystemExit(f"The run has ended: see {self.events.parent}")
            time.sleep(0.2)
        return self.steps()[first : first + more]

    def control(self, command: str, state: str) -> float:
        """Sends a command and returns how many seconds passed until the page showed `state`."""
        begin = time.monotonic()
        ask(f"{self._address}/api/runs/{self._id}/control", {"command": command})
        wait_until(lambda: self.state() == state, f"after {command} the run is {self.state()}")
        return time.monotonic() - begin

    def change_rate(self) -> None:
        values = {"train.learning_rate": RATE}
        ask(f"{self._address}/api/runs/{self._id}/change", {"values": values})

    def wait_until_over(self) -> float:
        return wait_until(lambda: self._session.active_id is None, "the run has not ended")


def median(steps: list[StepFinished]) -> float:
    return statistics.median(step.seconds for step in steps)


def in_the_app(config: TrainConfig, steps: int, place: Path) -> tuple[Path, list[str], dict]:
    """Does the job in the app. Returns the folder of the run, what happened in lines of text, and
    seconds a step by phase.
    """
    port = free_port()
    session = start_app(place / "runs", port)
    address = f"http://127.0.0.1:{port}"
    job = Job(session, address, session.start(config))
    told, seconds = [], {}
    job.wait_for_steps(WARM_UP)
    seconds["in the app, nobody watches"] = median(job.wait_for_steps(steps))
    with ten_clients(job.live):
        seconds["in the app, ten clients"] = median(job.wait_for_steps(steps))
        job.change_rate()
        changed = job.wait_for_steps(2)
        told.append(f"changed: learning rates of the next steps {changed[-1].learning_rate:g}")
        told.append(f"paused after {job.control('pause', 'paused'):.2f} s")
        before = len(job.steps())
        time.sleep(PAUSED_SECONDS)
        told.append(f"{len(job.steps()) - before} steps ended in {PAUSED_SECONDS:g} s of the pause")
        told.append(f"went on after {job.control('resume', 'running'):.2f} s")
        job.wait_for_steps(2)
        told.append(f"stopped and saved after {job.control('stop', 'stopped'):.2f} s")
        told.append(f"its memory was released {job.wait_until_over():.2f} s after that")
        saved = job.steps()[-1].step
        told.append(f"resumed after {job.control('resume', 'running'):.2f} s")
        job.wait_for_steps(WARM_UP)
        seconds["in the app, resumed, ten clients"] = median(job.wait_for_steps(steps))
        after = next(step for step in job.steps()[::-1] if step.step == saved + 1)
        told.append(f"saved at step {saved}, and went on with step {after.step}")
        told.append(f"discarded after {job.control('discard', 'discarded'):.2f} s")
    told.append(f"its memory was released {job.wait_until_over():.2f} s after that")
    for record in replay(job.events):
        event = record.event
        if isinstance(event, CheckpointWritten | SettingsChanged | RunEnded):
            told.append(f"in the record: {event.kind} {event}"[:160])
    return job.events.parent, told, seconds


def memory_of(folder: Path) -> list[str]:
    """Returns lines of what a run predicted, beside what was measured."""
    lines = []
    for name, values in prediction_check_of(folder).items():
        predicted, measured = values["predicted"], values["measured"]
        if name.endswith("bytes") and predicted and measured:
            error = 100 * (measured / predicted - 1)
            lines.append(f"{name}: {in_gib(measured)} of {in_gib(predicted)} ({error:+.1f} %)")
    return lines


def main(asked: list[str]) -> None:
    model = asked[0] if asked else "Qwen/Qwen2.5-7B"
    rows, tokens, steps = (
        int(asked[index]) if len(asked) > index else default
        for index, default in ((1, 32), (2, 1024), (3, 12))
    )
    optimizer = asked[4] if len(asked) > 4 else "adamw_8bit"
    read_machine = planning.read_machine
    # The planner wants space for a second checkpoint, which this job does not write.
    planning.read_machine = lambda path: replace(read_machine(path), disk_free=1 << 50)
    place = Path(tempfile.mkdtemp())
    config = settings(model, rows, tokens, optimizer, place)
    alone = on_the_command_line(config, WARM_UP + steps, place)
    folder, told, seconds = in_the_app(config, steps, place)
    by_line = median(steps_of(alone / "events.jsonl")[WARM_UP:])
    print(f"\n{model}, {rows} x {tokens}, {optimizer}: seconds a step, median of {steps}")
    print(f"  {'on the command line':36} {by_line:.4f}")
    for name, value in seconds.items():
        print(f"  {name:36} {value:.4f}  {100 * (value / by_line - 1):+.2f} %")
    for name, path in (("command line", alone), ("app", folder)):
        print(f"{name}:", *memory_of(path), sep="\n  ")
    print("what happened:", *told, sep="\n  ", flush=True)
    rmtree(place)


if __name__ == "__main__":
    main(sys.argv[1:])

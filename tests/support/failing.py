"""What must hold after every bad input and every fault: an exit code, one sentence, nothing
half-written. And the runs that are broken.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

import launch
from engine.config.settings import TrainConfig
from engine.machine.read_machine import read_machine
from engine.runs.record.events import (
    CheckpointWritten,
    JobProgressed,
    Record,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.summaries.listing import list_runs
from engine.runtime.step.executor import Executor
from engine.training.checkpoints.restore import newest_checkpoint
from tests.support.folded import fold
from tests.support.trained_runs import planes_on_disk

RUN_FILES = {
    "config.yaml",
    "events.jsonl",
    "events.torn",
    "session.json",
    "lock",
    "control.jsonl",
    "best",
    "checkpoints",
    "export",
    "reference.npz",
}


def command(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and the last line of the errors, in which no traceback may stand."""
    capsys.readouterr()
    try:
        code = launch.main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err, printed
    lines = [line for line in printed.err.splitlines() if line.startswith("ramstream: ")]
    assert len(lines) == (1 if code else 0), printed
    return code, printed.out, lines[0].removeprefix("ramstream: ") if lines else ""


def refused(capsys, runs: Path, *arguments) -> str:
    """A command that must end with exit code 2 before it makes anything; its sentence."""
    before = sorted(runs.rglob("*"))
    code, _, sentence = command(capsys, "--runs-dir", runs, *arguments)
    assert code == 2 and sentence.endswith("."), sentence
    assert sorted(runs.rglob("*")) == before
    return sentence


def failed(capsys, runs: Path, *arguments, code: int) -> str:
    """A run that must fail with this exit code and leave a whole record that tells the cause; its
    sentence.
    """
    there = {run.id for run in list_runs(runs)} if "--resume" not in arguments else set()
    ended, _, sentence = command(capsys, "--runs-dir", runs, "train", *arguments)
    assert ended == code and sentence.endswith("."), (ended, sentence)
    run = next(run for run in list_runs(runs) if run.id not in there)
    assert (run.state, run.reason) == ("failed", sentence)
    records = intact(Path(run.path))
    assert isinstance(records[-1].event, RunEnded) and records[-1].event.reason == sentence
    return sentence


def intact(path: Path) -> list[Record]:
    """The records of a run folder in which nothing is half-written and that nobody holds."""
    folder = RunFolder(path)
    assert {item.name for item in path.iterdir()} <= RUN_FILES
    assert not folder.is_running()
    TrainConfig.load(path / "config.yaml")
    records = list(replay(folder.events_path))
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert folder.events_path.read_bytes().endswith(b"\n")
    fold(records)  # which raises where one cannot be applied
    return records


def whole_checkpoints(path: Path) -> int | None:
    """The newest step that is saved; no leftovers stand beside it."""
    root = path / "checkpoints"
    assert not list(root.glob(".*"))
    found = newest_checkpoint(root)
    return None if found is None else found.step


# ---------------------------------------------------------------------- runs to break


def resumes_to_the_end(capsys, runs: Path, whole) -> None:
    """The only unfinished run goes on to the end and equals `whole` to the bit."""
    run = next(run for run in list_runs(runs) if run.state != "finished")
    assert command(capsys, "--runs-dir", runs, "train", "--resume", run.id)[0] == 0
    equals(open_run(runs, run.id), whole)


def equals(folder: RunFolder, whole) -> list[Record]:
    """The records of a run that is over, which equals `whole` to the bit."""
    records = intact(folder.path)
    whole_checkpoints(folder.path)
    theirs = planes_on_disk(whole)
    whole.folder, own = folder, whole.folder
    try:
        assert planes_on_disk(whole) == theirs
    finally:
        whole.folder = own
    return records


# ---------------------------------------------------------------------- full disks


def fill(place: Path, leave: int = 0) -> Path:
    """Write a file that leaves so many bytes of a disk free."""
    ballast = place / "ballast"
    size = shutil.disk_usage(place).free - leave
    with open(ballast, "wb") as file:
        file.write(bytes(max(0, size)))
    return ballast


def plenty(path):
    """In the place of `read_machine`: a machine whose disk seems large enough for the whole run."""
    return replace(read_machine(path), disk_free=1 << 40)


def at_event(monkeypatch, chosen, act) -> None:
    """Call `act` once, just before the first event that `chosen` takes is recorded."""
    real, done = RunRecorder.emit, []

    def emit(self, event):
        if not done and chosen(event):
            done.append(event)
            act()
        return real(self, event)

    monkeypatch.setattr(RunRecorder, "emit", emit)


def at_step(number: int):
    return lambda event: isinstance(event, StepFinished) and event.step == number


MOMENTS = {
    "before the data is read": lambda e: isinstance(e, StateChanged) and e.state == "preparing",
    "while the weights are read": lambda e: isinstance(e, JobProgressed) and e.job == "load_model",
    "before the first step": lambda e: isinstance(e, RunStarted),
    "in a step": at_step(4),
    "before a checkpoint": lambda e: isinstance(e, StateChanged) and e.state == "saving",
    "in a checkpoint": lambda e: isinstance(e, JobProgressed) and e.job == "checkpoint",
    "after a checkpoint": lambda e: isinstance(e, CheckpointWritten),
}
"""Moments of a run that keeps a checkpoint, as the events that are recorded then."""


def full_at(monkeypatch, step: int, kind: str, times: int) -> list[int]:
    """Makes ops of this kind run out of memory in the first `times` attempts of a step; returns a
    list to which each such attempt adds its number of micro-batches.
    """
    real, tried = Executor.work, []

    def work(self, op, under_way):
        if under_way.inputs.number == step and op.kind == kind and len(tried) < times:
            tried.append(len(under_way.inputs.batches))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return real(self, op, under_way)

    monkeypatch.setattr(Executor, "work", work)
    return tried

"""What must hold after every bad input and every fault: an exit code, one sentence, nothing half-written."""

from __future__ import annotations

from pathlib import Path

import launch
from engine.config import TrainConfig
from engine.events import Record, RunEnded
from engine.recorder import replay
from engine.restore import newest_checkpoint
from engine.runs import RunFolder, list_runs
from engine.snapshot import RunSnapshot

RUN_FILES = {"config.yaml", "events.jsonl", "events.torn", "session.json", "lock", "control.jsonl", "checkpoints", "export"}


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
    """A run that must fail with this exit code and leave a whole record that tells the cause; its sentence."""
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
    snapshot = RunSnapshot()
    for record in records:
        snapshot.apply(record)
    return records


def whole_checkpoints(path: Path) -> int | None:
    """The newest step that is saved; no leftovers stand beside it."""
    root = path / "checkpoints"
    assert not list(root.glob(".*"))
    found = newest_checkpoint(root)
    return None if found is None else found.step

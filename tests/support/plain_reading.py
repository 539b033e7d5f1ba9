"""Records read line by line with the standard library, which fast reading is compared with."""

from __future__ import annotations

import json

from engine.runs.record.events import (
    LineDamaged,
    LogLine,
    Record,
    RunStarted,
)
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.snapshot import RunSnapshot
from tests.support.synthetic_run import run_events


def plain(line: bytes) -> Record:
    """What a line says, by the slow way."""
    values = json.loads(line)
    if b"\\u" in line or not line.isascii():
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return Record.from_json(values)


def plain_fold(content: bytes) -> RunSnapshot:
    snapshot, before = RunSnapshot(), Record("r", 0, 0.0, LogLine())
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            before = plain(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = f"Line {number} of events.jsonl is damaged: what it recorded is not shown."
            before = Record(
                before.run_id, before.seq + 1, before.time, LineDamaged("warning", text)
            )
        snapshot.apply(before)
    return snapshot


def caught_up(path) -> RunSnapshot:
    snapshot = RunSnapshot()
    catch_up(snapshot, Follower(path))
    return snapshot


def recorded(folder, *sessions) -> bytes:
    """The record of these events, a recorder for each list."""
    folder.mkdir(parents=True, exist_ok=True)
    for events in sessions:
        recorder = RunRecorder(folder, "r")
        for event in events:
            recorder.emit(event)
        recorder.close()
    return (folder / "events.jsonl").read_bytes()


def resumed_run() -> list:
    """Lists of events: of a run that was stopped and resumed from earlier steps twice, with norms
    and timelines.
    """
    first = run_events(55, total=90, ended="stopped", blocks=3)
    again = run_events(90, total=90, ended=None, blocks=3)

    def since(step):
        return [
            RunStarted(total_steps=90, resumed_step=step),
            *(event for event in again if getattr(event, "step", 0) > step),
        ]

    return [first, since(35), since(80), since(40)]

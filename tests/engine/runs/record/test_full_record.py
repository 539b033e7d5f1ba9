"""On a full disk, the recorder waits for space if its owner allows that, and raises otherwise."""

from __future__ import annotations

import errno
import os
import threading

import pytest

import engine.runs.record.recorder
from engine.errors import RunError
from engine.runs.record.events import LogLine, RunEnded, StateChanged
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from tests.support.disks import small_file_system
from tests.support.failing import fill
from tests.support.folded import fold

SECONDS = 60


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Mounts a file system of 40 MiB that is checked often."""
    monkeypatch.setattr(engine.runs.record.recorder, "POLL_SECONDS", 0.05)
    with small_file_system(tmp_path / "disk", 40) as place:
        yield place


def test_threads_that_write_at_once_wait_together_and_lose_no_line(disk):
    recorder, found = RunRecorder(disk, "r"), threading.Event()
    recorder.wait_for_disk_space(lambda: 0)
    rested = []
    recorder.call_after_wait(lambda: rested.append(1))
    recorder.subscribe(
        lambda record: (
            found.set() if getattr(record.event, "lacks_space_for", "") == "record" else None
        )
    )
    recorder.emit(StateChanged("running"))
    ballast = fill(disk)
    texts = [f"{number} {'x' * 6000}" for number in range(8)]
    writers = [
        threading.Thread(target=recorder.emit, args=(LogLine("info", text),)) for text in texts
    ]
    for writer in writers:
        writer.start()
    assert found.wait(SECONDS) and recorder.snapshot.state == "paused"
    ballast.unlink()
    for writer in writers:
        writer.join()
    recorder.close()
    records = list(replay(recorder.path))
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    lines = [r.event.text for r in records if isinstance(r.event, LogLine)]
    assert sorted(line for line in lines if line[0].isdigit()) == texts
    assert [r.event.state for r in records if isinstance(r.event, StateChanged)] == [
        "running",
        "paused",
        "running",
    ]
    folded = fold(records)
    assert folded == recorder.snapshot and 1 <= len(rested) <= len(texts)


def test_a_record_that_waits_within_the_wait_of_a_checkpoint_goes_back_to_that(disk):
    recorder, found = RunRecorder(disk, "r"), threading.Event()
    recorder.wait_for_disk_space(lambda: 0)
    recorder.subscribe(
        lambda record: (
            found.set() if getattr(record.event, "lacks_space_for", "") == "record" else None
        )
    )
    waiting = recorder.emit(StateChanged("paused", "It needs 1 GiB.", "checkpoint")).event
    ballast = fill(disk)
    writer = threading.Thread(target=recorder.emit, args=(LogLine("info", "x" * 6000),))
    writer.start()
    assert found.wait(SECONDS)
    ballast.unlink()
    writer.join()
    recorder.close()
    states = [r.event for r in replay(recorder.path) if isinstance(r.event, StateChanged)]
    assert [event.lacks_space_for for event in states] == [
        "checkpoint",
        "record",
        "checkpoint",
    ]
    assert (states[-1].reason, states[-1].lacks_space_for) == (
        waiting.reason,
        waiting.lacks_space_for,
    )
    assert (recorder.snapshot.state, recorder.snapshot.lacks_space_for) == ("paused", "checkpoint")


def test_a_wait_ends_when_its_owner_ends_the_run(disk):
    """After an error elsewhere, the owner's thread sets `endings` to None, and no lane keeps
    waiting.
    """
    recorder, found, problems = RunRecorder(disk, "r"), threading.Event(), []
    recorder.wait_for_disk_space(lambda: 0)
    recorder.subscribe(
        lambda record: (
            found.set() if getattr(record.event, "lacks_space_for", "") == "record" else None
        )
    )
    fill(disk)

    def write() -> None:
        with pytest.raises(RunError, match="No space left on device") as raised:
            recorder.emit(LogLine("info", "x" * 6000))
        problems.append(raised)

    writer = threading.Thread(target=write)
    writer.start()
    assert found.wait(SECONDS)
    recorder.wait_for_disk_space(None)
    writer.join()
    assert problems and not recorder.gave_up
    assert recorder.emit(RunEnded("failed", "It failed.")).event.reason == "It failed."
    recorder.close()
    assert [r.event.kind for r in replay(recorder.path)] == ["state_changed", "run_ended"]


def test_a_disk_that_fails_is_not_waited_for(tmp_path, monkeypatch):
    recorder = RunRecorder(tmp_path, "r")
    recorder.wait_for_disk_space(lambda: 0)

    def fail(descriptor, data):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", fail)
        with pytest.raises(RunError, match="Input/output error.*mend that"):
            recorder.emit(LogLine())
    recorder.close()

"""`RunRecorder`, the one writer of a run's ``events.jsonl``, and its readers, `replay` and `Follower`."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import RunError
from engine.events import CheckpointWritten, Event, LineDamaged, LogLine, Record, RunEnded
from engine.snapshot import RunSnapshot

EVENTS_FILE = "events.jsonl"
TORN_FILE = "events.torn"
"""What a killed process left of its last line is moved here, so that every line of the record is whole."""
SESSION_FILE = "session.json"
"""Of a resumed run: the Unix `time` at which the latest session began, and `earlier_seconds`, the length of those
before it. Lists of runs read it instead of the whole record."""

RESERVE_FILE = "events.reserve"
"""Disk space that an open record holds back: on a full disk it is given to the last line, which tells the cause."""

FULL = (errno.ENOSPC, errno.EDQUOT)
ROOM_BYTES = 16 << 20
"""What the record of some hours takes, which is asked for when a disk is full."""

_RESERVE_BYTES = 1 << 16
_SCAN_BYTES = 1 << 16


class RunRecorder:
    """Appends events to ``<folder>/events.jsonl`` and keeps the snapshot that they add up to.

    Opening an existing record goes on where it ended: `seq` counts on, a torn last line is moved to ``events.torn``.
    At most one recorder may be open for a folder; the run's lock sees to that. Raises RunError when the file cannot be
    read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], run_id: str):
        self.run_id = run_id
        self.path = Path(folder) / EVENTS_FILE
        self.snapshot = RunSnapshot()
        self._lock = threading.Lock()
        self._subscribers: list[Callable[[Record], None]] = []
        self._undelivered: deque[Record] = deque()
        self._delivering = False
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"The record {self.path} cannot be opened ({error.strerror}); check the folder.") from None
        try:
            _repair_end(self.path, self._descriptor)
            self._reserve()
            for record in replay(self.path):
                self.snapshot.apply(record)
            if self.snapshot.last_seq:
                session = {"time": time.time(), "earlier_seconds": self.snapshot.seconds}
                self.path.with_name(SESSION_FILE).write_text(json.dumps(session), encoding="utf-8")
        except OSError as error:
            self.close()
            raise RunError(f"The record {self.path} cannot be written ({error.strerror}); check the disk.") from None
        except BaseException:
            self.close()
            raise

    def emit(self, event: Event) -> Record:
        """Write one event as one line, apply it to the snapshot, then call the subscribers. Any thread may call.

        A NaN or infinite number raises ValueError, a value without a JSON form or of another type than its field's
        TypeError: both are faults of the program, since a run must end by name before it records such a number. A disk
        that cannot take the line raises RunError; the file then still ends with the line before.
        """
        with self._lock:
            if self._descriptor is None:
                raise RuntimeError(f"{event.kind} was emitted after the recorder was closed.")
            if isinstance(event, RunEnded):
                self.path.with_name(RESERVE_FILE).unlink(missing_ok=True)
            line = _encode(Record(self.run_id, self.snapshot.last_seq + 1, time.time(), event))
            # Read back, so that whoever listens live sees exactly what a reader of the file sees; before it is written, so
            # that no line is which readers would take for damage.
            record = Record.from_json(_loaded(line))
            self._write(line)
            self.snapshot.apply(record)
            self._undelivered.append(record)
            if isinstance(event, (CheckpointWritten, RunEnded)):
                self._sync()
        self._deliver()
        return record

    def subscribe(self, listener: Callable[[Record], None]) -> None:
        """Call `listener` with every record from now on, in the order of `seq`, one at a time, on an emitting thread.

        It must return quickly and may emit. One that raises an Exception is dropped, which the record notes: a broken
        terminal or screen does not end a run.
        """
        with self._lock:
            self._subscribers.append(listener)

    def close(self) -> None:
        """Sync the file to the disk and close it."""
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                with contextlib.suppress(OSError):  # what matters was synced when it was written
                    os.fsync(descriptor)
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    self.path.with_name(RESERVE_FILE).unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest):]
        except BaseException as error:
            # What got through of this line alone: the file may have grown by what others did to it.
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - (len(line) - len(rest)))
            if isinstance(error, OSError):
                raise self._unwritable(error) from None
            raise

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> RunError:
        do = "mend that" if error.errno not in FULL else f"free at least {ROOM_BYTES >> 20} MiB of that disk"
        return RunError(f"The record {self.path} cannot be written ({error.strerror}); {do} and resume the run.")

    def _reserve(self) -> None:
        descriptor = os.open(self.path.with_name(RESERVE_FILE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
        finally:
            os.close(descriptor)

    def _deliver(self) -> None:
        # Whichever thread finds nobody delivering does so for all, and goes on until nothing is left: records reach the
        # subscribers in order, and neither a slow subscriber nor one that emits holds up the file.
        while True:
            with self._lock:
                if self._delivering or not self._undelivered:
                    return
                self._delivering = True
                record = self._undelivered.popleft()
                listeners = tuple(self._subscribers)
            try:
                for listener in listeners:
                    try:
                        listener(record)
                    except Exception as error:
                        with self._lock:
                            self._subscribers.remove(listener)
                        self.emit(LogLine("warning", f"A listener of this record failed and was dropped: {error!r}."))
            finally:
                with self._lock:
                    self._delivering = False


def replay(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file, in order; none when there is no such file yet. A torn last line is left out, and a warning
    stands for a line that is not a record. Raises RunError when the file cannot be read."""
    reading = _Reading(path)
    try:
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield reading.record(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"The record {path} cannot be read ({error.strerror}).") from None


def last_of_kind(path: str | os.PathLike[str], kind: str) -> Record | None:
    """The latest whole record of `kind` in a file that `RunRecorder` wrote, None where there is none: lines of other kinds
    are not parsed. Raises RunError when the file cannot be read."""
    start = b'{"kind":"' + kind.encode("ascii") + b'"'
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = len(content)
                while (begin := content.rfind(start, 0, end)) >= 0:
                    stop = content.find(b"\n", begin)
                    # Within a line, the same bytes are text that somebody wrote.
                    if stop > 0 and (begin == 0 or content[begin - 1:begin] == b"\n"):
                        with contextlib.suppress(ValueError):
                            return parse_line(content[begin:stop])
                    end = begin
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"The record {path} cannot be read ({error.strerror}).") from None
    return None


class Follower:
    """Reads what has been added to a record since the last call, while another process or thread writes it."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._offset = 0
        self._reading = _Reading(path)
        self._unseen: list[Record] = []
        """Read, and not handed out yet: what is read before a failure is neither lost nor read again."""

    def read_new(self) -> list[Record]:
        """What `replay` gives for the lines completed since the last call; empty when there are none, or no file yet.
        Raises RunError when the file cannot be read; where that happens midway, what was read first is handed out, and the
        next call raises."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._unseen.append(self._reading.record(line))
                    self._offset += len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._unseen:
                raise RunError(f"The record {self.path} cannot be read ({error.strerror}).") from None
        records, self._unseen = self._unseen, []
        return records


class _Reading:
    """Lines of one file, from the first on, as records. A line that a failing disk or an editor damaged costs what it
    said and not the run: a warning takes its place, with the time before it (0.0 where there is none)."""

    def __init__(self, path: str | os.PathLike[str]):
        self._lines = 0
        self._before = Record(Path(path).absolute().parent.name, 0, 0.0, LogLine())

    def record(self, line: bytes) -> Record:
        try:
            self._before = parse_line(line)
        except ValueError:
            text = f"Line {self._lines + 1} of {EVENTS_FILE} is damaged: what it recorded is not shown."
            before = self._before
            self._before = Record(before.run_id, before.seq + 1, before.time, LineDamaged("warning", text))
        self._lines += 1
        return self._before


def line_kind(line: bytes) -> str:
    """The kind of a line that `RunRecorder` wrote, read without parsing the line: it is the first value."""
    return line[:80].split(b'"', 4)[3].decode("ascii", "replace") if line.count(b'"', 0, 80) >= 4 else ""


def parse_line(line: bytes) -> Record:
    """Raises ValueError when the line is not a record."""
    try:
        return Record.from_json(_loaded(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None


def _loaded(line: bytes) -> Any:
    values = json.loads(line)
    if b"\\u" in line:  # half of a surrogate pair, as a file's name may have it, is nothing that a page can be sent
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return values


def _encode(record: Record) -> bytes:
    values = record.to_json()
    try:
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except ValueError:
        for name, number in _numbers(values, values["kind"]):
            if not math.isfinite(number):
                raise ValueError(f"{name} is {number}: a number that is not finite must end the run by name before it "
                                 "is recorded.") from None
        raise


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}")
            yield from _numbers(key, f"{name}: a key")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}[{index}]")


def _repair_end(path: Path, descriptor: int) -> None:
    """Make the file end with a whole line. Everything before the torn line stays as it is."""
    size = start = os.fstat(descriptor).st_size
    pieces: list[bytes] = []
    while start > 0 and not (pieces and b"\n" in pieces[-1]):
        begin = max(0, start - _SCAN_BYTES)
        pieces.append(os.pread(descriptor, start - begin, begin))
        start = begin
    torn = b"".join(reversed(pieces)).rpartition(b"\n")[2]
    if not torn:
        return
    try:
        parse_line(torn)
    except ValueError:
        with open(path.with_name(TORN_FILE), "ab") as aside:
            aside.write(torn + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
        os.ftruncate(descriptor, size - len(torn))
    else:
        os.write(descriptor, b"\n")
    os.fsync(descriptor)

"""`RunRecorder`, the one writer of a run's ``events.jsonl``. Its readers are in
`engine.runs.following`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import RunError
from engine.files import FULL, write_whole
from engine.runs.events import CheckpointWritten, Event, LogLine, Record, RunEnded, StateChanged
from engine.runs.following import EVENTS_FILE, replay
from engine.runs.lines import parse_line
from engine.runs.reserve import LOOK_SECONDS, RECORD_BYTES, Reserve, has_disk_space, wait_in_words
from engine.runs.snapshot import RunSnapshot

TORN_FILE = "events.torn"
"""What a killed process left of its last line is moved here, so that every line of the record is
whole.
"""
SESSION_FILE = "session.json"
"""Of a resumed run: the Unix `time` at which the latest session began, and `earlier_seconds`, the
length of those before it. Lists of runs read it instead of the whole record.
"""
_SCAN_BYTES = 1 << 16


class RunRecorder:
    """Appends events to ``<folder>/events.jsonl`` and keeps the snapshot that they add up to.

    Opening an existing record goes on where it ended: `seq` counts on, a torn last line is moved to
    ``events.torn``. At most one recorder may be open for a folder; the run's lock sees to that.
    Raises RunError when the file cannot be read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], run_id: str):
        self.run_id = run_id
        self.path = Path(folder) / EVENTS_FILE
        self.snapshot = RunSnapshot()
        self._endings: Callable[[], int] | None = None
        self._after_wait: Callable[[], None] | None = None
        self.gave_up = False
        """Whether such a wait was ended by a request."""
        self._lack: _Lack | None = None
        self._reserve = Reserve(self.path.parent)
        self._lock = threading.Lock()
        self._subscribers: list[Callable[[Record], None]] = []
        self._undelivered: deque[Record] = deque()
        self._delivering = False
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise RunError(
                f"The record {self.path} cannot be opened ({error.strerror}); check the folder."
            ) from None
        try:
            _repair_end(self.path, self._descriptor)
            self._reserve.hold()
            for record in replay(self.path):
                self.snapshot.apply(record)
            if self.snapshot.last_seq:
                session = {"time": time.time(), "earlier_seconds": self.snapshot.seconds}
                write_whole(self.path.with_name(SESSION_FILE), json.dumps(session), durable=False)
        except OSError as error:
            self.close()
            raise RunError(
                f"The record {self.path} cannot be written ({error.strerror}); check the disk."
            ) from None
        except BaseException:
            self.close()
            raise

    def wait_for_disk_space(self, endings: Callable[[], int] | None) -> None:
        """From now on, where the disk has no space for a line, wait for some, until one more
        request to end the run comes: `endings` says how many there were so far. For None, do not
        wait but raise, as at first.
        """
        self._endings = endings

    def call_after_wait(self, listener: Callable[[], None] | None) -> None:
        """After a wait for space, each thread that waited calls `listener`; none for None, as at
        first.
        """
        self._after_wait = listener

    def emit(self, event: Event) -> Record:
        """Write one event as one line, apply it to the snapshot, then call the subscribers. Any
        thread may call.

        A NaN or infinite number raises ValueError, a value without a JSON form or of another type
        than its field's TypeError: both are faults of the program, since a run must end by name
        before it records such a number. A disk that cannot take the line raises RunError; the file
        then still ends with the line before. After `wait_for_disk_space`, where space is what the
        disk lacks, this returns once there is some: the record tells that the run is paused
        meanwhile.
        """
        looks, asked = 0, 0
        while True:
            with self._lock:
                if self._descriptor is None:
                    raise RuntimeError(f"{event.kind} was emitted after the recorder was closed.")
                try:
                    record = self._take(event)
                    break
                except OSError as error:
                    if not self._waits(error, event, looks, asked):
                        raise self._unwritable(error) from None
            self._deliver()
            time.sleep(LOOK_SECONDS)
            # What was asked for by now was meant for a run that trains: it stays for the one that
            # goes on.
            asked = self._asked() if not looks else asked
            looks += 1
        after_wait = self._after_wait  # which another thread may set to None
        if looks and after_wait is not None:
            after_wait()
        self._deliver()
        return record

    def _take(self, event: Event) -> Record:
        """Write `event`, after a wait with what ends it before. Raises OSError where there is no
        space.
        """
        lack, before = self._lack, []
        if isinstance(event, RunEnded):
            self._reserve.give_all()
        elif lack is not None:
            if not has_disk_space(self.path.parent):
                raise lack.error
            self._reserve.hold()
            waited = (
                "There is room on the disk again: the run waited "
                f"{time.monotonic() - lack.since:,.0f} s for it."
            )
            before = [*([lack.state] if lack.is_told else []), LogLine("info", waited)]
        record = self._append(*before, event)
        self._lack = None
        if isinstance(event, (CheckpointWritten, RunEnded)):
            self._sync()
        return record

    def _append(self, *events: Event) -> Record:
        """Write these lines or none; the record of the last."""
        lines = [
            _encode(Record(self.run_id, self.snapshot.last_seq + place, time.time(), event))
            for place, event in enumerate(events, 1)
        ]
        # Read back, so that whoever listens live sees exactly what a reader of the file sees;
        # before they are written, so that no line is which readers would take for damage.
        records = [_read_back(line, event) for line, event in zip(lines, events)]
        self._write(b"".join(lines))
        for record in records:
            self.snapshot.apply(record)
        self._undelivered.extend(records)
        return records[-1]

    def _waits(self, error: OSError, event: Event, looks: int, asked: int) -> bool:
        """Whether the thread that could not write `event` is to wait for space, which is told once;
        `asked` counts the requests to end the run as of the first of its `looks`.
        """
        if error.errno not in FULL or isinstance(event, RunEnded) or self._endings is None:
            return False
        self.gave_up = self.gave_up or (looks > 0 and self._asked() > asked)
        if self.gave_up:
            return False
        if self._lack is None:
            s = self.snapshot
            self._lack = _Lack(error, StateChanged(s.state, s.reason, s.lacks_space_for or "found"))
        if not self._lack.is_told:
            self._reserve.give_half()
            with contextlib.suppress(
                OSError
            ):  # somebody else was faster: it is tried again at each look
                self._append(
                    StateChanged("paused", wait_in_words(error, self.path.parent), "record")
                )
                self._lack.tell()
        return True

    def _asked(self) -> int:
        endings = self._endings  # which another thread may set to None
        return endings() if endings is not None else 0

    def subscribe(self, listener: Callable[[Record], None]) -> None:
        """Call `listener` with every record from now on, in the order of `seq`, one at a time, on
        an emitting thread.

        It must return quickly and may emit. One that raises an Exception is dropped, which the
        record notes: a broken terminal or screen does not end a run.
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
                self._reserve.give_all()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException:
            # What got through of this line alone: the file may have grown by what others did to it.
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - (len(line) - len(rest)))
            raise

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> RunError:
        do = (
            "mend that"
            if error.errno not in FULL
            else f"free at least {RECORD_BYTES >> 20} MiB of that disk"
        )
        return RunError(
            f"The record {self.path} cannot be written ({error.strerror}); {do} and resume the run."
        )

    def _deliver(self) -> None:
        # Whichever thread finds nobody delivering does so for all, and goes on until nothing is
        # left: records reach the subscribers in order, and neither a slow subscriber nor one that
        # emits holds up the file.
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
                        self.emit(
                            LogLine(
                                "warning",
                                f"A listener of this record failed and was dropped: {error!r}.",
                            )
                        )
            finally:
                with self._lock:
                    self._delivering = False


@dataclass
class _Lack:
    """Of space for the record: the error that told it, the state to go back to, whether the record
    says so yet.
    """

    error: OSError
    state: StateChanged
    is_told: bool = False
    since: float = field(default_factory=time.monotonic)

    def tell(self) -> None:
        self.is_told = True


def _encode(record: Record) -> bytes:
    values = record.to_json()
    try:
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except ValueError:
        for name, number in _numbers(values, values["kind"]):
            if not math.isfinite(number):
                raise ValueError(
                    f"{name} is {number}: a number that is not finite must end the run by name "
                    "before it is recorded."
                ) from None
        raise


def _read_back(line: bytes, event: Event) -> Record:
    try:
        return parse_line(line)
    except ValueError as error:
        raise TypeError(f"{event.kind} is {error}") from None


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

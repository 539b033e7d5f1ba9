"""The only writer of a run's ``events.jsonl``. Its readers are in `engine.runs.record.following`.

- One event becomes one line. The line is encoded, decoded as a reader would decode it, and only
  then written, so no line is written that a reader would treat as damaged.
- After that, the event is applied to the snapshot and passed to the subscribers. They get the
  decoded record, which is exactly what a reader of the file gets.
- The file is opened for appending. A line is written completely or not at all: if only a part of it
  could be written, the file is truncated to its earlier end.
- The file is synced to the disk (fsync) after the lines that a resume relies on: a checkpoint was
  written, or the run is over. The other lines reach the disk when the system writes them. A power
  failure may lose the latest of these; the death of the process loses none.
- A torn last line means that the process was killed, or the power failed, during a write. The next
  recorder moves the torn part to ``events.torn`` before it appends, so that every line of the
  record is complete. If the last line lacks only its line break, the line is kept and the break is
  added. Readers ignore a last line without a line break.
- Before each line, the recorder checks whether the file is still where it was. A run whose folder
  was deleted or renamed ends by that.
- On a full disk, a run that called `wait_for_disk_space` waits for space, which is recorded:
  `Reserve` holds the space for that line and for the run's last line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine import safe_files
from engine.errors import RunError
from engine.files import FULL
from engine.runs.record.events import (
    CheckpointWritten,
    Event,
    LogLine,
    Record,
    RunEnded,
    StateChanged,
)
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.record.lines import LONGEST_LINE, encode_line, parse_line
from engine.runs.record.reserve import (
    POLL_SECONDS,
    RECORD_BYTES,
    Reserve,
    has_disk_space,
    wait_text,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.safe_files import FileFault

# ---------------------------------------------------------------------- lost folder

# A run ends where its folder vanishes: nothing that it writes could be found again.
#
# A person may delete or rename the folder, or unmount its disk. The files that are open can still
# be written then, so that no write fails.


def is_lost(path: Path, descriptor: int) -> bool:
    """Returns whether the open file `descriptor` is no longer the one at `path`.

    This takes a few microseconds. Of a disk that does not answer, it is unknown, which counts as
    False.
    """
    try:
        return not os.path.samestat(path.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        return error.errno == errno.ESTALE


def lost_text(folder: Path) -> str:
    """Returns one sentence for a run whose folder vanished while it was running."""
    return (
        f"The run's folder {folder} is gone: it was deleted or renamed, or its disk was unmounted; "
        "put it back and resume the run, or start a new one."
    )


# ---------------------------------------------------------------------- recorder


TORN_FILE = "events.torn"
"""File to which a torn last line is moved."""
SESSION_FILE = "session.json"
"""File of a resumed run. It holds the Unix `time` at which the latest session began, the `elapsed`
of that moment, and `earlier_seconds`, the total length of the earlier sessions. Lists of runs read
it instead of the whole record.
"""
_SCAN_BYTES = 1 << 16


class RunRecorder:
    """Appends events to ``<folder>/events.jsonl`` and keeps the snapshot built from them.

    An existing record is continued where it ended, and so is the count `seq`. At most one recorder
    may be open for a folder, which the run's lock ensures. Raises RunError when the file cannot be
    read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], run_id: str):
        self.run_id = run_id
        self.path = Path(folder) / EVENTS_FILE
        self.snapshot = RunSnapshot()
        self._endings: Callable[[], int] | None = None
        self._after_wait: Callable[[], None] | None = None
        self.gave_up = False
        """True once a request has ended a wait for disk space."""
        self._opened: float | None = None
        self._elapsed_before = 0.0
        self._lack: _Lack | None = None
        self._reserve = Reserve(self.path.parent)
        self._lock = threading.Lock()
        self._subscribers: list[Callable[[Record], None]] = []
        self._undelivered: deque[Record] = deque()
        self._delivering = False
        self._descriptor: int | None = None
        try:
            self._descriptor = safe_files.open_to_append(self.path, self.path.parent.parent)
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
                self._elapsed_before = self._count_on()
                session = {
                    "time": time.time(),
                    "elapsed": self._elapsed_before,
                    "earlier_seconds": self.snapshot.seconds,
                }
                file, runs = self.path.with_name(SESSION_FILE), self.path.parent.parent
                safe_files.write_whole(file, json.dumps(session), runs, durable=False)
        except OSError as error:
            self.close()
            raise RunError(
                f"The record {self.path} cannot be written ({error.strerror}); check the disk."
            ) from None
        except BaseException:
            self.close()
            raise

    def wait_for_disk_space(self, endings: Callable[[], int] | None) -> None:
        """Makes `emit` wait from now on when the disk has no space for a line.

        The wait also ends when another request to end the run arrives: `endings` returns how many
        have arrived so far. With None, `emit` raises instead of waiting, which is the default.
        """
        self._endings = endings

    def call_after_wait(self, listener: Callable[[], None] | None) -> None:
        """Makes each thread that waited for space call `listener` afterwards; None removes the
        listener.
        """
        self._after_wait = listener

    def emit(self, event: Event) -> Record:
        """Writes one event as one line, applies it to the snapshot, then calls the subscribers.

        Any thread may call this. Raises ValueError for a number that is NaN or infinite, and
        TypeError for a value that JSON cannot represent or that does not have its field's type.
        Both are faults in the program: a run must end with an error that names the cause before it
        records such a number.

        Raises RunError if the line cannot be written; the file then still ends with the line
        before. After `wait_for_disk_space`, if the disk lacks space, this method instead waits
        until there is some, and records that the run is paused.
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
            time.sleep(POLL_SECONDS)
            # Requests to end the run that came before this first check were meant for a training
            # run. They are kept until training continues and do not end the wait.
            if looks == 0:
                asked = self._asked()
            looks += 1
        after_wait = self._after_wait  # read once, since another thread may set it to None
        if looks and after_wait is not None:
            after_wait()
        self._deliver()
        return record

    @property
    def is_lost(self) -> bool:
        """Whether the record is no longer in the folder of the run."""
        descriptor = self._descriptor  # read once, since another thread may close it
        return descriptor is not None and is_lost(self.path, descriptor)

    def check(self) -> None:
        """Raises RunError if the record is no longer in the folder of the run."""
        if self.is_lost:
            raise RunError(lost_text(self.path.parent))

    def _take(self, event: Event) -> Record:
        """Writes `event`; after a wait for space, the lines that end the wait come before it.

        Raises OSError if there is no space.
        """
        # In a folder that was moved, the last line has why the run ended.
        if not (isinstance(event, RunEnded) and event.state == "failed"):
            self.check()
        lack = self._lack
        before: list[Event] = []
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
            if lack.is_notified:
                before.append(lack.state)
            before.append(LogLine("info", waited))
        record = self._append(*before, event)
        self._lack = None
        # A resume relies on these lines, so they must survive a power failure.
        if isinstance(event, (CheckpointWritten, RunEnded)):
            self._sync()
        return record

    def _append(self, *events: Event) -> Record:
        """Writes all of these events as lines, or none; returns the record of the last one."""
        now, elapsed, seq = time.time(), self._elapsed(), self.snapshot.last_seq
        events = tuple(self._with_pauses(event, elapsed) for event in events)
        lines = [
            encode_line(Record(self.run_id, seq + place, now, event, elapsed))
            for place, event in enumerate(events, 1)
        ]
        # The lines are decoded again, so that a live listener gets exactly what a reader of the
        # file gets. This happens before they are written, so that no damaged line is written.
        records = [_read_back(line, event) for line, event in zip(lines, events)]
        self._write(b"".join(lines))
        for record in records:
            self.snapshot.apply(record)
        self._undelivered.extend(records)
        return records[-1]

    def _with_pauses(self, event: Event, elapsed: float) -> Event:
        """Returns a change of the state with how long the session has paused, for lists of runs,
        which do not read whole records.
        """
        begins = isinstance(event, StateChanged) and event.state == "preparing"
        if begins or not isinstance(event, (StateChanged, RunEnded)):
            return event
        paused = self.snapshot.session_paused((self.snapshot.started_time or 0.0) + elapsed)
        return msgspec.structs.replace(event, paused_seconds=round(paused, 3)) if paused else event

    def _count_on(self) -> float:
        """Returns the `elapsed` with which a session of an existing record begins. Only the wall
        clock knows how long the run has rested.
        """
        before, now = self.snapshot, time.time()
        if before.last_time is None:
            return 0.0
        rested = now - before.clock_set_by - before.last_time
        return round(before.elapsed + max(0.0, rested), 6)

    def _elapsed(self) -> float:
        """Returns for how many seconds the run has lasted; the first record begins at 0."""
        now = time.monotonic()
        if self._opened is None:
            self._opened = now
        return round(self._elapsed_before + now - self._opened, 6)

    def _waits(self, error: OSError, event: Event, looks: int, asked: int) -> bool:
        """Returns whether the thread that could not write `event` must wait for space.

        The wait is recorded once. `looks` is the number of times that the thread has checked for
        space, and `asked` the number of requests to end the run at its first check.
        """
        can_wait = error.errno in FULL and not isinstance(event, RunEnded)
        if not can_wait or self._endings is None:
            return False
        if looks > 0 and self._asked() > asked:
            self.gave_up = True
        if self.gave_up:
            return False
        if self._lack is None:
            now = self.snapshot
            back_to = StateChanged(now.state, now.reason, now.lacks_space_for or "found")
            self._lack = _Lack(error, back_to)
        if not self._lack.is_notified:
            self._reserve.give_half()
            # Another program may have taken the space that was just freed, so each check tries
            # again.
            with contextlib.suppress(OSError):
                self._append(StateChanged("paused", wait_text(error, self.path.parent), "record"))
                self._lack.mark_notified()
        return True

    def _asked(self) -> int:
        endings = self._endings  # read once, since another thread may set it to None
        return endings() if endings is not None else 0

    def subscribe(self, listener: Callable[[Record], None]) -> None:
        """Calls `listener` with every record from now on, one at a time and in the order of `seq`.

        The calls come from emitting threads. A listener must return quickly, and it may emit. A
        listener that raises an Exception is removed, which is recorded, since a broken terminal or
        screen must not end a run.
        """
        with self._lock:
            self._subscribers.append(listener)

    def close(self) -> None:
        """Syncs the file to the disk and closes it."""
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                # The lines that a resume needs were synced when they were written.
                with contextlib.suppress(OSError):
                    os.fsync(descriptor)
                os.close(descriptor)
                self._reserve.give_all()

    def _write(self, line: bytes) -> None:
        """Writes complete lines or nothing."""
        assert self._descriptor is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException:
            # Only the bytes that were written here are removed. The size is read now, since other
            # processes may have appended to the file as well.
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - (len(line) - len(rest)))
            raise

    def _sync(self) -> None:
        assert self._descriptor is not None
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> RunError:
        do = "mend that"
        if error.errno in FULL:
            do = f"free at least {RECORD_BYTES >> 20} MiB of that disk"
        return RunError(
            f"The record {self.path} cannot be written ({error.strerror}); {do} and resume the run."
        )

    def _deliver(self) -> None:
        """Delivers all records that the subscribers have not received yet.

        The first thread to arrive delivers for all threads until nothing is left, and the others
        return at once. So records reach the subscribers in order, and the file's lock is free while
        a subscriber is called, even one that is slow or that emits.
        """
        while True:
            with self._lock:
                if self._delivering or not self._undelivered:
                    return
                self._delivering = True
                record = self._undelivered.popleft()
                listeners = tuple(self._subscribers)
            try:
                for listener in listeners:
                    self._call(listener, record)
            finally:
                with self._lock:
                    self._delivering = False

    def _call(self, listener: Callable[[Record], None], record: Record) -> None:
        try:
            listener(record)
        except Exception as error:  # noqa: BLE001  no fault of a listener ends a run
            with self._lock:
                self._subscribers.remove(listener)
            warning = f"A listener of this record failed and was dropped: {error!r}."
            self.emit(LogLine("warning", warning))


@dataclass
class _Lack:
    """A wait that began when the disk had no space for the record (`error`).

    `state` is the state to restore. is_notified: the wait is recorded. `since` is a time of
    `time.monotonic`.
    """

    error: OSError
    state: StateChanged
    is_notified: bool = False
    since: float = field(default_factory=time.monotonic)

    def mark_notified(self) -> None:
        self.is_notified = True


def _read_back(line: bytes, event: Event) -> Record:
    try:
        return parse_line(line)
    except ValueError as error:
        raise TypeError(f"{event.kind} is {error}") from None


def _repair_end(path: Path, descriptor: int) -> None:
    """Makes the file end with a complete line. Everything before a torn line is left unchanged.
    Raises FileFault where no run can have written that line.
    """
    size = start = os.fstat(descriptor).st_size
    chunks: list[bytes] = []
    while start > 0 and not (chunks and b"\n" in chunks[-1]):
        begin = max(0, start - _SCAN_BYTES)
        chunks.append(os.pread(descriptor, start - begin, begin))
        start = begin
        if size - start > LONGEST_LINE:
            raise FileFault(path, f"ends with a line of more than {LONGEST_LINE >> 20} MiB")
    torn = b"".join(reversed(chunks)).rpartition(b"\n")[2]
    if not torn:
        return
    try:
        parse_line(torn)  # only the line break may be missing
    except ValueError:
        beside = safe_files.open_to_append(path.with_name(TORN_FILE), path.parent.parent)
        with os.fdopen(beside, "ab") as aside:
            aside.write(torn + b"\n")
            # The copy must be on the disk before the original is truncated.
            aside.flush()
            os.fsync(aside.fileno())
        os.ftruncate(descriptor, size - len(torn))
    else:
        os.write(descriptor, b"\n")
    os.fsync(descriptor)

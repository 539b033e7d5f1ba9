"""The list of runs reads only the two ends of each record, however long the record is."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.files import file_size
from engine.runs.events import Event, Record, RunEnded, RunStarted, StateChanged, StepFinished
from engine.runs.folder import CONFIG_FILE, RUN_ID, RunFolder, shown_state
from engine.runs.following import replay
from engine.runs.lines import line_kind, parse_line
from engine.runs.recorder import SESSION_FILE
from engine.runs.snapshot import RunSnapshot
from engine.runs.steady_time import LONGEST_SILENCE
from engine.summaries.about import read_about

_TAIL_BYTES = 1 << 16
_LONGEST = 1 << 21
"""A line longer than this many bytes counts as damaged; the lines that a summary reads are far
shorter.
"""
_END_LIMIT = 1 << 22
"""A summary reads at most this many bytes from either end of a record, and nearly always far fewer.
"""


@dataclass(frozen=True)
class RunSummary:
    """A `RunSummary` is one line in the list of runs.

    `name`, `note` and `tags` were given by a person; without such a name, `name` is that of the
    configuration. `created` is in Unix seconds. `seconds` is the run's working time. A run that
    cannot be read has the state `unreadable`, and `reason` says why.
    """

    id: str
    name: str
    state: str
    step: int
    total_steps: int
    loss: float | None
    created: float
    seconds: float
    model: str
    data: str
    path: str
    reason: str
    note: str = ""
    tags: tuple[str, ...] = ()


def list_runs(runs_dir: str | os.PathLike[str]) -> list[RunSummary]:
    """Returns the summaries of all runs, newest first, or an empty list if the folder does not
    exist.

    Raises RunError when the folder cannot be read.
    """
    try:
        folders = [
            RunFolder(path)
            for path in Path(runs_dir).iterdir()
            if RUN_ID.fullmatch(path.name) and path.is_dir()
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"The runs folder {runs_dir} cannot be read ({error.strerror}).") from None
    runs = filter(None, map(summarise, folders))
    return sorted(runs, key=lambda run: (run.created, run.id), reverse=True)


def summarise(folder: RunFolder) -> RunSummary | None:
    """Returns the summary of a run, or None if its folder is deleted during the call."""
    try:
        return _summary(folder)
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror})."
    except RamstreamError as error:
        reason = str(error)
    try:
        created = folder.path.stat().st_mtime
    except FileNotFoundError:
        return None
    about = read_about(folder.path)
    return RunSummary(
        id=folder.id,
        name=about.name or folder.id,
        state="unreadable",
        step=0,
        total_steps=0,
        loss=None,
        created=created,
        seconds=0.0,
        model="",
        data="",
        path=str(folder.path),
        reason=reason,
        note=about.note,
        tags=about.tags,
    )


def _summary(folder: RunFolder) -> RunSummary:
    """Returns the summary of a run. Raises OSError or RamstreamError if it cannot be read."""
    running = folder.is_running()
    stat = (folder.path / CONFIG_FILE).stat()
    name, model, data, steps = _configured(folder.path / CONFIG_FILE, stat.st_mtime_ns)
    ends = _RecordEnds()
    created, total_steps = stat.st_mtime, 0
    first: Record | None = None
    if file_size(folder.events_path):
        with folder.events_path.open("rb") as file:
            for line in _lines_backwards(file):
                if ends.add(line):
                    break
            first, started = _head(file)
        if first is not None:
            created = first.time
        total_steps = (ends.started or started).total_steps
        if total_steps and steps is not None:
            # A change made during the run is in the configuration, not in `RunStarted`.
            total_steps = steps
    session = _session(folder, first)
    seconds = _seconds(folder, session, ends.last)
    # If no state is found near the end, the lines there belong to steps.
    state = ends.state or ("running" if ends.step else "preparing")
    about = read_about(folder.path)
    return RunSummary(
        id=folder.id,
        name=about.name or name,
        state=shown_state(state, running),
        step=ends.step or 0,
        total_steps=total_steps,
        loss=ends.loss,
        created=created,
        seconds=seconds,
        model=model,
        data=data,
        path=str(folder.path),
        reason=ends.reason,
        note=about.note,
        tags=about.tags,
    )


@dataclass(frozen=True)
class _Session:
    """A `_Session` says when the latest session of a run began: the wall clock's `time`, and the
    `elapsed` of the record, which is None in older files.
    """

    time: float
    elapsed: float | None
    earlier_seconds: float = 0.0
    """The earlier sessions took this many seconds."""


def _session(folder: RunFolder, first: Record | None) -> _Session | None:
    """Returns the latest session of a run, or None for a run without a record.

    Only a resumed run has a file about it; other runs have one session, which began with the
    `first` record.
    """
    try:
        session = json.loads((folder.path / SESSION_FILE).read_text(encoding="utf-8"))
        elapsed = session.get("elapsed")
        return _Session(
            float(session["time"]),
            None if elapsed is None else float(elapsed),
            float(session["earlier_seconds"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None if first is None else _Session(first.time, first.elapsed)


def _seconds(folder: RunFolder, session: _Session | None, last: Record | None) -> float:
    """Returns a run's working time up to its `last` record, in seconds."""
    if session is None:
        return 0.0
    if last is None:
        return session.earlier_seconds
    if session.elapsed is not None and last.elapsed is not None:
        return session.earlier_seconds + max(0.0, last.elapsed - session.elapsed)
    # A record of an earlier version has wall times alone. Where these cannot be, somebody may have
    # set the clock, and only the whole record tells how long the run took.
    seconds = last.time - session.time
    if not 0 <= seconds <= LONGEST_SILENCE:
        return _folded_seconds(folder.events_path, file_size(folder.events_path))
    return session.earlier_seconds + seconds


@functools.lru_cache(maxsize=256)
def _folded_seconds(path: Path, _size: int) -> float:
    """Returns the working time that a whole record tells. Its size is part of the cache key."""
    snapshot = RunSnapshot()
    for record in replay(path):
        snapshot.apply(record)
    return snapshot.seconds


@functools.lru_cache(maxsize=4096)
def _configured(path: Path, _mtime_ns: int) -> tuple[str, str, str, int | None]:
    """Returns the name, model, data and number of steps in a configuration.

    The file's modification time is part of the cache key, so that a changed file is read again.
    """
    config = TrainConfig.load(path)
    return config.name, config.model.source, config.data.title, config.train.steps


def _head(file: BinaryIO) -> tuple[Record | None, RunStarted]:
    """Returns the first complete record, or None, and the first `RunStarted`, or an empty one if
    there is none near the start.
    """
    file.seek(0)
    first: Record | None = None
    while file.tell() < _END_LIMIT and (line := file.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError):
            first = first or parse_line(line)
            if line_kind(line) == RunStarted.kind:
                event = parse_line(line).event
                if isinstance(event, RunStarted):
                    return first, event
    return first, RunStarted()


class _RecordEnds:
    """A `_RecordEnds` collects what a summary needs from the end of a record, read backwards."""

    def __init__(self) -> None:
        self.state: str | None = None
        self.reason = ""
        self.started: RunStarted | None = None
        self.step: int | None = None
        self.loss: float | None = None
        self.last: Record | None = None
        self._ceiling: int | None = None

    def add(self, line: bytes) -> bool:
        """Adds the line that precedes those added so far; returns True once no earlier line
        matters.
        """
        wanted = line_kind(line) in _TELLING
        if self.last is None or wanted:
            with contextlib.suppress(ValueError):
                record = parse_line(line)
                self.last = self.last or record
                self._apply(record.event)
        if self.state is None or self.step is None:
            return False
        return self.loss is not None or self.step == 0

    def _apply(self, event: Event) -> None:
        # The lines come in reverse order, so the first value found is the latest.
        if isinstance(event, (StateChanged, RunEnded)):
            if self.state is None:
                self.state = event.state
                self.reason = event.reason
        elif isinstance(event, RunStarted):
            self.state = self.state or "preparing"
            self.started = self.started or event
            resumed = event.resumed_step or 0
            # A resume from an older step discards the later steps, whose lines precede this one.
            self._ceiling = resumed if self._ceiling is None else min(self._ceiling, resumed)
            if self.step is None:
                self.step = resumed
        elif isinstance(event, StepFinished) and self.loss is None:
            is_valid = self._ceiling is None or event.step <= self._ceiling
            if is_valid:
                self.loss = event.loss
                if self.step is None:
                    self.step = event.step


_TELLING = (StateChanged.kind, RunEnded.kind, RunStarted.kind, StepFinished.kind)
"""A summary parses lines of these kinds only."""


def _lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yields complete lines in reverse order, up to `_END_LIMIT` bytes from the end.

    A line of `_LONGEST` bytes or more is damaged; it is skipped, and its bytes do not count.
    """
    position = file.seek(0, os.SEEK_END)
    left = _END_LIMIT
    # `rest` is the end of a line whose beginning has not been read yet. After the last line break
    # comes nothing or an unfinished line, which is skipped.
    rest = b""
    passed_over = True
    while position > 0 and left > 0:
        begin = max(0, position - _TAIL_BYTES)
        file.seek(begin)
        *pieces, last = file.read(position - begin).split(b"\n")
        position = begin
        if not passed_over:
            rest = last + rest
            left -= len(last)
        if not pieces:  # no line begins in this block
            if len(rest) >= _LONGEST:
                left += len(rest)
                rest = b""
                passed_over = True
            continue
        if not passed_over:
            yield rest
        left -= sum(map(len, pieces))
        rest = pieces[0]
        passed_over = False
        yield from reversed(pieces[1:])
    if position == 0 and rest and not passed_over:
        yield rest

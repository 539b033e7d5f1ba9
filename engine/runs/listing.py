"""The list of runs: what a line of it says is read from the two ends of a record, however long the
record is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.files import file_size
from engine.runs.about import read_about
from engine.runs.events import Event, Record, RunEnded, RunStarted, StateChanged, StepFinished
from engine.runs.folder import CONFIG_FILE, RUN_ID, RunFolder, shown_state
from engine.runs.lines import line_kind, parse_line
from engine.runs.recorder import SESSION_FILE

_TAIL_BYTES = 1 << 16
_LONGEST = 1 << 21
"""Bytes of a line; those that a summary reads are far shorter."""
_END_LIMIT = 1 << 22
"""Bytes of either end of a record that a summary reads at most; it nearly always stops far earlier.
"""


@dataclass(frozen=True)
class RunSummary:
    """One line of the list of runs. `name` and `note` are a person's, the configuration's name
    where there is none; `created` is Unix seconds; `seconds` the time at work; a run that cannot be
    read has the state `unreadable` and says in `reason` why.
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


def list_runs(runs_dir: str | os.PathLike[str]) -> list[RunSummary]:
    """Newest first; none when there is no such folder. Reads the two ends of each record, however
    long it is.
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
    return sorted(
        filter(None, map(summarise, folders)), key=lambda run: (run.created, run.id), reverse=True
    )


def summarise(folder: RunFolder) -> RunSummary | None:
    """None when the folder is deleted meanwhile."""
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
        folder.id,
        about.name or folder.id,
        "unreadable",
        0,
        0,
        None,
        created,
        0.0,
        "",
        "",
        str(folder.path),
        reason,
        about.note,
    )


def _summary(folder: RunFolder) -> RunSummary:
    running = folder.is_running()
    stat = (folder.path / CONFIG_FILE).stat()
    name, model, data, steps = _told(folder.path / CONFIG_FILE, stat.st_mtime_ns)
    ends = _RecordEnds()
    created, total_steps = stat.st_mtime, 0
    if file_size(folder.events_path):
        with open(folder.events_path, "rb") as file:
            for line in _lines_backwards(file):
                if ends.add(line):
                    break
            first, started = _head(file)
        created = first.time if first is not None else created
        total_steps = (ends.started or started).total_steps
        if total_steps and steps is not None:
            total_steps = steps  # as a change of the run has left it
    session_time, seconds = created, 0.0
    try:
        session = json.loads((folder.path / SESSION_FILE).read_text(encoding="utf-8"))
        session_time, seconds = float(session["time"]), float(session["earlier_seconds"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        pass
    seconds += max(0.0, (ends.last_time or created) - session_time)
    # Without a state near the end, the last thing that happened there was a step.
    state = ends.state or ("running" if ends.step else "preparing")
    about = read_about(folder.path)
    return RunSummary(
        folder.id,
        about.name or name,
        shown_state(state, running),
        ends.step or 0,
        total_steps,
        ends.loss,
        created,
        seconds,
        model,
        data,
        str(folder.path),
        ends.reason,
        about.note,
    )


@functools.lru_cache(maxsize=4096)
def _told(path: Path, mtime_ns: int) -> tuple[str, str, str, int | None]:
    """Name, model, data and steps of a configuration; `mtime_ns` makes a changed file a new
    question.
    """
    config = TrainConfig.load(path)
    return config.name, config.model.source, config.data.title, config.train.steps


def _head(file) -> tuple[Record | None, RunStarted]:
    """The first record, None while there is no whole one, and the first `RunStarted`, empty where
    none is near.
    """
    file.seek(0)
    first: Record | None = None
    while file.tell() < _END_LIMIT and (line := file.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError):
            first = first or parse_line(line)
            if line_kind(line) == RunStarted.kind:
                return first, parse_line(line).event
    return first, RunStarted()


class _RecordEnds:
    """What a summary needs from the end of a record, gathered from its last line backwards."""

    def __init__(self) -> None:
        self.state: str | None = None
        self.reason = ""
        self.started: RunStarted | None = None
        self.step: int | None = None
        self.loss: float | None = None
        self.last_time: float | None = None
        self._ceiling: int | None = None

    def add(self, line: bytes) -> bool:
        """Take the line before those taken so far; True once nothing further back matters."""
        wanted = line_kind(line) in (
            StateChanged.kind,
            RunEnded.kind,
            RunStarted.kind,
            StepFinished.kind,
        )
        if self.last_time is None or wanted:
            with contextlib.suppress(ValueError):
                record = parse_line(line)
                self.last_time = self.last_time or record.time
                self._apply(record.event)
        return (
            self.state is not None
            and self.step is not None
            and (self.loss is not None or self.step == 0)
        )

    def _apply(self, event: Event) -> None:
        if isinstance(event, (StateChanged, RunEnded)) and self.state is None:
            self.state, self.reason = event.state, event.reason
        elif isinstance(event, RunStarted):
            self.state = self.state or "preparing"
            self.started = self.started or event
            resumed = event.resumed_step or 0
            # A resume of an older step takes back the steps after it, which stand before this line.
            self._ceiling = resumed if self._ceiling is None else min(self._ceiling, resumed)
            self.step = resumed if self.step is None else self.step
        elif isinstance(event, StepFinished) and self.loss is None:
            if self._ceiling is None or event.step <= self._ceiling:
                self.loss = event.loss
                self.step = event.step if self.step is None else self.step


def _lines_backwards(file) -> Iterator[bytes]:
    """Whole lines from the last one back, as far as `_END_LIMIT` bytes from the end. One that is
    longer, which is damage, is passed over, and its bytes do not count.
    """
    position, left = file.seek(0, os.SEEK_END), _END_LIMIT
    rest, passed_over = (
        b"",
        True,
    )  # what follows the last line break is nothing, or a line that is being written
    while position > 0 and left > 0:
        begin = max(0, position - _TAIL_BYTES)
        file.seek(begin)
        *pieces, last = file.read(position - begin).split(b"\n")
        position = begin
        if not passed_over:
            rest = last + rest
            left -= len(last)
        if not pieces:
            if len(rest) >= _LONGEST:
                left, rest, passed_over = left + len(rest), b"", True
            continue
        if not passed_over:
            yield rest
        left -= sum(map(len, pieces))
        rest, passed_over = pieces[0], False
        yield from reversed(pieces[1:])
    if position == 0 and rest and not passed_over:
        yield rest

"""The list of runs reads only the two ends of each record, however long the record is."""

from __future__ import annotations

import calendar
import contextlib
import errno
import functools
import os
import re
import stat
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import yaml

from engine import safe_files
from engine.config.settings import TrainConfig
from engine.config.tree import MOST_BYTES
from engine.errors import RamstreamError, RunError, first_line
from engine.runs.record.events import (
    Event,
    ForecastChecked,
    Record,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
    state_text,
)
from engine.runs.record.following import EVENTS_FILE
from engine.runs.record.lines import line_kind, open_record, parse_line
from engine.runs.record.recorder import SESSION_FILE, TORN_FILE
from engine.runs.record.reserve import RESERVE_FILE
from engine.runs.record.run_folder import (
    CONFIG_FILE,
    CONTROL_FILE,
    LOCK_FILE,
    RUN_ID,
    OtherFormat,
    RunFolder,
    shown_state,
)
from engine.runs.summaries.about import ABOUT_FILE, read_about
from engine.runs.summaries.benchmark_results import RESULTS_FILE
from engine.runs.summaries.evaluation_results import EVALUATIONS_FILE
from engine.safe_files import FileFault

FILES = (
    CONFIG_FILE,
    CONTROL_FILE,
    LOCK_FILE,
    EVENTS_FILE,
    SESSION_FILE,
    TORN_FILE,
    RESERVE_FILE,
    ABOUT_FILE,
    RESULTS_FILE,
    EVALUATIONS_FILE,
)
"""Names of a run folder that must be regular files or folders, not links or pipes."""
UNREADABLE = "unreadable"
"""The state of a run that cannot be read; its `reason` names the file."""
_NAME_LINES = re.compile(r"^name: .{1,400}\n(?: +.{1,400}\n)*", re.MULTILINE)
"""The name in the settings of a run; a long one goes on in further lines."""
_TAIL_BYTES = 1 << 16
_LONGEST = 1 << 21
"""Bytes above which a line counts as damaged; the lines that a summary reads are far shorter."""
_END_LIMIT = 1 << 22
"""Bytes at most that a summary reads from either end of a record; nearly always far fewer."""


@dataclass(frozen=True)
class RunSummary:
    """One line in the list of runs.

    `name`, `note` and `tags` were given by a person; without such a name, `name` is that of the
    configuration. `created` is in Unix seconds. `seconds` is the run's working time, without
    pauses. A run that cannot be read has the state `unreadable`, with the cause as `reason`.
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
    device: str = ""
    """Name of the device on which it computed."""
    step_times: float | None = None
    """Time of a step as a multiple of the predicted one; None before the end, or where nothing was
    predicted.
    """
    export_failed: str = ""
    """Reason why the model of a run that has finished could not be written, nor was it since."""

    @property
    def state_text(self) -> str:
        """The state, or that of a run whose export failed."""
        return state_text(self.state, self.export_failed)


def list_runs(runs_dir: str | os.PathLike[str]) -> list[RunSummary]:
    """Returns the summaries of all runs, newest first, or an empty list if the folder does not
    exist.

    Raises RunError when the folder cannot be read.
    """
    runs = Path(runs_dir)
    try:
        ids = run_ids(runs)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"The runs folder {runs_dir} cannot be read ({error.strerror}).") from None
    found = filter(None, (summarize(RunFolder(runs / run_id)) for run_id in ids))
    return sorted(found, key=lambda run: (run.created, run.id), reverse=True)


def run_ids(runs: Path) -> list[str]:
    """Returns the names in a folder of runs that are runs, or links, which are shown as unreadable.
    Raises OSError.
    """
    return [
        name
        for name, status in safe_files.entries(runs, runs).items()
        if RUN_ID.fullmatch(name) and (stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode))
    ]


def summarize(folder: RunFolder) -> RunSummary | None:
    """Returns the summary of a run, or None if its folder is deleted during the call. It raises
    nothing: a run that cannot be read is listed as such, and hides no other one.
    """
    try:
        return _summary(folder)
    except OtherFormat as error:
        return _of_other_format(folder, str(error))
    except (RamstreamError, OSError) as error:
        return unreadable(folder, unreadable_text(folder, error))
    except Exception as error:  # noqa: BLE001  whatever is in that folder, the others are shown
        traceback.print_exc()
        return unreadable(folder, unreadable_text(folder, error))


def unreadable_text(folder: RunFolder, error: Exception) -> str:
    """Returns one sentence on why a run cannot be read."""
    if isinstance(error, RamstreamError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read ({error.strerror})."
    return f"{folder.path} cannot be shown ({type(error).__name__}: {first_line(error)})."


def _of_other_format(folder: RunFolder, reason: str) -> RunSummary | None:
    """Returns the summary of a run of another format, which has its name and date alone."""
    run = unreadable(folder, reason)
    if run is None:
        return None
    name, created = run.name, run.created
    if name == folder.id:
        name = configured_name(folder) or name
    with contextlib.suppress(OSError, ValueError):
        began = time.strptime(folder.id[:15], "%Y%m%d-%H%M%S")
        created = float(calendar.timegm(began))
    return replace(run, name=name, created=created)


def configured_name(folder: RunFolder) -> str:
    """Returns the name in the settings of a run, which may be of any format and are not checked; an
    empty text if it cannot be read.
    """
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        text = safe_files.read_text(folder.path / CONFIG_FILE, folder.root, MOST_BYTES)
        found = _NAME_LINES.search(text)
        if found is not None:
            return str(yaml.safe_load(found[0])["name"])
    return ""


def unreadable(folder: RunFolder, reason: str) -> RunSummary | None:
    """Returns the summary of a run that cannot be read, or None if its folder is gone."""
    try:
        status = safe_files.lstat(folder.path, folder.root)
    except OSError:
        return None
    if status is None:
        return None
    created = status.st_mtime
    about = read_about(folder.path)
    return RunSummary(
        id=folder.id,
        name=about.name or folder.id,
        state=UNREADABLE,
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
    folder.refuse_other_format()
    found = safe_files.entries(folder.path, folder.root)
    safe_files.refuse_other_kinds(folder.path, found, FILES)
    if CONFIG_FILE not in found:
        raise FileNotFoundError(
            errno.ENOENT, os.strerror(errno.ENOENT), str(folder.path / CONFIG_FILE)
        )
    settings = found[CONFIG_FILE]
    name, model, data, steps = _configured(
        folder.path / CONFIG_FILE, folder.root, settings.st_mtime_ns, settings.st_size
    )
    ends = _RecordEnds()
    created, total_steps, device = settings.st_mtime, 0, ""
    first: Record | None = None
    if EVENTS_FILE in found and found[EVENTS_FILE].st_size:
        with open_record(folder.events_path) as file:
            for line in _lines_backwards(file):
                if ends.add(line):
                    break
            first, started = _head(file)
        if first is not None:
            created = first.time
        started = ends.started or started
        device, total_steps = started.device_name, started.total_steps
        if total_steps and steps is not None:
            # A change made during the run is in the configuration, not in `RunStarted`.
            total_steps = steps
    session = _session(folder, first)
    seconds = max(0.0, _seconds(session, ends.last) - ends.paused_seconds)
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
        device=device,
        step_times=ends.step_times,
        export_failed="" if ends.export_failed and folder.has_export else ends.export_failed,
        note=about.note,
        tags=about.tags,
    )


class _Session(msgspec.Struct, frozen=True):
    """Begin of the latest session of a run: the wall clock's `time`, and the `elapsed` of the
    record.
    """

    time: float
    elapsed: float | None = None
    earlier_seconds: float = 0.0
    """Seconds that the earlier sessions took."""


def _session(folder: RunFolder, first: Record | None) -> _Session | None:
    """Returns the latest session of a run, or None for a run without a record.

    Only a resumed run has a file about it; other runs have one session, which began with the
    `first` record.
    """
    try:
        return safe_files.read_json(folder.path / SESSION_FILE, folder.root, _Session)
    except (FileNotFoundError, FileFault):
        return None if first is None else _Session(first.time, first.elapsed)


def _seconds(session: _Session | None, last: Record | None) -> float:
    """Returns a run's working time up to its `last` record, in seconds."""
    if session is None:
        return 0.0
    if last is None:
        return session.earlier_seconds
    if session.elapsed is not None and last.elapsed is not None:
        return session.earlier_seconds + max(0.0, last.elapsed - session.elapsed)
    return session.earlier_seconds + max(0.0, last.time - session.time)


@functools.lru_cache(maxsize=4096)
def _configured(
    path: Path, root: Path, _mtime_ns: int, _size: int
) -> tuple[str, str, str, int | None]:
    """Returns the name, model, data and number of steps in a configuration.

    The file's modification time and size are part of the cache key, so that a changed file is read
    again.
    """
    config = TrainConfig.load(path, within=root)
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
    """What a summary needs from the end of a record, read backwards."""

    def __init__(self) -> None:
        self.state: str | None = None
        self.reason = ""
        self.export_failed = ""
        self.started: RunStarted | None = None
        self.step: int | None = None
        self.loss: float | None = None
        self.step_times: float | None = None
        self.paused_seconds = 0.0
        self.last: Record | None = None
        self._ceiling: int | None = None

    def add(self, line: bytes) -> bool:
        """Adds the line that precedes those added so far; returns True once no earlier line
        matters.
        """
        wanted = line_kind(line) in _PARSED_KINDS
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
                self.paused_seconds = event.paused_seconds
                self.export_failed = getattr(event, "export_failed", "")
        elif isinstance(event, RunStarted):
            self.state = self.state or "preparing"
            self.started = self.started or event
            resumed = event.resumed_step or 0
            # A resume from an older step discards the later steps, whose lines precede this one.
            self._ceiling = resumed if self._ceiling is None else min(self._ceiling, resumed)
            if self.step is None:
                self.step = resumed
        elif isinstance(event, ForecastChecked):
            error = event.quantities.get("step_seconds", {}).get("error")
            if event.moment == "end" and self.started is None and error is not None:
                self.step_times = 1 + error
        elif isinstance(event, StepFinished) and self.loss is None:
            is_valid = self._ceiling is None or event.step <= self._ceiling
            if is_valid:
                self.loss = event.loss
                if self.step is None:
                    self.step = event.step


_PARSED_KINDS = (
    StateChanged.kind,
    RunEnded.kind,
    RunStarted.kind,
    ForecastChecked.kind,
    StepFinished.kind,
)
"""Kinds of lines that a summary parses."""


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

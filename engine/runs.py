"""Run folders: ``<runs>/<id>/`` with ``config.yaml``, ``events.jsonl``, ``checkpoints/`` and ``export/``.

A run belongs to the process that holds its lock, which the kernel releases when that process dies: a run that is not
over and whose lock nobody holds is `interrupted`. Other processes ask for things through the control file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import time
import unicodedata
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.events import Event, Record, RunEnded, RunStarted, StateChanged, StepFinished
from engine.recorder import EVENTS_FILE, SESSION_FILE, line_kind, parse_line
from engine.snapshot import OVER_STATES

CONFIG_FILE = "config.yaml"
CONTROL_FILE = "control.jsonl"
LOCK_FILE = "lock"

COMMANDS = ("stop", "discard", "pause", "resume", "save")

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOCK_TRIES, _LOCK_WAIT_SECONDS = 10, 0.02
_TAIL_BYTES = 1 << 16
_END_LIMIT = 1 << 22
"""Bytes of either end of a record that a summary reads at most; it nearly always stops far earlier."""


class RunFolder:
    """One run's folder. Usable wherever a path is."""

    def __init__(self, path: Path):
        self.path = path
        self.id = path.name
        self.events_path = path / EVENTS_FILE
        self.checkpoints_path = path / "checkpoints"
        self.export_path = path / "export"
        self.control_path = path / CONTROL_FILE
        self.control_start: int | None = None
        """While this object holds the lock: size of the control file when it took it. What stood there before was meant
        for an earlier process."""

    def __fspath__(self) -> str:
        return str(self.path)

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration as run. Raises ConfigError when the file does not load."""
        return TrainConfig.load(self.path / CONFIG_FILE)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Own the run for as long as the context lasts. Raises RunError when another process, or another part of this
        one, owns it."""
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"Run {self.id} cannot be locked ({error.strerror}); check {self.path}.") from None
        _held.add(descriptor)
        try:
            self._take(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self.control_start = _size(self.control_path)
            try:
                yield
            finally:
                self.control_start = None
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _held.discard(descriptor)
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        # is_running holds the lock for an instant to learn whether it is free: one refusal proves nothing.
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_LOCK_WAIT_SECONDS)
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        raise RunError(f"Run {self.id} is in use by process {owner or 'unknown'}; stop it there first.")

    def is_running(self) -> bool:
        """Whether any process, this one included, holds the lock."""
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


_held: set[int] = set()


def _close_held() -> None:
    # A forked child would keep the lock alive after its parent is killed.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


def shown_state(recorded: str, running: bool) -> str:
    """The state to show: `interrupted` for a run that is not over and that no process holds. Ask `is_running` before
    reading the record, or a run that ends in between is taken for an interrupted one."""
    return recorded if running or recorded in OVER_STATES else "interrupted"


# ---------------------------------------------------------------------- creating, opening, deleting

def create_run(runs_dir: str | os.PathLike[str], config: TrainConfig) -> RunFolder:
    """A new folder with its configuration written. The id sorts by time (UTC) and names the run."""
    runs = Path(runs_dir)
    stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{_slug(config.name)}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        path, count = runs / stem, 1
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:
                count += 1
                path = runs / f"{stem}-{count}"
        partial = path / f".{CONFIG_FILE}.partial"
        config.save(partial)
        partial.rename(path / CONFIG_FILE)
    except OSError as error:
        raise RunError(f"A run folder cannot be made in {runs} ({error.strerror}); choose another folder.") from None
    return RunFolder(path)


def open_run(runs_dir: str | os.PathLike[str], run_id: str) -> RunFolder:
    """Raises RunError when there is no such run, or when the id is not a plain folder name."""
    path = Path(runs_dir) / _checked(run_id)
    if not path.is_dir():
        raise RunError(f"There is no run {run_id} in {runs_dir}; `launch.py runs` lists those there are.")
    return RunFolder(path)


def delete_run(runs_dir: str | os.PathLike[str], run_id: str) -> None:
    """Delete the folder with everything in it. Raises RunError while the run is going on."""
    folder = open_run(runs_dir, run_id)
    grave = folder.path.with_name(f".deleted-{run_id}-{uuid.uuid4().hex[:8]}")
    try:
        with folder.lock():
            folder.path.rename(grave)
        if grave.is_symlink():
            grave.unlink()
        else:
            shutil.rmtree(grave)
    except OSError as error:
        raise RunError(f"Run {run_id} cannot be deleted completely ({error.strerror}); check {runs_dir}.") from None
    for leftover in folder.path.parent.glob(".deleted-*"):  # of an earlier deletion that was killed half-way
        shutil.rmtree(leftover, ignore_errors=True)


def _checked(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise RunError(f"{run_id!r} is not a run id; `launch.py runs` lists those there are.")
    return run_id


def _slug(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:40].strip("-") or "run"


# ---------------------------------------------------------------------- control file

def send_command(folder: RunFolder, command: str) -> None:
    """Ask the process that runs it to stop, discard, pause, resume or save at its next step boundary.

    Raises RunError for another word, and when the run is not going on: nobody would obey.
    """
    if command not in COMMANDS:
        raise RunError(f"{command!r} is not a command; a run takes {', '.join(COMMANDS)}.")
    if not folder.is_running():
        raise RunError(f"Run {folder.id} is not running, so it cannot {command}.")
    line = json.dumps({"command": command, "time": time.time(), "id": uuid.uuid4().hex}).encode() + b"\n"
    descriptor = os.open(folder.control_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


class CommandReader:
    """Reads the commands sent since the run's lock was taken; those sent to an earlier process are not obeyed."""

    def __init__(self, folder: RunFolder):
        """`folder` is the object that holds the lock."""
        if folder.control_start is None:
            raise RuntimeError("commands are read by the process that holds the run's lock.")
        self._path = folder.control_path
        self._offset = folder.control_start

    def read_new(self) -> list[str]:
        """Commands since the last call, in order. Lines that are no command are passed over, and a file that cannot be
        read holds none: requests are no reason to end a run."""
        try:
            size = _size(self._path)
            self._offset = min(self._offset, size)  # somebody emptied the file
            if size == self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        whole = added.rfind(b"\n") + 1
        self._offset += whole
        commands = []
        for line in added[:whole].splitlines():
            try:
                command = json.loads(line)["command"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if command in COMMANDS:
                commands.append(command)
        return commands


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------------- list of runs

@dataclass(frozen=True)
class RunSummary:
    """One line of the list of runs. `created` is Unix seconds; `seconds` the time at work; a run that cannot be read
    has the state `unreadable` and says in `reason` why."""

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


def list_runs(runs_dir: str | os.PathLike[str]) -> list[RunSummary]:
    """Newest first; none when there is no such folder. Reads the two ends of each record, however long it is."""
    try:
        folders = [RunFolder(path) for path in Path(runs_dir).iterdir()
                   if _RUN_ID.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"The runs folder {runs_dir} cannot be read ({error.strerror}).") from None
    return sorted(filter(None, map(summarise, folders)), key=lambda run: (run.created, run.id), reverse=True)


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
    return RunSummary(folder.id, folder.id, "unreadable", 0, 0, None, created, 0.0, "", "", str(folder.path), reason)


def _summary(folder: RunFolder) -> RunSummary:
    running = folder.is_running()
    stat = (folder.path / CONFIG_FILE).stat()
    name, model, data = _names(folder.path / CONFIG_FILE, stat.st_mtime_ns)
    ends = _RecordEnds()
    created, total_steps = stat.st_mtime, 0
    if _size(folder.events_path):
        with open(folder.events_path, "rb") as file:
            for line in _lines_backwards(file):
                if ends.add(line):
                    break
            first, started = _head(file)
        created = first.time if first is not None else created
        total_steps = (ends.started or started).total_steps
    session_time, seconds = created, 0.0
    try:
        session = json.loads((folder.path / SESSION_FILE).read_text(encoding="utf-8"))
        session_time, seconds = float(session["time"]), float(session["earlier_seconds"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    seconds += max(0.0, (ends.last_time or created) - session_time)
    # Without a state near the end, the last thing that happened there was a step.
    state = ends.state or ("running" if ends.step else "preparing")
    return RunSummary(folder.id, name, shown_state(state, running), ends.step or 0, total_steps, ends.loss,
                      created, seconds, model, data, str(folder.path), ends.reason)


@functools.lru_cache(maxsize=4096)
def _names(path: Path, mtime_ns: int) -> tuple[str, str, str]:
    """Name, model and data of a configuration; `mtime_ns` makes a changed file a new question."""
    config = TrainConfig.load(path)
    return config.name, config.model.source, config.data.title


def _head(file) -> tuple[Record | None, RunStarted]:
    """The first record, None while there is no whole one, and the first `RunStarted`, empty where none is near."""
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
        wanted = line_kind(line) in (StateChanged.kind, RunEnded.kind, RunStarted.kind, StepFinished.kind)
        if self.last_time is None or wanted:
            with contextlib.suppress(ValueError):
                record = parse_line(line)
                self.last_time = self.last_time or record.time
                self._apply(record.event)
        return self.state is not None and self.step is not None and (self.loss is not None or self.step == 0)

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
    """Whole lines from the last one back, as far as `_END_LIMIT` bytes from the end."""
    position = file.seek(0, os.SEEK_END)
    limit = max(0, position - _END_LIMIT)
    rest, at_end = b"", True
    while position > limit:
        begin = max(limit, position - _TAIL_BYTES)
        file.seek(begin)
        pieces = (file.read(position - begin) + rest).split(b"\n")
        if at_end and len(pieces) > 1:
            pieces.pop()  # nothing, or a line that is being written
            at_end = False
        rest, position = pieces[0], begin
        yield from reversed(pieces[1:])
    if position == 0 and rest and not at_end:
        yield rest

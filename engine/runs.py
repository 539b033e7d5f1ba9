"""Run folders: ``<runs>/<id>/`` with ``config.yaml``, ``events.jsonl``, ``checkpoints/`` and ``export/``.

A run belongs to the process that holds its lock, which the kernel releases when that process dies: a run that is not
over and whose lock nobody holds is `interrupted`. Other processes ask for things through the control file.
"""

from __future__ import annotations

import contextlib
import errno
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
from pathlib import Path

from engine.changes import CHANGE, Change
from engine.config import TrainConfig
from engine.errors import RunError
from engine.paths import lasting_source, lasting_sources
from engine.recorder import EVENTS_FILE, FULL
from engine.snapshot import OVER_STATES

CONFIG_FILE = "config.yaml"
CONTROL_FILE = "control.jsonl"
LOCK_FILE = "lock"

COMMANDS = ("stop", "discard", "pause", "resume", "save")

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOCK_TRIES, _LOCK_WAIT_SECONDS = 10, 0.02
_LOOK_SECONDS, _LOOKS_SECONDS = 0.001, 20.0


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
            with contextlib.suppress(OSError):  # who holds it is said by the lock; its number is for a sentence alone
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self.control_start = file_size(self.control_path)
            try:
                yield
            finally:
                self.control_start = None
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _held.discard(descriptor)
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        # is_running shares the lock for an instant to learn whether it is free, and many may look at once: who only looks
        # is waited for. A refusal of a share, too, is by an owner.
        patience, tries = time.monotonic() + _LOOKS_SECONDS, _LOCK_TRIES
        while tries and time.monotonic() < patience:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                time.sleep(_LOOK_SECONDS)
            except BlockingIOError:
                tries -= 1
                time.sleep(_LOCK_WAIT_SECONDS)
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        raise RunError(f"Run {self.id} is in use by process {owner or 'unknown'}; stop it there first.")

    def is_running(self) -> bool:
        """Whether any process, this one included, holds the lock; also where that cannot be found out, since what is taken
        for free may be deleted or run a second time."""
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
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
    made: Path | None = None
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
        made = path
        partial = path / f".{CONFIG_FILE}.partial"
        config.save(partial)
        partial.rename(path / CONFIG_FILE)
    except OSError as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        do = "free some disk space or choose" if error.errno in FULL else "choose"
        raise RunError(f"A run folder cannot be made in {runs} ({error.strerror}); {do} another folder.") from None
    return RunFolder(path)


def lasting_config(config: TrainConfig) -> TrainConfig:
    """The same with local sources as whole paths, so that it can be run from any working directory."""
    return config.with_values({"model.source": lasting_source(config.model.source),
                               "data.source": lasting_sources(config.data.source)})


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, even after a crash, finds the old text or the new one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


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
    if not RUN_ID.fullmatch(run_id):
        raise RunError(f"{run_id!r} is not a run id; `launch.py runs` lists those there are.")
    return run_id


def _slug(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:40].strip("-") or "run"


# ---------------------------------------------------------------------- control file

def send_command(folder: RunFolder, command: str | Change) -> None:
    """Ask the process that runs it to stop, discard, pause, resume or save, or for a change, at its next step boundary.

    Raises RunError for another word, when the run is not going on, as nobody would obey, and when the file cannot be written.
    """
    values = {"values": dict(command.values)} if isinstance(command, Change) else {}
    command = CHANGE if values else command
    if command not in (*COMMANDS, CHANGE):
        raise RunError(f"{command!r} is not a command; a run takes {', '.join(COMMANDS)}.")
    if not folder.is_running():
        raise RunError(f"Run {folder.id} is not running, so it cannot {command}.")
    line = json.dumps({"command": command, "time": time.time(), "id": uuid.uuid4().hex, **values}).encode() + b"\n"
    try:
        descriptor = os.open(folder.control_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk took half of the request before
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(f"The request to {command} cannot be written to {folder.control_path} ({error.strerror}); free some "
                       "disk space, then ask again.") from None


class CommandReader:
    """Reads the commands sent since the run's lock was taken; those sent to an earlier process are not obeyed."""

    def __init__(self, folder: RunFolder):
        """`folder` is the object that holds the lock."""
        if folder.control_start is None:
            raise RuntimeError("commands are read by the process that holds the run's lock.")
        self._path = folder.control_path
        self._offset = folder.control_start

    def read_new(self) -> list[str | Change]:
        """Commands since the last call, in order. Lines that are no command are passed over, and a file that cannot be
        read holds none: requests are no reason to end a run."""
        try:
            size = file_size(self._path)
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
                asked = json.loads(line)
                command = asked["command"]
                if command == CHANGE:
                    commands.append(Change.from_dict(asked.get("values")))
            except (ValueError, KeyError, TypeError, RecursionError, RunError):
                continue
            if command in COMMANDS:
                commands.append(command)
        return commands


def file_size(path: Path) -> int:
    """Bytes; 0 where there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

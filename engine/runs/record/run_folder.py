"""The folder of a run, ``<runs>/<id>/``, with ``config.yaml``, ``events.jsonl``, ``checkpoints/``,
``best/`` and ``export/``.

- A run belongs to the process that holds the lock of its folder.
- The kernel releases the lock when that process dies, for whatever reason. A run is therefore
  `interrupted` if it is not over and no process holds its lock.
- Other processes send their requests through the control file (`engine.runs.record.control`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import time
import unicodedata
import uuid
from collections.abc import Iterator
from pathlib import Path

from engine import safe_files
from engine.config.settings import FORMAT, TrainConfig
from engine.config.tree import MOST_BYTES
from engine.errors import RunError
from engine.files import FULL
from engine.paths import lasting_source, lasting_sources, program_command
from engine.runs.record.following import EVENTS_FILE
from engine.runs.record.snapshot import OVER_STATES
from engine.safe_files import FileFault

CONFIG_FILE = "config.yaml"
CONTROL_FILE = "control.jsonl"
LOCK_FILE = "lock"
BEST_FOLDER = "best"
"""Folder of a run's best weights, a checkpoint of weights alone."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOCK_TRIES = 10
"""Number of refusals by an owner of the lock after which the run counts as in use."""
_LOCK_WAIT_SECONDS = 0.02
_POLL_SECONDS = 0.001
"""Seconds between two tries while other processes only check the lock, about as long as such a
check holds it.
"""
_FORMAT_LINE = re.compile(r"^format: *(\d{1,9}) *$", re.MULTILINE)
_SETTINGS_LINE = re.compile(r"^engine:", re.MULTILINE)
"""Section that every version has written into the settings of a run."""
_POLLS_SECONDS = 20.0
"""Seconds at most to wait for processes that only check the lock."""


class NoSuchRun(RunError):
    """There is no run with this id."""


class OtherFormat(RunError):
    """Raised for a run of another format. Its files are neither read nor written."""


class RunFolder:
    """Folder of one run. It can be used wherever a path can.

    Somebody else may have written what is in it, so its files are opened by `engine.safe_files`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.root = path.parent
        """Folder of runs, which is the owner's; below it, no link is followed."""
        self.id = path.name
        self.events_path = path / EVENTS_FILE
        self.checkpoints_path = path / "checkpoints"
        self.best_path = path / BEST_FOLDER
        self.export_path = path / "export"
        self.control_path = path / CONTROL_FILE
        self.control_start: int | None = None
        """Size in bytes of the control file when this object took the lock. Earlier content was
        meant for an earlier process.
        """

    def __fspath__(self) -> str:
        return str(self.path)

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The run's configuration. Raises ConfigError when the file does not load."""
        return TrainConfig.load(self.path / CONFIG_FILE, within=self.root)

    @property
    def format(self) -> int | None:
        """Format of the run's settings and record; None if its settings are damaged or not there.
        Runs before format 2 name none, and have 1.
        """
        try:
            text = safe_files.read_text(self.path / CONFIG_FILE, self.root, MOST_BYTES)
        except (OSError, UnicodeDecodeError):
            return None
        found = _FORMAT_LINE.search(text)
        if found is not None:
            return int(found[1])
        return 1 if _SETTINGS_LINE.search(text) else None

    def refuse_other_format(self) -> None:
        """Raises OtherFormat for a run that another version wrote in a format of its own."""
        found = self.format
        if found is None or found == FORMAT:
            return
        version = "Ramstream 0.1 in an earlier format" if found < FORMAT else "a later Ramstream"
        export = f"; its export is in {self.export_path}" if self.has_export else ""
        raise OtherFormat(
            f"Run {self.id} was written by {version}, and only the version that wrote it reads "
            f"it{export}."
        )

    @property
    def has_export(self) -> bool:
        """Whether the run's own export holds a model or adapters."""
        files = (self.export_path / name for name in ("config.json", "adapter_config.json"))
        return any(safe_files.is_file(file, self.root) for file in files)

    def save_config(self, config: TrainConfig) -> None:
        """Replaces the run's configuration by `config`, which a resume will use.

        Raises RunError if it cannot be written.
        """
        try:
            config.save(self.path / CONFIG_FILE, self.root)
        except OSError as error:
            raise RunError(
                f"The settings cannot be written to {self.path} ({error.strerror}); free some disk "
                "space, then ask again."
            ) from None
        finally:
            self.read_config_again()

    def checked_export(self) -> Path:
        """Returns the folder of the run's export, for libraries that open files themselves. Raises
        OSError, and FileFault for a link, or for what is no file in it.
        """
        safe_files.refuse_other_than_files(self.export_path, self.root)
        return self.export_path

    def delete_weights(self) -> None:
        """Deletes the checkpoints and the best weights, as far as that is possible."""
        for path in (self.checkpoints_path, self.best_path):
            safe_files.try_to_remove_tree(path, self.root)

    def read_config_again(self) -> None:
        """Discards the cached configuration, since another process may have written the file."""
        self.__dict__.pop("config", None)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Returns a context manager that owns the run while it is open.

        Raises RunError when another process, or another part of this one, owns it.
        """
        try:
            descriptor = safe_files.open_lock(self.path / LOCK_FILE, self.root, makes=True)
        except OSError as error:
            raise RunError(
                f"Run {self.id} cannot be locked ({error.strerror}); check {self.path}."
            ) from None
        _let_go_in_children()
        _held.add(descriptor)
        try:
            self._take(descriptor)
            # The lock itself shows whether the run is in use. The process id is needed only for one
            # message, so a failure to write it does no harm.
            with contextlib.suppress(OSError):
                safe_files.write_over(descriptor, f"{os.getpid()}\n".encode())
            self.control_start = 0
            with contextlib.suppress(FileFault):  # no request can come through it then
                self.control_start = safe_files.size_of(self.control_path, self.root)
            try:
                yield
            finally:
                self.control_start = None
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _held.discard(descriptor)
            os.close(descriptor)

    @contextlib.contextmanager
    def owned_to_delete(self) -> Iterator[None]:
        """Returns a context manager in which no other process owns the run. A run whose lock is no
        file can be deleted all the same, since no process can own it.
        """
        try:
            safe_files.size_of(self.path / LOCK_FILE, self.root)
        except FileFault:
            yield
            return
        with self.lock():
            yield

    def _take(self, descriptor: int) -> None:
        """Takes the lock exclusively. Raises RunError if another process owns it."""
        # is_running takes a shared lock for an instant to find out whether the lock is free, and
        # many processes may do so at once. So a refused exclusive lock does not prove that the run
        # has an owner, and processes that only check are waited for. Only an owner also causes a
        # shared lock to be refused.
        deadline, tries = time.monotonic() + _POLLS_SECONDS, _LOCK_TRIES
        while tries and time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                time.sleep(_POLL_SECONDS)
            except BlockingIOError:
                tries -= 1
                time.sleep(_LOCK_WAIT_SECONDS)
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        raise RunError(
            f"Run {self.id} is in use by process {owner or 'unknown'}; stop it there first."
        )

    def is_running(self) -> bool:
        """Returns whether any process, this one included, holds the lock. Nothing is written.

        Returns True if this cannot be determined, since a run that counts as free may be deleted or
        executed a second time. What is no file (`safe_files.FileFault`) is no lock, and no process
        takes it for one.
        """
        try:
            descriptor = safe_files.open_lock(self.path / LOCK_FILE, self.root, makes=False)
        except (FileNotFoundError, NotADirectoryError, FileFault):
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
"""File descriptors on which this process holds locks."""


@functools.cache
def _let_go_in_children() -> None:
    """Makes forked children close the locked descriptors, once there is a first lock.

    Otherwise a child would keep the lock after its parent is killed.
    """
    os.register_at_fork(after_in_child=_close_held)


def _close_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


def shown_state(recorded: str, running: bool) -> str:
    """Returns the state to show, which is `interrupted` for an unfinished run that no process owns.

    Call `is_running` before reading the record. Otherwise a run that ends in between would appear
    to be interrupted.
    """
    if running or recorded in OVER_STATES:
        return recorded
    return "interrupted"


# ---------------------------------------------------------------------- creating, opening, deleting


def create_run(runs_dir: str | os.PathLike[str], config: TrainConfig) -> RunFolder:
    """Creates a new run folder and writes the configuration into it.

    The run's id sorts by time (UTC) and contains the name. Raises RunError if the folder cannot be
    created.
    """
    runs = Path(runs_dir)
    stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{_slug(config.name)}"
    made: Path | None = None
    try:
        runs.mkdir(parents=True, exist_ok=True)
        made = _new_folder(runs, stem)
        config.save(made / CONFIG_FILE, runs)
        # Without this sync, a power failure could lose the folder's name although checkpoints were
        # synced in it.
        safe_files.sync_folder(runs, runs)
    except OSError as error:
        if made is not None:
            safe_files.try_to_remove_tree(made, runs)
        do = "free some disk space or choose" if error.errno in FULL else "choose"
        raise RunError(
            f"A run folder cannot be made in {runs} ({error.strerror}); {do} another folder."
        ) from None
    return RunFolder(made)


def _new_folder(runs: Path, stem: str) -> Path:
    """Creates the first of ``stem``, ``stem-2``, ``stem-3`` and so on that does not exist yet, for
    its owner alone: a run has samples of data, and may have the secret address of a webhook.
    """
    path, count = runs / stem, 1
    while True:
        try:
            safe_files.make_folder(path, runs)
            return path
        except FileExistsError:
            count += 1
            path = runs / f"{stem}-{count}"


def lasting_config(config: TrainConfig) -> TrainConfig:
    """Returns the same configuration with local sources as absolute paths.

    The run can then be executed from any working directory.
    """
    start, disk = config.model.start_from, config.engine.disk
    return config.with_values(
        {
            "model.start_from": None if start is None else lasting_source(start),
            "model.source": lasting_source(config.model.source),
            "data.source": lasting_sources(config.data.source),
            "engine.disk": None if disk is None else str(Path(disk).expanduser().absolute()),
        }
    )


def open_run(runs_dir: str | os.PathLike[str], run_id: str) -> RunFolder:
    """Returns the folder of a run.

    Raises RunError when there is no such run, or when the id is not a plain folder name, or that of
    a link, and OtherFormat for a run that another version wrote in a format of its own.
    """
    folder = find_run(runs_dir, run_id)
    folder.refuse_other_format()
    return folder


def find_run(runs_dir: str | os.PathLike[str], run_id: str) -> RunFolder:
    """Returns the folder of a run of any format, to delete it. Raises RunError as `open_run`
    does.
    """
    runs = Path(runs_dir)
    path = runs / _checked(run_id)
    if not safe_files.is_folder(path, runs):
        if path.is_symlink():
            raise RunError(
                f"Run {run_id} is a link, which is not followed in {runs_dir}; put the folder "
                "itself there, or start with --runs-dir where it is."
            )
        raise NoSuchRun(
            f"There is no run {run_id} in {runs_dir}; `{program_command()} runs` lists those there "
            "are."
        )
    return RunFolder(path)


def delete_run(runs_dir: str | os.PathLike[str], run_id: str) -> None:
    """Deletes a run's folder and its contents, and nothing that links in it lead to. Raises
    RunError while a process owns the run.
    """
    runs = Path(runs_dir)
    path = runs / _checked(run_id)
    grave = path.with_name(f".deleted-{run_id}-{uuid.uuid4().hex[:8]}")
    try:
        if path.is_symlink():
            safe_files.remove(path, runs)
            return
        folder = find_run(runs_dir, run_id)
        # Renaming removes the run from the list at once, however long deletion takes.
        with folder.owned_to_delete():
            safe_files.rename(path, grave, runs)
        safe_files.remove_tree(grave, runs)
    except OSError as error:
        raise RunError(
            f"Run {run_id} cannot be deleted completely ({error.strerror}); check {runs_dir}."
        ) from None
    # An earlier deletion may have been interrupted.
    with contextlib.suppress(OSError):
        for name in safe_files.entries(runs, runs):
            if name.startswith(".deleted-"):
                safe_files.try_to_remove_tree(runs / name, runs)


def _checked(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        raise RunError(
            f"{run_id!r} is not a run id; `{program_command()} runs` lists those there are."
        )
    return run_id


def _slug(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:40].strip("-") or "run"

"""Detached runs: runs in processes of their own, which outlive the server. Each process is
`launch.py train --resume` on a run folder, which may be new.

- Such a process takes the run's lock only after it has imported torch for several seconds. Until
  then, `detached.json` in the run folder shows that the process is starting: it has the length of
  the record before the process.
- Files next to `detached.json` hold the process's output.
- If a process ends before its first record, the server records it as failed, since no other process
  can write that record.
- A run on several GPUs always has a process of its own: a GPU that fails while others wait for it
  may take its process along.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import psutil

from engine import safe_files
from engine.config.changes import Change
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.helper_process import signal_name, start_ticks
from engine.paths import PROGRAM_ROOT
from engine.runs.record.control import send_command
from engine.runs.record.events import RunEnded
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder, delete_run
from engine.runs.summaries.names import new_run
from engine.safe_files import FileFault

PROCESS_FILE = "detached.json"
STDOUT_FILE = "stdout.txt"
STDERR_FILE = "stderr.txt"
LOGIN_VARIABLE = "RAMSTREAM_LOGIN"
TAIL_BYTES = 16_384
"""Number of bytes at the end of a text file in which its last lines are searched for."""
LINES_SHOWN = 3
START_PATIENCE = 60.0
"""Seconds that a command waits at most for a process that is starting."""
START_POLL_SECONDS = 0.1
"""Seconds between two checks whether a process has started."""
SAME_START = 1.0
"""Seconds by which two readings of one process's start time differ at most. psutil counts from the
boot time, which the system may report slightly differently each time.
"""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


INTERRUPTED = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
"""Exit codes of a process that was asked by a signal to end before its run began."""


def train_command(folder: RunFolder) -> list[str]:
    """Returns the command line that runs or continues `folder`."""
    return [
        sys.executable,
        str(PROGRAM_ROOT / "launch.py"),
        "train",
        "--resume",
        folder.id,
        "--runs-dir",
        str(folder.path.parent.resolve()),
    ]


class DetachedRuns:
    """Starts a server's runs in processes of their own, and records a failure if a
    process ends before its run begins. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._awaited: set[Path] = set()
        """Run folders for whose process a thread of this server waits. Only that
        thread will know how the process ended, so no other thread records its end. Adding to a set
        and removing from it are atomic in Python, so no lock is needed.
        """

    def start(
        self, config: TrainConfig, runs_dir: Path, on_end: Callable[[], None] = lambda: None
    ) -> str:
        """Creates a run folder, starts its process, and returns the run's id without waiting for
        it. A thread calls `on_end` when the process ends.

        Raises RunError when the folder or the process cannot be made.
        """
        folder = new_run(runs_dir, config)
        try:
            process = _start_process(folder)
        except OSError as error:
            delete_run(runs_dir, folder.id)
            raise _no_process(error) from None
        self._await(folder, process, on_end)
        return folder.id

    def resume(self, folder: RunFolder, on_end: Callable[[], None] = lambda: None) -> None:
        """Starts a process that continues a run, without waiting for it. A thread calls `on_end`
        when the process ends. Raises RunError when the process cannot be made.
        """
        try:
            process = _start_process(folder)
        except OSError as error:
            raise _no_process(error) from None
        self._await(folder, process, on_end)

    def _await(
        self, folder: RunFolder, process: subprocess.Popen[bytes], on_end: Callable[[], None]
    ) -> None:
        self._awaited.add(folder.path)

        def wait() -> None:
            # Waiting also removes the zombie process, which would otherwise count as running.
            try:
                _record_end(folder, process.wait())
            finally:
                self._awaited.discard(folder.path)
                on_end()

        # This is a daemon thread, so that the server can end while the process continues.
        threading.Thread(target=wait, name=f"detached-{folder.id}", daemon=True).start()

    def why_it_failed(self, folder: RunFolder) -> str | None:
        """Returns why a process ended before its first record, for a list, which writes nothing.
        None if it did not, if a thread of this server waits for it, or if that cannot be found out.
        """
        with contextlib.suppress(OSError):
            if folder.path not in self._awaited and _has_ended_before_its_record(folder):
                return why_it_ended(folder.path)
        return None

    def record_end(self, folder: RunFolder) -> None:
        """Records that a process ended before its first record, and so has failed. This does
        nothing while a thread of this server waits for that process. A failure that cannot be
        recorded now, such as on a full disk, can be recorded by a later call.
        """
        if folder.path not in self._awaited:
            _record_end(folder, None)


def _no_process(error: OSError) -> RunError:
    if isinstance(error, FileFault):
        return error
    return RunError(
        f"A process for the run cannot be started ({error.strerror}); check the machine's limits."
    )


def _start_process(folder: RunFolder) -> subprocess.Popen[bytes]:
    """Starts the process of a run and records its id and start time. Raises OSError, after ending
    the process.
    """
    environment = dict(os.environ)
    environment.pop(LOGIN_VARIABLE, None)  # a training process needs no password
    environment["TQDM_DISABLE"] = "1"  # an unseen progress bar would fill the disk
    recorded = safe_files.size_of(folder.events_path, folder.root)
    with _output(folder, STDOUT_FILE) as out, _output(folder, STDERR_FILE) as err:
        process = subprocess.Popen(
            train_command(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            # Signals to the server's terminal, such as Ctrl-C, must not reach the run's process.
            start_new_session=True,
        )
    identity = {
        "pid": process.pid,
        "started": _started(process.pid),
        "boot": _boot_id(),
        "ticks": start_ticks(process.pid),
        "recorded": recorded,
    }
    try:
        safe_files.write_whole(folder.path / PROCESS_FILE, json.dumps(identity), folder.root)
    except OSError:
        # Without that file, no later server could know that this process belongs to the run.
        process.kill()
        process.wait()
        raise
    return process


def _output(folder: RunFolder, name: str) -> BinaryIO:
    """Returns a new file for the output of a process, in place of what has its name."""
    safe_files.remove(folder.path / name, folder.root)
    return os.fdopen(safe_files.create(folder.path / name, folder.root), "wb")


def _record_end(folder: RunFolder, code: int | None) -> None:
    """Records that a process ended before its first record. `code` is its exit code: negative for a
    signal, None if another server started the process.
    """
    # A RunError means that another process holds the run's lock; that process records the run
    # itself.
    with contextlib.suppress(RunError, OSError):
        if not _has_ended_before_its_record(folder):
            return
        with folder.lock():
            # The size is checked under the lock, since another process may have begun the record
            # meanwhile.
            if not _has_recorded(folder):
                ended = RunEnded("failed", why_it_ended(folder.path, code), "RunError")
                if code in INTERRUPTED:
                    ended = RunEnded("stopped", "Stopped before it began; it can be resumed.")
                with contextlib.closing(RunRecorder(folder.path, folder.id)) as recorder:
                    recorder.emit(ended)


def _has_ended_before_its_record(folder: RunFolder) -> bool:
    """Returns whether a run was given a process that has ended without a record. Raises OSError."""
    was_detached = safe_files.is_file(folder.path / PROCESS_FILE, folder.root)
    return was_detached and not _has_recorded(folder) and not _is_alive(folder)


def is_starting(folder: RunFolder) -> bool:
    """Returns whether the run has a process of its own that has not written a record yet."""
    return not _has_recorded(folder) and _is_alive(folder)


def _has_recorded(folder: RunFolder) -> bool:
    """Returns whether the record has become longer since the run was given a process."""
    try:
        size = safe_files.size_of(folder.events_path, folder.root)
    except FileFault:  # no process can record anything in what is no file
        return True
    if size == 0:
        return False
    process = _process_of(folder)
    return size != (0 if process is None else process.recorded)


def process_of_its_own(folder: RunFolder) -> int | None:
    """Returns the id of the process of its own that a run has; None where it has none any more."""
    process = _process_of(folder)
    return None if process is None or not _is_alive(folder) else process.pid


class _Process(msgspec.Struct, frozen=True):
    """Content of `detached.json` about a process."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    started: float
    """Unix time at which it began."""
    boot: str = ""
    """Mark of the boot of the machine on which it began."""
    ticks: int = 0
    """Number of clock ticks from that boot to its beginning."""
    recorded: int = 0
    """Number of bytes that the record had before."""


def _process_of(folder: RunFolder) -> _Process | None:
    """Returns the content of `detached.json`, or None where it cannot be read or another account
    wrote it.
    """
    try:
        status = safe_files.lstat(folder.path / PROCESS_FILE, folder.root)
        if status is None or status.st_uid != os.geteuid():
            return None
        return safe_files.read_json(folder.path / PROCESS_FILE, folder.root, _Process)
    except OSError:
        return None


def request_when_started(folder: RunFolder, command: str | Change) -> None:
    """Sends a command to the process of a run, after waiting for a process that is still starting.
    Raises RunError if no process can ever take the command.
    """
    end = time.monotonic() + START_PATIENCE
    while not folder.is_running() and is_starting(folder) and time.monotonic() < end:
        time.sleep(START_POLL_SECONDS)
    send_command(folder, command)


def why_it_ended(path: Path, code: int | None = None) -> str:
    """Returns a sentence that quotes the last output of a process before it ended. `path` is the
    run folder; `code` is the exit code: negative for a signal, None if unknown.
    """
    lines = last_lines(path / STDERR_FILE, path.parent)
    # The program reports its own errors in one plain sentence, to which nothing need be added.
    own = next((line for line in reversed(lines) if line.startswith("ramstream: ")), None)
    if own is not None:
        return own.removeprefix("ramstream: ")
    how = "ended before the run began"
    if code is not None and code < 0:
        how = f"was ended by {signal_name(-code)} before the run began"
        if -code == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    elif code:
        how += f", with exit code {code}"
    text = f"Its last words: {' / '.join(lines[-LINES_SHOWN:])}" if lines else "It said nothing."
    return f"The process of the run {how}. {text}"


def last_lines(path: Path, within: Path) -> list[str]:
    """Returns the last non-empty lines of a text file in a folder of runs, `within`, or none if it
    cannot be read.
    """
    try:
        with safe_files.open_to_read(path, within) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _boot_id() -> str:
    """Returns what distinguishes this boot of the machine from the others; "" if unknown."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _started(pid: int) -> float:
    """Returns the Unix time at which a process began, or 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        is_over = process.status() == psutil.STATUS_ZOMBIE
        return 0.0 if is_over else process.create_time()
    except psutil.Error:
        return 0.0


def _is_of(folder: RunFolder, pid: int) -> bool:
    """Returns whether a process is this account's and was started to run or continue `folder`: a
    stranger's folder may name any process.
    """
    try:
        process = psutil.Process(pid)
        arguments = process.cmdline()
        is_ours = process.uids().effective == os.geteuid()
    except psutil.Error:
        return False
    return is_ours and all(word in arguments for word in train_command(folder)[1:])


def _is_alive(folder: RunFolder) -> bool:
    """Returns whether the process that `detached.json` names still exists."""
    process = _process_of(folder)
    if process is None or not _is_of(folder, process.pid):
        return False
    if process.boot and process.ticks:
        return process.boot == _boot_id() and process.ticks == start_ticks(process.pid)
    # The system reports no more. A later process with the same id began at another time.
    return process.started > 0 and abs(_started(process.pid) - process.started) < SAME_START

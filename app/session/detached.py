"""Runs in processes of their own, which outlive the server: `launch.py train --resume` on a new run
folder.

Until such a process takes the run's lock, which is seconds of importing, `detached.json` in the run
folder tells that it is on its way; what it prints stands in files beside it. One that ends before
its first record is recorded as failed here, since nobody else can.
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

import psutil

from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.files import file_size, write_whole
from engine.helper_process import signal_name
from engine.paths import PROGRAM_ROOT
from engine.runs.control import send_command
from engine.runs.events import RunEnded
from engine.runs.folder import RunFolder, create_run, delete_run, lasting_config
from engine.runs.recorder import RunRecorder

PROCESS_FILE = "detached.json"
STDOUT_FILE, STDERR_FILE = "stdout.txt", "stderr.txt"
LOGIN_VARIABLE = "RAMSTREAM_LOGIN"
TAIL_BYTES = 16_384
LINES_TOLD = 3
START_PATIENCE = 60.0
START_LOOK = 0.1


def train_command(folder: RunFolder) -> list[str]:
    """The command line that runs `folder`, or goes on with it."""
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
    """The runs in processes of their own of one server, from their start to the record of a failure
    to begin. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._awaited: set[Path] = set()
        """Folders whose process a thread of ours waits for: it alone will know how the process
        ended.
        """

    def start(
        self, config: TrainConfig, runs_dir: Path, on_end: Callable[[], None] = lambda: None
    ) -> str:
        """Make a run folder and start its process; returns the run's id at once. `on_end` is
        called, in a thread, when it ends.

        Raises RunError when the folder or the process cannot be made.
        """
        folder = create_run(runs_dir, lasting_config(config))
        try:
            process = _start_process(folder)
        except OSError as error:
            delete_run(runs_dir, folder.id)
            raise RunError(
                f"A process for the run cannot be started ({error.strerror}); check the machine's "
                "limits."
            ) from None
        self._awaited.add(folder.path)

        def wait() -> None:
            try:
                _record_end(folder, process.wait())
            finally:
                self._awaited.discard(folder.path)
                on_end()

        threading.Thread(target=wait, name=f"detached-{folder.id}", daemon=True).start()
        return folder.id

    def settle(self, folder: RunFolder) -> None:
        """Record the failure of a process that ended before its first record, if nobody waits for
        it; nothing otherwise. What cannot be recorded, as on a full disk, can be at a later call.
        """
        if folder.path not in self._awaited:
            _record_end(folder, None)


def _start_process(folder: RunFolder) -> subprocess.Popen[bytes]:
    """Start it and write down which one it is. Raises OSError, and no process is left then."""
    # A bar for nobody would fill the disk; a password is nothing that a training process needs.
    environment = {name: value for name, value in os.environ.items() if name != LOGIN_VARIABLE} | {
        "TQDM_DISABLE": "1"
    }
    with open(folder.path / STDOUT_FILE, "wb") as out, open(folder.path / STDERR_FILE, "wb") as err:
        process = subprocess.Popen(
            train_command(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
    try:
        write_whole(
            folder.path / PROCESS_FILE,
            json.dumps({"pid": process.pid, "started": _started(process.pid)}),
        )
    except OSError:
        process.kill()
        process.wait()
        raise
    return process


def _record_end(folder: RunFolder, code: int | None) -> None:
    """Record that a process ended before its first record. `code`: its exit code, negative for a
    signal, None when it was another server's.
    """
    with contextlib.suppress(RunError, OSError):  # whoever has the lock now records for itself
        if (
            not (folder.path / PROCESS_FILE).is_file()
            or file_size(folder.events_path)
            or _is_alive(folder)
        ):
            return
        with folder.lock():
            if file_size(folder.events_path) == 0:
                with contextlib.closing(RunRecorder(folder.path, folder.id)) as recorder:
                    recorder.emit(RunEnded("failed", why_it_ended(folder.path, code), "RunError"))


def is_starting(folder: RunFolder) -> bool:
    """Whether a process of its own is there for the run and has not recorded anything yet."""
    return file_size(folder.events_path) == 0 and _is_alive(folder)


def request_when_started(folder: RunFolder, command: str) -> None:
    """Send a command, to a process that is still starting once it can take it. Raises RunError when
    it never does.
    """
    end = time.monotonic() + START_PATIENCE
    while not folder.is_running() and is_starting(folder) and time.monotonic() < end:
        time.sleep(START_LOOK)
    send_command(folder, command)


def why_it_ended(path: Path, code: int | None = None) -> str:
    """What a process said before it ended, in a sentence. `path`: the run folder; `code` as for
    `_record_end`.
    """
    lines = last_lines(path / STDERR_FILE)
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
    said = f" Its last words: {' / '.join(lines[-LINES_TOLD:])}" if lines else " It said nothing."
    return f"The process of the run {how}.{said}"


def last_lines(path: Path) -> list[str]:
    """The last lines of a text file that are not empty; none when it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _started(pid: int) -> float:
    """When a process began, which tells it from a later one of the same number; 0 when it is over."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return 0.0


def _is_alive(folder: RunFolder) -> bool:
    try:
        written = json.loads((folder.path / PROCESS_FILE).read_text(encoding="utf-8"))
        pid, started = int(written["pid"]), float(written["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return started > 0 and abs(_started(pid) - started) < 1.0

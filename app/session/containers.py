"""The end of a container: it ends with its first process, and every other process in it is then
ended by force.

So runs in processes of their own, which outlive the server elsewhere, end with it there. The server
passes the signal on to them and waits until they have stopped and saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from app.session.detached import process_of_its_own
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import run_ids

INITS = {"catatonit", "docker-init", "dumb-init", "podman-init", "tini", "tini-static"}
"""Programs that are the first of a container. They start another program, and end with it."""
POLL_SECONDS = 0.2


def ends_with_this_process() -> bool:
    """Returns whether every other process is ended with this one: it is the first process of its
    container, or the one that the first process waits for.
    """
    if os.getpid() == 1:
        return True
    try:
        return os.getppid() == 1 and Path("/proc/1/comm").read_text().strip() in INITS
    except OSError:
        return False


def stop_detached(runs_dir: Path) -> list[RunFolder]:
    """Asks the runs that have processes of their own to stop, and returns them."""
    asked = []
    for folder in _folders(runs_dir):
        process = process_of_its_own(folder)
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGTERM)
                asked.append(folder)
    return asked


def wait_for_end(folders: list[RunFolder]) -> None:
    """Waits until the processes of these runs have ended."""
    while any(process_of_its_own(folder) is not None for folder in folders):
        time.sleep(POLL_SECONDS)


def _folders(runs_dir: Path) -> list[RunFolder]:
    try:
        return [RunFolder(runs_dir / run_id) for run_id in run_ids(runs_dir)]
    except OSError:
        return []

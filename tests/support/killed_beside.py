"""Runs that are killed while a checkpoint is written beside training."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support.killed import after, before, die

SLOW_SECONDS = 0.004


def write_in_chunks(room: int, seconds: float = SLOW_SECONDS) -> None:
    """Makes even a tiny model be written beside training, in chunks of a page, and slowly."""
    from engine.planning.fit import checkpoint_sizes
    from engine.training.checkpoints import chunk_files, staging, unit_files

    checkpoint_sizes.SMALL_BYTES = 0
    checkpoint_sizes.STAGING_CHUNK_BYTES = staging.CHUNK_BYTES = unit_files.ALIGNED_BYTES = 4096
    whole = checkpoint_sizes._in_chunks
    checkpoint_sizes._in_chunks = lambda *requirements: min(room, whole(*requirements))
    wait = partial(time.sleep, seconds)
    chunk_files.ChunkFile.write = before(chunk_files.ChunkFile.write, wait)


def watch_calls(act: Callable[[str], None]) -> None:
    """Calls `act` with the kind of each call that writes a checkpoint."""
    from engine import safe_files
    from engine.training.checkpoints import chunk_files

    chunk_files.ChunkFile.write = before(chunk_files.ChunkFile.write, partial(act, "write"))
    os.fsync = before(os.fsync, partial(act, "fsync"))
    rename = before(safe_files.rename, partial(act, "rename"))
    safe_files.rename = after(rename, partial(act, "renamed"))


def kill_at(kind: str, count: int) -> Callable[[str], None]:
    """Returns a function that kills this process at call number `count` of a kind."""
    left, lock = [count], threading.Lock()

    def act(called: str) -> None:
        if called == kind:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    die()

    return act


def forked(work: Callable[[], None]) -> bool:
    """Does `work` in a process of its own. Returns whether the process was killed; fails if it
    ended with an error.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError("a process with threads cannot be forked")
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.waitstatus_to_exitcode(status) == 0, status
    return killed


def finish(run) -> None:
    ended = run.execute()
    assert ended.state == "finished", ended.reason


def files_of(checkpoints: Path) -> dict[int, dict[str, bytes]]:
    """Returns the files of all checkpoints in a folder but their manifests, by step and name."""
    found = {}
    for path in checkpoints.glob("step-*"):
        files = [file for file in path.iterdir() if file.name != "manifest.json"]
        found[int(path.name[5:])] = {file.name: file.read_bytes() for file in files}
    return found

"""A memory limit of the kernel for programs that a test starts: a cgroup of version 1 or 2 below
this process's own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.machine.cgroups import _cgroup_folders


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[Path]:
    """The folder of a cgroup whose processes may have `nbytes` of memory together. Skips the test
    where none can be made.
    """
    for parent in _cgroup_folders(Path("/"), "memory"):
        folder = parent / f"ramstream-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if _limited(folder, nbytes):
                yield folder
                return
        finally:
            _remove(folder)
    pytest.skip(
        "no memory cgroup can be made here: that takes the right to write to /sys/fs/cgroup"
    )


def _remove(folder: Path) -> None:
    """Removes the cgroup. A process that has just ended is still in it for a moment."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()


def _limited(folder: Path, nbytes: int) -> bool:
    """Whether there is a limit to set, and it could be set."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            if (folder / name).exists():
                (folder / name).write_text(str(nbytes))
                return True
    return False


def run_within(
    folder: Path, command: Sequence[str], **keywords
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command that enters the cgroup before it starts."""
    enter = ["/bin/sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    return subprocess.run([*enter, *command], text=True, capture_output=True, **keywords)

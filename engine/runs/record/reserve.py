"""Disk space that an open record reserves for the lines that report a full disk.

This module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from engine import safe_files
from engine.files import disk_full_text

RECORD_BYTES = 16 << 20
"""Free bytes for which a run on a full disk waits, enough for some hours of its record."""
POLL_SECONDS = 0.5
"""Seconds between two checks of the disk by a record that waits for space."""
RESERVE_FILE = "events.reserve"
_RESERVE_BYTES = 1 << 16


class Reserve:
    """Disk space in the file ``events.reserve`` in the folder of a record.

    On a full disk, half of the space is freed for the line that reports it, and for the requests
    that are then written to the run's control file. The rest is freed for the last line of the run.
    """

    def __init__(self, folder: Path):
        self._path = folder / RESERVE_FILE
        self._root = folder.parent

    def hold(self) -> None:
        """Allocates the whole reserve. Raises OSError if the disk has less space."""
        # Whatever has this name is replaced, so that nothing is written through it.
        safe_files.remove(self._path, self._root)
        descriptor = safe_files.create(self._path, self._root)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
        finally:
            os.close(descriptor)

    def give_half(self) -> None:
        with contextlib.suppress(OSError):  # the file may have been deleted
            safe_files.truncate(self._path, self._root, _RESERVE_BYTES // 2)

    def give_all(self) -> None:
        with contextlib.suppress(OSError):
            safe_files.remove(self._path, self._root)


def has_disk_space(folder: Path) -> bool:
    """Returns whether the disk has space for a record again. It does not notice quotas."""
    return shutil.disk_usage(folder).free >= RECORD_BYTES


def wait_text(error: OSError, folder: Path) -> str:
    """Returns one sentence on why a run waits and what ends the wait."""
    return (
        f"{disk_full_text(error)}: the record of the run cannot be written in {folder}; free at "
        f"least {RECORD_BYTES >> 20} MiB of that disk and the run goes on by itself; stopped now, "
        "it is not saved."
    )

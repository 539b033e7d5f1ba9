"""Space on the disk for a run's record: what an open record holds back for the lines that tell of a
full disk, and how much it asks for. Standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from engine.files import is_full_in_words

RECORD_BYTES = 16 << 20
"""What the record of some hours takes, which is asked for when a disk is full."""
LOOK_SECONDS = 0.5
"""Between two looks of a record that waits for space."""
RESERVE_FILE = "events.reserve"
_RESERVE_BYTES = 1 << 16


class Reserve:
    """Disk space beside a record, as the file ``events.reserve``. On a full disk half of it is
    given to the line that says so (and to what is asked of the run then, in its control file), and
    the rest to the last line of the run.
    """

    def __init__(self, folder: Path):
        self._path = folder / RESERVE_FILE

    def hold(self) -> None:
        """Hold the whole of it back. Raises OSError where the disk has less."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
        finally:
            os.close(descriptor)

    def give_half(self) -> None:
        with contextlib.suppress(OSError):  # somebody deleted it
            os.truncate(self._path, _RESERVE_BYTES // 2)

    def give_all(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def has_disk_space(folder: Path) -> bool:
    """Whether the disk has space for a record again; a quota does not show here."""
    return shutil.disk_usage(folder).free >= RECORD_BYTES


def wait_in_words(error: OSError, folder: Path) -> str:
    """Why a run waits, and what ends that, in one sentence."""
    return (
        f"{is_full_in_words(error)}: the record of the run cannot be written in {folder}; free at "
        f"least {RECORD_BYTES >> 20} MiB of that disk and the run goes on by itself; stopped now, "
        "it is not saved."
    )

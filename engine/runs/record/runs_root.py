"""Checks of the folder of all runs before a server starts, so that no run fails on it later."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from engine.errors import RunError
from engine.files import FULL, disk_full_text

_PROBE_BYTES = 64 << 10
"""Bytes that are written to see whether the disk takes anything: more than a file system keeps
within an entry of a folder.
"""


def refuse_unusable(runs: Path) -> None:
    """Raises RunError if runs cannot be kept in `runs`, an absolute path.

    The folder need not exist, and is not created here; then its nearest existing parent is tried.
    The test is a file that is written and removed.
    """
    place = runs
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        what = "this is" if place == runs else f"{place} is"
        raise RunError(f"--runs-dir {runs}: {what} not a folder; name another one.")
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise RunError(f"--runs-dir {runs}: {_why(place, error)}") from None


def _why(place: Path, error: OSError) -> str:
    if error.errno in FULL:
        return f"{_lowered(disk_full_text(error))}; free some space, or name another folder."
    if error.errno == errno.EROFS:
        return f"{place} is on a disk that can only be read; name another folder."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not write in {place}; name another folder."
    return f"nothing can be written in {place} ({error.strerror}); name another folder."


def _lowered(words: str) -> str:
    return words[0].lower() + words[1:]

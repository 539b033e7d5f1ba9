"""File systems of a few MiB, which a test can fill to the last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(place: Path, mib: int, *unmount: str) -> Iterator[Path]:
    """A new folder `place` with a file system of its own inside; skips the test where it may not be
    mounted.

    `unmount` are options for its end, such as --lazy where a process may still have a file open in
    it.
    """
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", place], capture_output=True
    ).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", *unmount, place], check=True)

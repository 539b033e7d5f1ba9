"""Files of a run's folder that have one result a line. A line is appended in one write and never
changed, so that several processes may append, and a damaged line costs itself alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from engine import safe_files
from engine.errors import RunError

LARGEST_FILE = 16 << 20
"""Bytes above which a file is not read: it has tens of thousands of results."""

T = TypeVar("T")


def read_lines(file: Path, result_in: Callable[[bytes], T | None]) -> tuple[list[T], str]:
    """Returns the results in a file of a run's folder, and one sentence on what cannot be read,
    which is empty where nothing is wrong. `result_in` returns the result in a line, or None for a
    damaged line, which is left out. A file that cannot be read has no results.
    """
    try:
        lines = safe_files.read_bytes(file, file.parent.parent, LARGEST_FILE).split(b"\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{file.name} cannot be read ({error.strerror})."
    results, damaged = [], 0
    for line in filter(None, lines):
        result = result_in(line)
        if result is None:
            damaged += 1
        else:
            results.append(result)
    return results, _left_out(file.name, damaged)


def _left_out(name: str, damaged: int) -> str:
    if not damaged:
        return ""
    if damaged == 1:
        return f"A line of {name} is damaged and left out."
    return f"{damaged:,} lines of {name} are damaged and left out."


def append_lines(file: Path, lines: Sequence[bytes]) -> None:
    """Adds lines to a file of a run's folder, on the disk when this returns. Another process may do
    so at the same time. Raises RunError if they cannot be written.
    """
    content = b"".join(line + b"\n" for line in lines)
    folder = file.parent
    try:
        descriptor = safe_files.open_to_append(file, folder.parent)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a torn line stands alone
                content = b"\n" + content
            _write(descriptor, content, size)
        finally:
            os.close(descriptor)
        safe_files.sync_folder(folder, folder.parent)
    except OSError as error:
        raise RunError(
            f"The results cannot be written to {file} ({error.strerror}); free some "
            "disk space or check the folder."
        ) from None


def _write(descriptor: int, content: bytes, size: int) -> None:
    """Appends to a file of `size` bytes all of the content or nothing."""
    try:
        written = os.write(descriptor, content)
        if written < len(content):
            os.write(descriptor, content[written:])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise

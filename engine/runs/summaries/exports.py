"""Where models of runs were exported to, besides the runs' own folders: ``exports.jsonl`` next to
the runs, one export a line.

It is no part of a run's folder, so a run from somebody else names no folder here. A line is
appended in one write and never changed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from msgspec.json import Decoder, Encoder

from engine import safe_files

EXPORTS_FILE = "exports.jsonl"
OTHER_TOKENS = "Not read as it was trained"
"""Beginning of a `check` that names a difference."""
LARGEST_FILE = 16 << 20
"""Bytes above which the file is not read: it has tens of thousands of exports."""


@dataclass(frozen=True)
class NotedExport:
    """One export of a run to a folder."""

    run: str
    """Id of the run."""
    path: str
    step: int
    dtype: str
    is_adapter: bool
    time: float
    """End of the export, in Unix seconds."""
    file: str = ""
    """Name of the GGUF file in the folder, if it has one."""
    check: str = ""
    """Sentence on whether it reads the run's data as they were trained."""


_decode = Decoder(NotedExport).decode
_encode = Encoder().encode


def note_export(runs_dir: Path, noted: NotedExport) -> None:
    """Notes an export. The export itself is done, so that a note that cannot be written is left
    out.
    """
    with contextlib.suppress(OSError):
        descriptor = safe_files.open_to_append(runs_dir / EXPORTS_FILE, runs_dir)
        try:
            os.fchmod(descriptor, safe_files.PRIVATE)
            os.write(descriptor, _encode(noted) + b"\n")
        finally:
            os.close(descriptor)


def noted_exports(runs_dir: Path, run_id: str) -> list[NotedExport]:
    """Returns the exports of a run whose folders are still there, the newest first. Lines that are
    damaged are left out.
    """
    try:
        content = safe_files.read_bytes(runs_dir / EXPORTS_FILE, runs_dir, LARGEST_FILE)
    except OSError:
        return []
    found: dict[str, NotedExport] = {}
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            noted = _decode(line)
            if noted.run == run_id:
                found[noted.path] = noted
    newest = sorted(found.values(), key=lambda noted: noted.time, reverse=True)
    return [noted for noted in newest if Path(noted.path).is_dir()]

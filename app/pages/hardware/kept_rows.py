"""The rows of known machines are kept in files, since those of one table take a core for a minute.

They depend on nothing of this machine: on the settings, the models, the figures of the known
machine, and the code that plans. Each file is named by a digest of these, in the folder `tables` of
the cache folder. A file that is damaged, unreadable or of another form counts as missing. If the
folder cannot be written to, nothing is kept.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine import safe_files
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.files import code_digest
from engine.machine import known_machines
from engine.paths import cache_folder
from engine.planning.fit.model_table import Cell, Column, Row
from engine.planning.shape import catalog as models

ROOMS = ("config", "machine", "planning")
"""The code of these packages and the single files of the engine decide a row: all that planning
imports.
"""
MOST_FILES = 100
_MOST_BYTES = 1 << 20
_OURS = re.compile(r"[0-9a-f]{64}\.json|\..+")


@dataclass(frozen=True)
class _Kept:
    """A row, with the id of its model."""

    model: str
    parameters: int
    active_parameters: int
    trained_parameters: int
    whole_parameters: int
    cell: Cell


def rows_with_files(
    config: TrainConfig,
    any_optimizer: bool,
    column: Column,
    timed: bool,
    compute: Callable[[], Iterable[Row]],
) -> list[Row]:
    """Returns the rows of one machine, from their file if there is one. `compute` returns them
    otherwise, and always for this machine.
    """
    sources = _first_sources()
    if column.machine.here or sources is None:
        return list(compute())
    deciding = [config.to_dict(), any_optimizer, repr(column), timed, sources]
    key = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()
    rows = _read(key)
    if rows is None:
        rows = list(compute())
        _keep(key, rows)
    return rows


def _read(key: str) -> list[Row] | None:
    try:
        file = _file(key)
        kept = safe_files.read_json(file, file.parent, list[_Kept], _MOST_BYTES)
    except (OSError, RuntimeError, RamstreamError):
        return None
    rows = []
    for each in kept:
        entry = models.entry_of(each.model)
        if entry is None:
            return None
        rows.append(Row(entry, *_counts(each), (each.cell,)))
    return rows


def _counts(row: Row | _Kept) -> tuple[int, int, int, int]:
    parts = row.trained_parameters, row.whole_parameters
    return (row.parameters, row.active_parameters, *parts)


def _keep(key: str, rows: list[Row]) -> None:
    """Writes the file of these rows atomically, unless the code was edited since this process read
    it.
    """
    kept = [_Kept(row.entry.id, *_counts(row), row.cells[0]) for row in rows]
    try:
        if _sources() != _first_sources():
            return
        file = _file(key)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        safe_files.write_whole(file, msgspec.json.encode(kept), file.parent, durable=False)
        safe_files.remove_oldest(file.parent, _OURS, MOST_FILES)
    except (OSError, RuntimeError):
        return


def _file(key: str) -> Path:
    """Returns the file for a key. Raises RuntimeError if the user has no home folder."""
    return cache_folder() / "tables" / f"{key}.json"


def _sources() -> list[str] | None:
    """Returns digests of the code, the models and the known machines, or None if they cannot be
    read.
    """
    try:
        files = [file.read_bytes() for file in (models.FILE, known_machines.FILE)]
        return [code_digest(ROOMS), *(hashlib.sha256(content).hexdigest() for content in files)]
    except OSError:
        return None


@functools.cache
def _first_sources() -> list[str] | None:
    """Returns the digests of what this process runs and reads."""
    return _sources()

"""The rows of known machines are kept in files, since those of one table take a core for a minute.

They depend on nothing of this machine: on the settings, the models, the figures of the known
machine, and the code that plans. A file that is damaged or of another form counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from engine.config.settings import TrainConfig
from engine.files import code_digest
from engine.kept_files import KeptFiles
from engine.machine import known_machines
from engine.planning.fit.model_table import Cell, Column, Row
from engine.planning.shape import catalog as models

ROOMS = ("config", "machine", "planning")
"""The code of these packages and the single files of the engine decide a row: all that planning
imports.
"""
MOST_FILES = 100


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
    files = _files()
    key = files.key([config.to_dict(), any_optimizer, repr(column), timed])
    if column.machine.here or key is None:
        return list(compute())
    rows = _rows_in(files.read(key))
    if rows is None:
        rows = list(compute())
        kept = [_Kept(row.entry.id, *_counts(row), row.cells[0]) for row in rows]
        files.keep(key, msgspec.json.encode(kept))
    return rows


def _rows_in(content: bytes | None) -> list[Row] | None:
    """Returns the rows in the content of a file; None where there are none."""
    if content is None:
        return None
    try:
        kept = msgspec.json.decode(content, type=list[_Kept])
    except (ValueError, RecursionError):
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


@functools.cache
def _files() -> KeptFiles:
    return KeptFiles("tables", MOST_FILES, _sources)


def _sources() -> list[str]:
    """Returns digests of the code, the models and the known machines."""
    files = [file.read_bytes() for file in (models.FILE, known_machines.FILE)]
    return [code_digest(ROOMS), *(hashlib.sha256(content).hexdigest() for content in files)]

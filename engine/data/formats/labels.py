"""Marks of a column for the answer of its row: good or bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.data.formats.values import listed, parsed_json, shown
from engine.data.sources.json_files import Row
from engine.errors import DataError

_NAMES = ("label", "kto_tag")
_SHORT = 8
"""Largest number of characters of a mark that is written as text."""


def label_of(names: Mapping[str, Any], used: Mapping[str, str], source: str) -> str:
    """Returns the column that marks answers, among the columns `names` of which `used` are parts of
    an example. Raises DataError if there is none.
    """
    found = [name for name in names if name.lower() in _NAMES and name not in used.values()]
    if found:  # whatever the order in which rows have them
        return min(found, key=lambda name: (_NAMES.index(name.lower()), name))
    raise DataError(
        f"{source} has the columns {listed(names)} and none that marks answers as good or bad; add "
        "a column label of true and false, or set train.objective to sft."
    )


def is_desirable(row: Row, column: str, where: str) -> bool:
    """Returns whether the row marks its answer as good. Raises DataError for anything but true and
    false, or 1 and 0.
    """
    value = row.get(column)
    if isinstance(value, str) and len(value) <= _SHORT:  # a cell of a table
        value = parsed_json(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"The column {column} in {where} is {shown(row.get(column))}; write true for a good answer "
        "and false for a bad one."
    )

"""Tables of text (.csv, .tsv) are read. What stands between their cells is detected."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import DataError
from engine.sources.bounded_lines import text_lines
from engine.sources.kinds import suffixes_of
from engine.sources.reading import told
from engine.sources.text_files import TURN_COLUMNS

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""These characters may stand between cells; each has its name in the plural."""
_LONGEST_CELL = 1 << 30
_LINES_LOOKED_AT = 200
_CHARACTERS_LOOKED_AT = 1 << 18
_SEPARATOR_LINE = re.compile(r"\s*\"?sep=(.)\"?\s*")
"""Excel writes such a line before the header, and hides it."""


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a table and yields (row from 1, cells by the header's names). An empty cell becomes an
    empty text. A JSON list in a column of turns or tools is parsed. Raises DataError for a row with
    too many or too few cells.
    """
    csv.field_size_limit(_LONGEST_CELL)
    delimiter = delimiter_of(path)
    number = 0
    with told(path.name, lambda: f"row {number}"):
        lines = csv.reader(_without_separator_line(path), delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(lines, [])]
        refuse_equal_names(header, path.name)
        for cells in lines:
            if not cells:  # a blank line
                continue
            number += 1
            if len(cells) != len(header):
                raise DataError(
                    f"Row {number} of {path.name} has {len(cells)} cells, but the header names "
                    f"{len(header)} columns (with {DELIMITERS[delimiter]} between the cells); put "
                    f"texts with {DELIMITERS[delimiter]} or line ends in double quotes."
                )
            yield number, {name: cell_value(name, text) for name, text in zip(header, cells)}


def delimiter_of(path: Path) -> str:
    """Returns the character between the cells of a table. It is the one that divides the header and
    divides most rows into as many cells; if none does, the one that the file's name says.
    """
    usual = usual_delimiter(path)
    looked_at = list(_first_lines(path))
    separator = _SEPARATOR_LINE.fullmatch(looked_at[0]) if looked_at else None
    if separator is not None and separator[1] in DELIMITERS:
        return separator[1]
    best, most = usual, (0.0, False, 0)
    for delimiter in DELIMITERS:
        rows = _parsed(looked_at, delimiter)
        columns = len(rows[0]) if rows else 0
        if columns < 2:
            continue
        alike = sum(len(row) == columns for row in rows[1:]) / max(1, len(rows) - 1)
        if (alike, delimiter == usual, columns) > most:
            best, most = delimiter, (alike, delimiter == usual, columns)
    return best


def usual_delimiter(path: Path) -> str:
    """Returns the character between cells that the file's name says."""
    return "\t" if suffixes_of(path)[0] == ".tsv" else ","


def refuse_equal_names(header: list[str], file: str) -> None:
    """Raises DataError if two columns of a table have the same name."""
    seen: set[str] = set()
    for name in header:
        if name in seen:
            raise DataError(
                f"The header of {file} names the column {name or '(empty)'} twice; give every "
                "column a name of its own."
            )
        seen.add(name)


def _first_lines(path: Path) -> Iterator[str]:
    characters = 0
    for _, line in itertools.islice(text_lines(path), _LINES_LOOKED_AT):
        characters += len(line)
        yield line
        if characters > _CHARACTERS_LOOKED_AT:
            return


def _parsed(lines: Iterable[str], delimiter: str) -> list[list[str]]:
    """Returns the cells of the rows that are whole in `lines`."""
    rows: list[list[str]] = []
    # An error means that the last row goes on, or that quotes are meant otherwise.
    with contextlib.suppress(csv.Error):
        rows.extend(csv.reader(lines, delimiter=delimiter, strict=True))
    return [row for row in rows if row]


def _without_separator_line(path: Path) -> Iterator[str]:
    for number, line in text_lines(path):
        if number > 1 or not _SEPARATOR_LINE.fullmatch(line):
            yield line


def cell_value(name: str, text: str) -> Any:
    """Returns the value of a cell, which is its text, or a list for turns and tools that are
    written as JSON.
    """
    if name in (*TURN_COLUMNS, "tools") and text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text

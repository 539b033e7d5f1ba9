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

from engine.data.sources.bounded_lines import LONGEST_LINE, text_lines
from engine.data.sources.kinds import suffixes_of
from engine.data.sources.reading import errors_with_place
from engine.data.sources.text_files import TURN_COLUMNS
from engine.errors import DataError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""Characters that may stand between cells; each has its name in the plural."""
_LINES_READ = 200
_CHARACTERS_READ = 1 << 18
_SEPARATOR_LINE = re.compile(r"\s*\"?sep=(.)\"?\s*")
"""Line that Excel writes before the header, and hides."""


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a table and yields (row from 1, cells by the header's names). An empty cell becomes an
    empty text. A JSON list in a column of turns or tools is parsed. Raises DataError for a row with
    too many or too few cells, and for one that is longer than a line may be.
    """
    csv.field_size_limit(LONGEST_LINE)  # for all tables of the process
    delimiter = delimiter_of(path)
    number = 0
    with errors_with_place(path.name, lambda: f"row {number}"):
        lines = _LinesOfRows(path, delimiter)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(rows, [])]
        refuse_equal_names(header, path.name)
        lines.begin_row()
        for cells in rows:
            lines.begin_row()
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


class _LinesOfRows:
    """The lines of a table, of which one row has a limited number of characters: behind a double
    quote that never ends, the rest of the file would be one cell.
    """

    def __init__(self, path: Path, delimiter: str):
        self._path = path
        self._delimiter = delimiter
        self._first = 0
        self._begin: list[str] = []
        """The first lines of the row."""
        self._length = 0

    def begin_row(self) -> None:
        """Marks the next line as the first of a row."""
        self._begin.clear()
        self._length = 0

    def __iter__(self) -> Iterator[str]:
        begin = self._begin
        for number, line in text_lines(self._path):
            if number == 1 and _SEPARATOR_LINE.fullmatch(line):
                continue
            if not begin:
                self._first = number
            self._length += len(line)
            if len(begin) < _LINES_READ:
                begin.append(line)
            if self._length > LONGEST_LINE:
                raise self._too_long()
            yield line

    def _too_long(self) -> DataError:
        """Returns the error for the row that has been read so far."""
        # Not strict: a quote that is open ends with the lines.
        cells = next(csv.reader(self._begin, delimiter=self._delimiter), [])
        longest = max(range(len(cells)), key=lambda place: len(cells[place]), default=0)
        return DataError(
            f"The row of {self._path.name} that begins in line {self._first:,} is longer than "
            f"{LONGEST_LINE / 2**20:g} MiB, most of it in column {longest + 1:,}; end the double "
            "quote that begins there, or divide the row."
        )


def delimiter_of(path: Path) -> str:
    """Returns the character between the cells of a table. It is the one that divides the header and
    divides most rows into as many cells; if none does, the one of the file's name.
    """
    usual = usual_delimiter(path)
    first_lines = list(_first_lines(path))
    separator = _SEPARATOR_LINE.fullmatch(first_lines[0]) if first_lines else None
    if separator is not None and separator[1] in DELIMITERS:
        return separator[1]
    best, most = usual, (0.0, False, 0)
    for delimiter in DELIMITERS:
        rows = _parsed(first_lines, delimiter)
        columns = len(rows[0]) if rows else 0
        if columns < 2:
            continue
        alike = sum(len(row) == columns for row in rows[1:]) / max(1, len(rows) - 1)
        if (alike, delimiter == usual, columns) > most:
            best, most = delimiter, (alike, delimiter == usual, columns)
    return best


def usual_delimiter(path: Path) -> str:
    """Returns the character between cells that the file's name implies."""
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
    for _, line in itertools.islice(text_lines(path), _LINES_READ):
        characters += len(line)
        yield line
        if characters > _CHARACTERS_READ:
            return


def _parsed(lines: Iterable[str], delimiter: str) -> list[list[str]]:
    """Returns the cells of the rows that are whole in `lines`."""
    rows: list[list[str]] = []
    # An error means that the last row continues, or that quotes are meant otherwise.
    with contextlib.suppress(csv.Error):
        rows.extend(csv.reader(lines, delimiter=delimiter, strict=True))
    return [row for row in rows if row]


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

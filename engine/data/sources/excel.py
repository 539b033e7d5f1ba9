"""Sheets of Excel (.xlsx) are read row by row, each cell as the text that Excel shows."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.data.sources.bounded_lines import LONGEST_LINE
from engine.data.sources.json_files import Row
from engine.data.sources.open_text import open_bytes
from engine.data.sources.sheet_xml import MOST_BLANK, MOST_ROWS, Parts
from engine.data.sources.tables import cell_value, refuse_equal_names
from engine.errors import DataError, first_line

MOST_COLUMNS = 16_384
"""Columns of a sheet, as in Excel."""
_PLAIN_NUMBER = re.compile(r"(#,##)?0(?:\.(0+))?(%)?")
_Cells = list[str]


def sheet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Reads the first sheet with rows and yields (row as Excel counts, cells by the header's
    names). Blank rows are not rows. Raises DataError for a row with more cells than the header.
    """
    number = 1
    with _workbook(path) as workbook:
        rows = workbook.with_rows()[1]
        number, header = next(rows, (1, []))
        refuse_equal_names(header, path.name)
        for number, cells in rows:
            if len(cells) > len(header):
                raise DataError(
                    f"Row {number} of {path.name} has {len(cells)} cells, but the header names "
                    f"{len(header)} columns; name every column in the first row."
                )
            texts = itertools.zip_longest(header, cells, fillvalue="")
            yield number, {name: cell_value(name, text) for name, text in texts}


def sheet_note(path: Path) -> str | None:
    """Returns a sentence about which sheet is read, if there are several."""
    with _workbook(path) as workbook:
        if len(workbook.sheets) < 2:
            return None
        read, _ = workbook.with_rows()
        return f"Of the {len(workbook.sheets)} sheets of {path.name}, only {read} is read."


@contextlib.contextmanager
def _workbook(path: Path) -> Iterator[_Workbook]:
    """Opens a file of Excel. Raises DataError for whatever is wrong with it."""
    with open_bytes(path, ".xlsx") as file:
        try:
            with Parts(file, path.name) as parts:
                yield _Workbook(parts, path.name)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  openpyxl raises errors of many libraries
            raise DataError(
                f"{path.name} cannot be read as a file of Excel ({first_line(error)}); save it "
                "again, or as .csv."
            ) from None


class _Workbook:
    """The sheets of a file. openpyxl reads their names, the styles and the cells."""

    def __init__(self, parts: Parts, name: str):
        from openpyxl.reader.excel import SHARED_STRINGS, ExcelReader
        from openpyxl.styles.stylesheet import apply_stylesheet

        self._parts = parts
        self._name = name
        reader = ExcelReader(parts.fp, read_only=True, data_only=True, keep_links=False)
        reader.archive = parts
        reader.read_manifest()
        reader.read_workbook()
        apply_stylesheet(parts, reader.wb)
        self._book = reader.wb
        texts = reader.package.find(SHARED_STRINGS)
        self._texts = [] if texts is None else parts.texts(texts.PartName[1:])
        there = set(parts.namelist())
        self.sheets = [
            (sheet.name, found.target)
            for sheet, found in reader.parser.find_sheets()
            if found.target in there and "chartsheet" not in found.Type
        ]
        """The name and the part of each sheet."""
        if not self.sheets:
            raise ValueError("it has no sheets")

    def with_rows(self) -> tuple[str, Iterator[tuple[int, _Cells]]]:
        """Returns the first sheet with a row under its header, or else the first sheet: its name,
        and its rows with text.
        """
        found = self.sheets[0]
        if len(self.sheets) > 1:
            blank = _Blank(self._name)
            for sheet in self.sheets:
                rows = self._filled(sheet[1], blank)
                next(rows, None)
                if next(rows, None) is not None:
                    found = sheet
                    break
        return found[0], self._filled(found[1], _Blank(self._name))

    def _filled(self, part: str, blank: _Blank) -> Iterator[tuple[int, _Cells]]:
        """Yields (row from 1, cells up to the last one with text) of the rows with text."""
        from openpyxl.cell.read_only import ReadOnlyCell
        from openpyxl.worksheet._reader import WorkSheetParser

        book = self._book
        parser = WorkSheetParser(
            None,
            self._texts,
            data_only=True,
            epoch=book.epoch,
            date_formats=book._date_formats,
            timedelta_formats=book._timedelta_formats,
        )
        sheet = types.SimpleNamespace(parent=book)
        for size, node in self._parts.row_nodes(part):
            number, cells = parser.parse_row(node)
            parser.row_dimensions.clear()
            texts: dict[int, str] = {}
            for cell in cells:
                if cell["value"] is not None:
                    text = _text(ReadOnlyCell(sheet, **cell))
                    if text.strip():
                        texts[cell["column"]] = text
            if not texts:
                blank.add(size, number)
                continue
            blank.end()
            self._refuse_beyond(number, texts)
            last = max(texts)
            yield number, [texts.get(column, "") for column in range(1, last + 1)]

    def _refuse_beyond(self, number: int, texts: dict[int, str]) -> None:
        """Raises DataError for a row that no table has."""
        last = max(texts)
        if number > MOST_ROWS or last > MOST_COLUMNS:
            raise DataError(
                f"Row {number:,} of {self._name} has text in column {last:,}, and a sheet has at "
                f"most {MOST_ROWS:,} rows and {MOST_COLUMNS:,} columns; write the table again."
            )
        if sum(map(len, texts.values())) > LONGEST_LINE:
            longest = max(texts, key=lambda column: len(texts[column]))
            raise DataError(
                f"Row {number:,} of {self._name} has more than {LONGEST_LINE >> 20} MiB of text, "
                f"most of it in column {longest:,}; divide it."
            )


class _Blank:
    """How much of a file was read since the last row with text."""

    def __init__(self, name: str):
        self._bytes = 0
        self._name = name

    def end(self) -> None:
        """Counts from 0 again, behind a row with text."""
        self._bytes = 0

    def add(self, size: int, number: int) -> None:
        """Counts a blank row. Raises DataError after too many."""
        self._bytes += size
        if self._bytes > MOST_BLANK:
            raise DataError(
                f"{self._name} has {MOST_BLANK >> 20} MiB of blank cells up to row {number:,}; "
                "delete the blank rows and columns around the table, or save it as .csv."
            )


def _text(cell: Any) -> str:
    """Returns what Excel shows of a cell, as nearly as its common formats need."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return _number(value, cell.number_format)
    if isinstance(value, dt.datetime):
        is_date = value.time() == dt.time()
        return value.date().isoformat() if is_date else value.isoformat(" ", "seconds")
    return str(value)


def _number(value: float, number_format: str) -> str:
    plain = _PLAIN_NUMBER.fullmatch(number_format or "")
    if plain is None:
        return str(value) if isinstance(value, int) else f"{value:.15g}"
    thousands, decimals, percent = plain.groups()
    shown = value * 100 if percent else value
    return f"{shown:{',' if thousands else ''}.{len(decimals or '')}f}{percent or ''}"

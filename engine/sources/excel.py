"""Sheets of Excel (.xlsx) are read row by row, each cell as the text that Excel shows."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import DataError, first_line
from engine.sources.json_files import Row
from engine.sources.open_text import open_bytes
from engine.sources.tables import cell_value, refuse_equal_names

_LARGEST_SHEET = 1 << 30
_LARGEST_PART = 256 << 20
"""Parts of a file that are no sheets are read into memory, such as the texts of all cells."""
_PLAIN_NUMBER = re.compile(r"(#,##)?0(?:\.(0+))?(%)?")
_Cells = list[str]


def sheet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Reads the first sheet with rows and yields (row as Excel counts, cells by the header's
    names). Blank rows are not rows. Raises DataError for a row with more cells than the header.
    """
    number = 1
    with _workbook(path) as workbook:
        rows = _filled(_sheet_with_rows(workbook))
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
        sheets = [sheet.title for sheet in workbook.worksheets]
        if len(sheets) < 2:
            return None
        read = _sheet_with_rows(workbook).title
        return f"Of the {len(sheets)} sheets of {path.name}, only {read} is read."


@contextlib.contextmanager
def _workbook(path: Path) -> Iterator[Any]:
    """Opens a file of Excel. Raises DataError for whatever is wrong with it."""
    import openpyxl

    with open_bytes(path, ".xlsx") as file:
        workbook = None
        try:
            _refuse_large_parts(file, path.name)
            workbook = openpyxl.load_workbook(file, read_only=True, data_only=True)
            yield workbook
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  openpyxl raises errors of many libraries
            raise DataError(
                f"{path.name} cannot be read as a file of Excel ({first_line(error)}); save it "
                "again, or as .csv."
            ) from None
        finally:
            if workbook is not None:
                workbook.close()


def _refuse_large_parts(file: Any, name: str) -> None:
    with zipfile.ZipFile(file) as parts:
        for part in parts.infolist():
            is_sheet = part.filename.startswith("xl/worksheets/")
            if part.file_size > (_LARGEST_SHEET if is_sheet else _LARGEST_PART):
                raise DataError(
                    f"{name} is too large for a file of Excel ({part.filename} unpacks to "
                    f"{part.file_size >> 20:,} MiB); save it as .csv."
                )


def _sheet_with_rows(workbook: Any) -> Any:
    """Returns the first sheet with a row under its header, or else the first sheet."""
    sheets = workbook.worksheets
    if not sheets:
        raise ValueError("it has no sheets")
    for sheet in sheets:
        rows = _filled(sheet)
        next(rows, None)
        if next(rows, None) is not None:
            return sheet
    return sheets[0]


def _filled(sheet: Any) -> Iterator[tuple[int, _Cells]]:
    """Yields (row from 1, cells up to the last one with text) of the rows with text."""
    sheet.reset_dimensions()  # a wrong size in the file would hide cells
    for number, row in enumerate(sheet.iter_rows(), 1):
        cells = [_text(cell) for cell in row]
        while cells and not cells[-1].strip():
            cells.pop()
        if cells:
            yield number, cells


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

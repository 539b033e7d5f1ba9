"""Rows of files that are no JSON: tables of text (.csv, .tsv) and plain text (.txt, .md)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import DataError

TURN_COLUMNS = ("messages", "conversations", "conversation")
"""Columns that hold the turns of a conversation."""
CHARACTERS_A_TOKEN = 3
"""A passage of a text file has this many characters for each token of a row."""
_LONGEST_LINE = 1 << 20
_LONGEST_CELL = 1 << 30


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(Row from 1, cells by the header's names). An empty cell is an empty text; JSON in a column
    of turns or tools is read. Raises DataError for a row with too many or too few cells.
    """
    csv.field_size_limit(_LONGEST_CELL)
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = csv.reader(
                file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
            )
            header = [name.strip() for name in next(cells, [])]
            twice = next((name for name in header if header.count(name) > 1), None)
            if twice is not None:
                raise DataError(
                    f"The header of {path.name} names the column {twice or '(empty)'} twice; give "
                    "every column a name of its own."
                )
            for row in cells:
                if not row:
                    continue
                number += 1
                if len(row) != len(header):
                    raise DataError(
                        f"Row {number} of {path.name} has {len(row)} cells, but the header names "
                        f"{len(header)} columns; put texts with commas or line ends in double "
                        "quotes."
                    )
                yield number, {name: _cell(name, value) for name, value in zip(header, row)}
    except UnicodeDecodeError:
        raise DataError(
            f"{path.name} is not UTF-8 text after row {number}; save the file as UTF-8."
        ) from None
    except csv.Error as error:
        raise DataError(
            f"{path.name} cannot be read after row {number} ({error}); put texts with commas or "
            "line ends in double quotes."
        ) from None


def _cell(name: str, value: str) -> Any:
    if name in (*TURN_COLUMNS, "tools") and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def passages(path: Path, max_seq_len: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(First line, {text}) of each passage: whole paragraphs (blank lines divide them), as many as
    make about a row of `max_seq_len` tokens. A longer paragraph is a passage of its own.
    """
    most = max_seq_len * CHARACTERS_A_TOKEN
    passage, paragraph = "", ""
    begin = paragraph_begin = 1
    try:
        with path.open(encoding="utf-8-sig") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if line.strip():
                    paragraph_begin = paragraph_begin if paragraph else number
                    paragraph += line
                    if len(paragraph) < _LONGEST_LINE:
                        continue
                if passage and len(passage) + len(paragraph) > most:
                    yield begin, {"text": passage.rstrip("\n")}
                    passage = ""
                if paragraph:
                    begin = begin if passage else paragraph_begin
                    passage += paragraph + "\n"
                    paragraph = ""
            if passage and len(passage) + len(paragraph) > most:
                yield begin, {"text": passage.rstrip("\n")}
                passage = ""
            begin = begin if passage else paragraph_begin
            if (passage + paragraph).strip():
                yield begin, {"text": (passage + paragraph).rstrip("\n")}
    except UnicodeDecodeError:
        raise DataError(f"{path.name} is not UTF-8 text; save the file as UTF-8.") from None

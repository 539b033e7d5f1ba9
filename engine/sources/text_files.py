"""These functions read tables (.csv, .tsv) and plain text (.txt, .md)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from engine.errors import DataError

TURN_COLUMNS = ("messages", "conversations", "conversation")
"""Columns with these names hold the turns of a conversation."""
CHARACTERS_A_TOKEN = 3
"""A passage from a text file has about this many characters per token of a row."""
_LONGEST_LINE = 1 << 20
_LONGEST_CELL = 1 << 30


# ---------------------------------------------------------------------- tables


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a table and yields (row from 1, cells by the header's names). An empty cell becomes an
    empty text. A JSON list in a column of turns or tools is parsed. Raises DataError for a row with
    too many or too few cells.
    """
    csv.field_size_limit(_LONGEST_CELL)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(lines, [])]
            _refuse_equal_names(header, path.name)
            for cells in lines:
                if not cells:  # a blank line
                    continue
                number += 1
                if len(cells) != len(header):
                    raise DataError(
                        f"Row {number} of {path.name} has {len(cells)} cells, but the header names "
                        f"{len(header)} columns; put texts with commas or line ends in double "
                        "quotes."
                    )
                yield number, {name: _cell(name, text) for name, text in zip(header, cells)}
    except UnicodeDecodeError:
        raise DataError(
            f"{path.name} is not UTF-8 text after row {number}; save the file as UTF-8."
        ) from None
    except csv.Error as error:
        raise DataError(
            f"{path.name} cannot be read after row {number} ({error}); put texts with commas or "
            "line ends in double quotes."
        ) from None


def _refuse_equal_names(header: list[str], file: str) -> None:
    for name in header:
        if header.count(name) > 1:
            raise DataError(
                f"The header of {file} names the column {name or '(empty)'} twice; give every "
                "column a name of its own."
            )


def _cell(name: str, text: str) -> Any:
    if name in (*TURN_COLUMNS, "tools") and text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


# ---------------------------------------------------------------------- plain text


def passages(path: Path, max_seq_len: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Divides a plain text into passages and yields (first line, {text}) for each. A passage
    consists of whole paragraphs, as many as fill about one row of `max_seq_len` tokens. Blank lines
    separate paragraphs. A paragraph longer than that is a separate passage.
    """
    most = max_seq_len * CHARACTERS_A_TOKEN
    passage = ""
    begin = 1
    try:
        with path.open(encoding="utf-8-sig") as file:
            for paragraph_begin, paragraph in _paragraphs(file):
                if passage and len(passage) + len(paragraph) > most:
                    yield begin, {"text": passage.rstrip("\n")}
                    passage = ""
                if not passage:
                    begin = paragraph_begin
                passage += paragraph + "\n"
        if passage.strip():
            yield begin, {"text": passage.rstrip("\n")}
    except UnicodeDecodeError:
        raise DataError(f"{path.name} is not UTF-8 text; save the file as UTF-8.") from None


def _paragraphs(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yields (first line, text) of each paragraph. A paragraph is cut at `_LONGEST_LINE`
    characters, to limit memory for a file without blank lines.
    """
    paragraph = ""
    begin = number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        is_blank = not line.strip()
        if not is_blank:
            if not paragraph:
                begin = number
            paragraph += line
        if paragraph and (is_blank or len(paragraph) >= _LONGEST_LINE):
            yield begin, paragraph
            paragraph = ""
    if paragraph:
        yield begin, paragraph

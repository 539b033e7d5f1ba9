"""A batch of rows as tokens. This process and helper processes (`workers.py`) use the same
functions, so that both make the same tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.data.formats.example import Example, Text
from engine.data.formats.formats import ColumnMap
from engine.data.formats.values import BrokenText, legible
from engine.data.sources.open_source import Row, Source
from engine.data.sources.text_files import Passage
from engine.data.tokens.documents import AcceptedExample, Document, Documents, TextRows
from engine.data.tokens.encode import Encoder
from engine.data.tokens.rendered import RejectedExample
from engine.data.tokens.text_tokens import no_pause
from engine.errors import DataError

Numbered = tuple[int, Row, str]
"""A row's number, the row, and its place as an error names it."""

# A batch ends at this many rows or this many characters, because the temporary memory of tokenizing
# grows with both.
_ROWS = 512
_CHARACTERS = 1 << 18
_LONG_TEXT = 1 << 21
"""A text of so many characters is tokenized in the threads of one process and not in those of
helper processes, of which each has one.
"""
MOST_COLUMNS = 4096
"""Columns of a row."""
_DEEPEST = 100
"""Largest number of levels of lists and objects of a row."""


@dataclass(frozen=True)
class Encoded:
    """Encoded batch of flat arrays, which are fast to send between processes."""

    documents: Documents
    answers: np.ndarray
    """Token range of the answer in the last document of each row, or (0, 0) without an answer:
    int64[rows, 2].
    """
    cut: int
    """Number of rows that were cut to max_seq_len."""
    skipped: list[tuple[int, RejectedExample]]
    """The skipped rows, as pairs of index in the batch and reason."""
    warnings: Counter[str]


def numbered_rows(source: Source) -> Iterator[Numbered]:
    """Reads all rows of `source` in order. Raises DataError for a row that is nested too deeply for
    what reads it later, and for one with more than `MOST_COLUMNS` columns.
    """
    for number, row in source.read():
        where = source.where(number)
        if not isinstance(row, Passage):
            _check_columns(row, where)
            _check_depth(row, where)
        yield number, row, where


def row_batches(source: Source) -> Iterator[list[Numbered]]:
    """Reads all rows of `source` in order and yields them in batches."""
    batch: list[Numbered] = []
    characters = 0
    for numbered in numbered_rows(source):
        batch.append(numbered)
        characters += _characters(numbered[1])
        if len(batch) == _ROWS or characters >= _CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def has_long_text(columns: ColumnMap, batch: list[Numbered]) -> bool:
    """Returns whether the last row of a batch has a plain text that takes seconds to tokenize."""
    return columns.format == "text" and _characters(batch[-1][1]) >= _LONG_TEXT


def _check_columns(row: Row, where: str) -> None:
    if len(row) > MOST_COLUMNS:
        raise DataError(
            f"{where[:1].upper()}{where[1:]} has {len(row):,} columns, and a row has at most "
            f"{MOST_COLUMNS:,}; keep those to train on, and put numbers that belong together into "
            "a list."
        )


def _check_depth(row: Row, where: str) -> None:
    inside: list[Any] = [row]
    for _ in range(_DEEPEST):
        inside = list(itertools.chain.from_iterable(map(_items, inside)))
        if not inside:
            return
    raise DataError(f"The row of {where} is nested too deeply; write it with fewer levels.")


def _items(value: Any) -> Iterable[Any]:
    """Returns the values in a value that have values in them."""
    found = value.values() if isinstance(value, dict) else value
    return [item for item in found if isinstance(item, dict | list)]


def _characters(value: Any) -> int:
    """Returns the number of characters in all texts of a value, however deeply nested."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Passage):
        return len(value["text"])
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return 0


def example_of(columns: ColumnMap, row: Row, where: str) -> Example | RejectedExample:
    """Reads a row as an example, or returns why it is skipped. Raises DataError as
    `ColumnMap.example` does.
    """
    if isinstance(row, Passage):
        return Text(row["text"], row.before, row.after)
    try:
        example = columns.example(row, where)
    except BrokenText:
        return RejectedExample("the text is not valid Unicode")
    if example is None:
        return RejectedExample("the row is empty")
    return example


def encode_rows(
    encoder: Encoder,
    columns: ColumnMap,
    rows: Iterable[Numbered],
    pause: Callable[[], None] = no_pause,
) -> list[AcceptedExample | RejectedExample]:
    """Returns each row encoded, or the reason why it is skipped. `pause` is that of
    `Encoder.encode`. Raises DataError for a row because of which the data set is refused.
    """
    numbered = list(rows)
    read = [example_of(columns, row, where) for _, row, where in numbered]
    examples = [example for example in read if not isinstance(example, RejectedExample)]
    encoded = iter(encoder.encode(examples, pause))
    results: list[AcceptedExample | RejectedExample] = []
    for example, (_, _, where) in zip(read, numbered):
        found = example if isinstance(example, RejectedExample) else next(encoded)
        if isinstance(found, RejectedExample) and found.refused:
            raise DataError(f"{found.reason}, in {where}; {found.detail}.")
        results.append(found)
    return results


def encode_batch(
    encoder: Encoder,
    columns: ColumnMap,
    batch: list[Numbered],
    pause: Callable[[], None] = no_pause,
) -> Encoded:
    """Returns the batch as arrays. It takes over the warnings of the encoder's renderer. `pause` is
    that of `Encoder.encode`.
    """
    _refuse_other_columns(columns, batch)
    found = encode_rows(encoder, columns, batch, pause)
    return _as_arrays(found, encoder.renderer.take_warnings())


def divided(texts: TextRows, batch: list[Numbered], encoded: Encoded) -> Encoded:
    """Returns an encoded batch of plain texts with each text divided into rows."""
    flat = encoded.documents
    if not encoded.skipped and all(isinstance(row, Passage) and row.after for _, row, _ in batch):
        found_at_once = texts.of_passages(flat)
        if found_at_once is not None:
            return replace(encoded, documents=found_at_once)
    why = dict(encoded.skipped)
    ends = np.cumsum(flat.lengths).tolist()
    documents = iter(zip([0, *ends], ends))
    found: list[AcceptedExample | RejectedExample] = []
    for place, (_, row, _) in enumerate(batch):
        text: AcceptedExample | RejectedExample | None = why.get(place)
        if text is None:
            begin, end = next(documents)
            ids, loss_mask = flat.ids[begin:end], flat.loss_mask[begin:end]
            text = AcceptedExample(
                [Document(ids, loss_mask, None, len(ids))], cut=False, answer=None
            )
        found.append(texts.of_row(row, text))
    return _as_arrays(found, encoded.warnings)


def _as_arrays(rows: list[AcceptedExample | RejectedExample], warnings: Counter[str]) -> Encoded:
    documents: list[list[Document]] = []
    answers: list[tuple[int, int]] = []
    skipped: list[tuple[int, RejectedExample]] = []
    cut = 0
    for place, row in enumerate(rows):
        if isinstance(row, RejectedExample):
            skipped.append((place, row))
            documents.append([])
            answers.append((0, 0))
        else:
            cut += row.cut
            documents.append(row.documents)
            answers.append(row.answer or (0, 0))
    return Encoded(
        Documents.joined(documents),
        np.array(answers, np.int64).reshape(-1, 2),
        cut,
        skipped,
        warnings,
    )


def _refuse_other_columns(columns: ColumnMap, batch: list[Numbered]) -> None:
    """Raises DataError for a row with a column that was not there when the columns were found: a
    part of it may stand there, and would be lost.
    """
    known = columns.known_columns()
    if set().union(*(row for _, row, _ in batch)) <= known:
        return
    for _, row, where in batch:
        for name in row:
            if name not in known and isinstance(name, str):
                raise DataError(
                    f"The column {legible(name)} first appears in {where}, after the columns of "
                    "the data set were found; start again if the file was changed, or name it in "
                    "data.columns if it is used."
                )

"""Rows of a source to tokens, a batch at a time: what is done alike in this process and in others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data.encode import Documents, Encoder, Kept
from engine.data.formats import BrokenText, ColumnMap, Example
from engine.data.render import Skipped
from engine.data.sources import Row, Source

Numbered = tuple[int, Row, str]
"""A row with its number and, as an error names it, its place."""

_ROWS = 512
_CHARACTERS = 1 << 18
"""A batch ends when it has so many rows or so much text: what tokenising takes beside its result
grows with both.
"""


@dataclass(frozen=True)
class Encoded:
    """A batch as flat arrays, which are quickly sent from process to process."""

    documents: Documents
    answers: np.ndarray
    """int64[rows, 2]: token range of the answer in the last document of each row, 0 and 0 without
    one.
    """
    cut: int
    """Rows cut to max_seq_len."""
    skipped: list[tuple[int, Skipped]]
    """Places in the batch, and why."""
    warnings: Counter[str]


def row_batches(source: Source) -> Iterator[list[Numbered]]:
    """All rows of `source` in order."""
    batch: list[Numbered] = []
    characters = 0
    for number, row in source.read():
        batch.append((number, row, source.where(number)))
        characters += _characters(row)
        if len(batch) == _ROWS or characters >= _CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def example_of(columns: ColumnMap, row: Row, where: str) -> Example | Skipped:
    """What a row says. Raises DataError as `ColumnMap.example` does."""
    try:
        return columns.example(row, where) or Skipped("the row is empty")
    except BrokenText:
        return Skipped("the text is not valid Unicode")


def encode_rows(
    encoder: Encoder, columns: ColumnMap, rows: Iterable[Numbered]
) -> list[Kept | Skipped]:
    """What each row is trained as, or why it is skipped."""
    examples = [example_of(columns, row, where) for _, row, where in rows]
    found = iter(
        encoder.encode([example for example in examples if not isinstance(example, Skipped)])
    )
    return [example if isinstance(example, Skipped) else next(found) for example in examples]


def encode_batch(encoder: Encoder, columns: ColumnMap, batch: list[Numbered]) -> Encoded:
    """The batch as arrays. The renderer's warnings are taken from it."""
    found = encode_rows(encoder, columns, batch)
    kept = [None if isinstance(row, Skipped) else row for row in found]
    warnings = encoder.renderer.take_warnings()
    return Encoded(
        Documents.joined([row.documents if row else [] for row in kept]),
        np.array([(row and row.answer) or (0, 0) for row in kept], np.int64).reshape(-1, 2),
        sum(row is not None and row.cut for row in kept),
        [(place, row) for place, row in enumerate(found) if isinstance(row, Skipped)],
        warnings,
    )

"""Packing: which documents share a row of at most max_seq_len tokens.

- Documents are placed one by one, in a given order.
- Each goes into the row with the least free space that is still enough (best fit).
- A new row begins only when no row has enough space left.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

_DOCUMENTS_A_CHUNK = 1 << 16
"""Number of lengths at a time that are converted to Python integers, which take far more memory."""


@dataclass(frozen=True)
class Rows:
    """Documents of each row, in two flat arrays. They take 8 bytes per document and 8 per row."""

    documents: np.ndarray
    """The document numbers, row after row: int64[documents]."""
    starts: np.ndarray
    """First place of each row in `documents`: int64[rows + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        """Returns the numbers of the documents of row `i`."""
        return self.documents[self.starts[i] : self.starts[i + 1]]

    @property
    def packed(self) -> bool:
        """Whether a row has more than one document."""
        return len(self.documents) > len(self)


def one_each(documents: int) -> Rows:
    """Returns rows of one document each."""
    return Rows(np.arange(documents, dtype=np.int64), np.arange(documents + 1, dtype=np.int64))


def two_each(documents: int) -> Rows:
    """Returns rows of two documents each, in order: pairs."""
    return Rows(np.arange(documents, dtype=np.int64), np.arange(0, documents + 1, 2))


class _OpenRows:
    """Rows begun so far, indexed by the space that they have left."""

    def __init__(self, max_seq_len: int):
        self._max_seq_len = max_seq_len
        self._rows_by_space: dict[int, array[int]] = {}
        self._spaces: list[int] = []
        """The keys of `_rows_by_space`, sorted."""
        self.count = 0
        """The number of rows begun so far."""

    def take(self, length: int) -> int:
        """Puts a document of `length` tokens into the row with the best fit, and returns the number
        of that row.
        """
        rows_by_space, spaces = self._rows_by_space, self._spaces
        place = bisect_left(spaces, length)
        if place == len(spaces):  # no row has enough space, so a new one begins
            row, space = self.count, self._max_seq_len
            self.count += 1
        else:
            space = spaces[place]
            rows = rows_by_space[space]
            row = rows.pop()
            if not rows:
                del rows_by_space[space], spaces[place]
        left = space - length
        if left not in rows_by_space:
            rows_by_space[left] = array("q")
            insort(spaces, left)
        rows_by_space[left].append(row)
        return row


def pack(lengths: np.ndarray, max_seq_len: int, order: np.ndarray) -> Rows:
    """Packs documents into rows. `lengths` (int64[documents]) are from 1 to `max_seq_len`, and the
    documents are placed in `order` (int64[documents], document numbers).
    """
    row_of = np.empty(len(order), dtype=np.int64)
    open_rows = _OpenRows(max_seq_len)
    for begin in range(0, len(order), _DOCUMENTS_A_CHUNK):
        end = begin + _DOCUMENTS_A_CHUNK
        chunk = lengths[order[begin:end]].tolist()
        row_of[begin:end] = [open_rows.take(length) for length in chunk]
    starts = np.zeros(open_rows.count + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=open_rows.count), out=starts[1:])
    by_row = np.argsort(row_of, kind="stable")
    return Rows(order[by_row], starts)

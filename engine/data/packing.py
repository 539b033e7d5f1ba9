"""Which documents share a row of at most max_seq_len tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

_DOCUMENTS_A_PIECE = 1 << 16


@dataclass(frozen=True)
class Rows:
    """The documents of each row, in two flat arrays: 8 bytes a document and 8 a row."""

    documents: np.ndarray
    """int64[documents]: document numbers, row after row."""
    starts: np.ndarray
    """int64[rows + 1]: where each row starts in `documents`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        """Document numbers of row `i`."""
        return self.documents[self.starts[i] : self.starts[i + 1]]

    @property
    def packed(self) -> bool:
        """Whether a row has more than one document."""
        return len(self.documents) > len(self)


def one_each(documents: int) -> Rows:
    """Every document in a row of its own."""
    return Rows(np.arange(documents, dtype=np.int64), np.arange(documents + 1, dtype=np.int64))


def pack(lengths: np.ndarray, max_seq_len: int, order: np.ndarray) -> Rows:
    """Rows for documents of `lengths` (int64[documents], each from 1 to `max_seq_len`). Documents
    are taken in `order`; each goes into the row that it fills best, and a new row is begun only
    when none has space left.
    """
    row_of = np.empty(len(order), dtype=np.int64)
    rows = 0
    rows_by_space: dict[int, array] = {}
    spaces: list[int] = []  # the keys of rows_by_space, sorted
    for begin in range(0, len(order), _DOCUMENTS_A_PIECE):
        chosen = []
        for length in lengths[order[begin : begin + _DOCUMENTS_A_PIECE]].tolist():
            place = bisect_left(spaces, length)
            if place == len(spaces):
                space, row = max_seq_len, rows
                rows += 1
            else:
                space = spaces[place]
                row = rows_by_space[space].pop()
                if not rows_by_space[space]:
                    del rows_by_space[space], spaces[place]
            chosen.append(row)
            space -= length
            if space not in rows_by_space:
                rows_by_space[space] = array("q")
                insort(spaces, space)
            rows_by_space[space].append(row)
        row_of[begin : begin + _DOCUMENTS_A_PIECE] = chosen
    starts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=starts[1:])
    return Rows(order[np.argsort(row_of, kind="stable")], starts)

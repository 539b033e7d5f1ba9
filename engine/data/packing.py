"""Which documents share a row: first fit into rows of max_seq_len."""

from __future__ import annotations

import numpy as np

_OPEN_ROWS = 256
"""Rows that still take documents; with so many the fill is that of an unbounded first fit to a fraction of a percent."""


def pack(lengths: np.ndarray, max_seq_len: int, order: np.ndarray) -> list[list[int]]:
    """Rows of document numbers, each row at most max_seq_len tokens; documents are placed in `order`, each into the
    first open row that has room. When all are open and none has room, the fullest is closed."""
    rows: list[list[int]] = []
    room = np.zeros(_OPEN_ROWS, dtype=np.int64)
    row_of = np.zeros(_OPEN_ROWS, dtype=np.int64)
    open_rows = 0
    for document in order.tolist():
        length = int(lengths[document])
        fits = room[:open_rows] >= length
        place = int(fits.argmax()) if open_rows else 0
        if not open_rows or not fits[place]:
            if open_rows < _OPEN_ROWS:
                place, open_rows = open_rows, open_rows + 1
            else:
                place = int(room.argmin())
            row_of[place] = len(rows)
            room[place] = max_seq_len
            rows.append([])
        rows[row_of[place]].append(document)
        room[place] -= length
    return rows

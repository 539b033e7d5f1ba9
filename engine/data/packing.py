"""Which documents share a row of at most max_seq_len tokens."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, max_seq_len: int, order: np.ndarray) -> list[list[int]]:
    """Rows of document numbers. Documents are taken in `order`; each goes into the row that it fills best, and a new
    row is begun only when none has room."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, sorted
    for document, length in zip(order.tolist(), lengths[order].tolist()):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, row = max_seq_len, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(document)
        room -= length
        if room not in by_room:
            by_room[room] = []
            insort(rooms, room)
        by_room[room].append(row)
    return rows

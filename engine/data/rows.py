"""Rows of tokens and the micro-batches of any step, without state: a resumed run asks for its next
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.data.mapped import Visited, drop_pages, pieces
from engine.data.packing import Rows

IGNORED = -100
"""Label of a position without loss."""


@dataclass(frozen=True)
class Row:
    """One row, not padded."""

    input_ids: np.ndarray
    """int32[T]"""
    labels: np.ndarray
    """int32[T], already shifted: labels[t] is input_ids[t + 1] or -100, never across documents."""
    position_ids: np.ndarray
    """int32[T], from 0 in every document."""
    documents: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that pass through the model at once, right-padded to the longest; padding carries no
    loss.
    """

    input_ids: np.ndarray
    """int64[B, T]"""
    labels: np.ndarray
    """int64[B, T], already shifted, -100 = no loss."""
    position_ids: np.ndarray | None
    """int64[B, T], from 0 in every document, padding being one more document; None when no row is
    packed.
    """
    tokens: int
    """Tokens that are not padding."""
    loss_tokens: int


class RowSet:
    """Rows of a data set. Tokens stay in their files; memory holds some 40 bytes a document,
    however long it is.
    """

    def __init__(
        self,
        ids: np.ndarray | Visited,
        trained: np.ndarray | Visited,
        starts: np.ndarray,
        rows: Rows,
        pad_id: int,
        seed: int,
        shuffle: bool,
    ):
        self.ids = ids
        """int32: the documents' tokens, one after another; of a mix, they can be sliced but are
        never whole.
        """
        self.trained = trained
        """bool: the token is a target."""
        self.starts = starts
        """int64[documents + 1]: where each document starts in `ids`."""
        self.rows = rows
        """Document numbers of each row."""
        self.pad_id = pad_id
        lengths = np.diff(np.asarray(starts))
        self.row_lengths = (
            np.add.reduceat(lengths[rows.documents], rows.starts[:-1]) if len(rows) else lengths
        )
        """int64[rows]: tokens of each row."""
        self.packed = rows.packed
        self.seed = seed
        self.shuffle = shuffle
        self._last_order: tuple[tuple[int, int, bool], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def loss_tokens(self) -> int:
        return sum(int(np.count_nonzero(piece)) for piece in pieces(self.trained))

    @property
    def longest(self) -> int:
        """Tokens of the longest row, 0 without rows."""
        return int(self.row_lengths.max(initial=0))

    def row(self, i: int) -> Row:
        documents = self.rows[i]
        starts, ends = self.starts[documents], self.starts[documents + 1]
        pieces = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist())]
        ids = np.concatenate([self.ids[piece] for piece in pieces])
        trained = np.concatenate([self.trained[piece] for piece in pieces])
        ends_here = np.cumsum(ends - starts)
        labels = np.full(len(ids), IGNORED, dtype=np.int32)
        labels[:-1] = np.where(trained[1:], ids[1:], IGNORED)
        labels[ends_here - 1] = IGNORED  # what follows is another document's
        begins = np.repeat(ends_here - (ends - starts), ends - starts)
        return Row(ids, labels, (np.arange(len(ids)) - begins).astype(np.int32), len(documents))

    def row_length(self, i: int) -> int:
        """Tokens of row `i`."""
        return int(self.row_lengths[i])

    def order(self, epoch: int, seed: int | None = None, shuffle: bool | None = None) -> np.ndarray:
        """Row numbers in the order in which `epoch` (from 0) visits them: a function of seed and
        epoch alone.
        """
        key = (
            epoch,
            self.seed if seed is None else seed,
            self.shuffle if shuffle is None else shuffle,
        )
        cached = self._last_order
        if cached is not None and cached[0] == key:
            return cached[1]
        order = (
            np.random.default_rng(key[:2]).permutation(len(self))
            if key[2]
            else np.arange(len(self))
        )
        self._last_order = (key, order)
        return order

    def steps_of(self, epochs: float, batch_size: int) -> int:
        """Steps that `epochs` passes over the rows take, rounded up: the last one goes on into the
        next pass.
        """
        return max(1, math.ceil(round(len(self) * epochs, 6) / batch_size))


ROW_MULTIPLE = 128
"""Compiled kernels are made for a length: rows are padded to a multiple of so many tokens, so that
there are few.
"""


def padded_length(length: int, at_most: int) -> int:
    """Tokens of a row of `length` tokens that goes to compiled kernels; no more than `at_most`,
    which no row is beyond.
    """
    return max(length, min(-(-length // ROW_MULTIPLE) * ROW_MULTIPLE, at_most))


def batches(
    rows: RowSet,
    batch_size: int,
    micro_batch_size: int,
    seed: int,
    shuffle: bool,
    step: int,
    pad_up_to: int = 0,
) -> list[MicroBatch]:
    """The micro-batches of step `step` (from 1). Steps read the epochs' orders one after another,
    so each has exactly `batch_size` rows; within a step, rows of like length stand together, which
    saves padding. pad_up_to: for compiled kernels, tokens that padded rows may have at most.
    """
    first = (step - 1) * batch_size
    chosen = []
    for place in range(first, first + batch_size):
        epoch, within = divmod(place, len(rows))
        chosen.append(int(rows.order(epoch, seed, shuffle)[within]))
    if micro_batch_size < batch_size:
        chosen.sort(key=rows.row_length, reverse=True)
    bounds = micro_batch_bounds(batch_size, micro_batch_size)
    return [micro_batch(rows, chosen[start:stop], pad_up_to) for start, stop in bounds]


def micro_batch_bounds(batch_size: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of each micro-batch: as few of them as rows of at most
    `micro_batch_size` come to, as equal as can be, larger ones first.
    """
    count = -(-batch_size // micro_batch_size)
    size, more = divmod(batch_size, count)
    starts = [k * size + min(k, more) for k in range(count + 1)]
    return list(zip(starts, starts[1:]))


def one_pass(rows: RowSet, micro_batch_size: int) -> Iterator[MicroBatch]:
    """Every row once, in order, as evaluation reads them; the last micro-batch may be smaller."""
    for start in range(0, len(rows), micro_batch_size):
        yield micro_batch(rows, list(range(start, min(start + micro_batch_size, len(rows)))))


def micro_batch(rows: RowSet, chosen: list[int], pad_up_to: int = 0) -> MicroBatch:
    """The rows `chosen`, padded to the longest of them, or a little more (`padded_length`)."""
    parts = [rows.row(i) for i in chosen]
    length = padded_length(max(len(part.input_ids) for part in parts), pad_up_to)
    input_ids = np.full((len(parts), length), rows.pad_id, dtype=np.int64)
    labels = np.full((len(parts), length), IGNORED, dtype=np.int64)
    position_ids = np.zeros((len(parts), length), dtype=np.int64)
    tokens = 0
    for line, part in enumerate(parts):
        size = len(part.input_ids)
        input_ids[line, :size] = part.input_ids
        labels[line, :size] = part.labels
        position_ids[line, :size] = part.position_ids
        position_ids[line, size:] = np.arange(length - size)
        tokens += size
    packed = any(part.documents > 1 for part in parts)
    for array in (
        rows.ids,
        rows.trained,
    ):  # or the whole file would count as this process's memory in the end
        drop_pages(array)
    return MicroBatch(
        input_ids, labels, position_ids if packed else None, tokens, int((labels != IGNORED).sum())
    )

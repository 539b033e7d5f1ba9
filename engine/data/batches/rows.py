"""Rows of tokens, and their grouping into the micro-batches of any training step.

- A document is a text whose tokens attend only to each other. A row holds one or several documents
  (`packing.py` decides which).
- An epoch visits the rows in an order that depends only on the seed and the epoch's number.
- Step n takes the next `batch_size` rows after those of step n - 1, across the ends of epochs.
So a step needs no state from earlier steps: a resumed run just requests its next step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from engine.config.preference_settings import Objective
from engine.data.batches.length_bucketing import (
    grouped_by_length,
    mean_padded_length,
    padded_length,
)
from engine.data.batches.packing import Rows
from engine.data.tokens.mapped_arrays import Visited, chunks, drop_pages

IGNORED = -100
"""Label of a position without loss."""
_STEPS_MEASURED = 64
"""Number of steps over which the mean length of padded rows is taken."""


@dataclass(frozen=True)
class Row:
    """One row of T tokens, without padding."""

    input_ids: np.ndarray
    """Token ids, int32[T]."""
    labels: np.ndarray
    """Labels, int32[T], already shifted: labels[t] is input_ids[t + 1], or -100 if that token
    carries no loss or belongs to another document.
    """
    position_ids: np.ndarray
    """Positions, int32[T]. They begin at 0 in every document."""
    documents: int
    """Number of documents of the row."""
    answer: np.ndarray | None = None
    """Mask of the labels of the answer, in a line of a pair, bool[T]."""
    reference: float = 0.0
    """Reference log-probability of the answer in a sequence of a pair."""
    is_desirable: bool = False
    """Whether the answer is desirable, in a sequence with a label."""
    weights: np.ndarray | None = None
    """Factors of the losses of the labels, float32[T]; None if all are 1."""


@dataclass(frozen=True)
class PairTargets:
    """Targets of a micro-batch of B lines: those with an even number are chosen answers, and each
    is followed by the rejected answer of its pair.
    """

    objective: Objective
    """Which loss the pairs have."""
    answer: np.ndarray
    """Mask of the labels that belong to an answer, bool[B, T]."""
    labeled: np.ndarray
    """Mask of the positions that have a label, bool[B, T]: more than `answer` with ORPO alone."""
    reference: np.ndarray
    """Reference log-probabilities of the answers, float32[B]."""
    pairs: int
    """Number of pairs in the whole step."""
    chosen_tokens: int
    """Number of labels in the lines of chosen answers of the whole step."""
    desirable: np.ndarray | None = None
    """Whether each sequence is a desirable answer by itself, bool[B]; None for pairs. `pairs` then
    counts answers.
    """
    divergence: float = 0.0
    """Mean rise of the log-probability of KL completions (KTO)."""

    @property
    def answer_tokens(self) -> np.ndarray:
        """Number of tokens of each answer, int64[B]."""
        return self.answer.sum(axis=1)


@dataclass(frozen=True)
class MicroBatch:
    """B rows that pass through the model together. Each row is padded on
    the right to the same length of T tokens; padding carries no loss.
    """

    input_ids: np.ndarray
    """Token ids, int64[B, T]."""
    labels: np.ndarray
    """Labels, int64[B, T], already shifted; -100 marks positions without loss."""
    position_ids: np.ndarray | None
    """Positions, int64[B, T]. They begin at 0 in every document, and the padding of a row counts as
    one more document. None if no row is packed.
    """
    tokens: int
    """Number of tokens of the rows, without padding."""
    loss_tokens: int
    """Number of positions that have a label other than -100."""
    places: np.ndarray | None = None
    """Places of the rows in their step, in the order of the data and whatever micro-batch they are
    in: int64[B]. Rows of no step are counted from 0; None if they were not counted.
    """
    lengths: np.ndarray | None = None
    """Number of tokens without padding of the rows, int64[B]. None if nobody has counted them."""
    pairs: PairTargets | None = None
    """Pairs of answers in the rows, the chosen one of each first; None for other rows."""
    weights: np.ndarray | None = None
    """Factors of the losses of the labels, float32[B, T], 0 where there is no label. None if all of
    them are 1.
    """

    @property
    def loss_weight(self) -> float:
        """The sum of the weights of all labels, which is their number without weights."""
        return float(self.loss_tokens) if self.weights is None else sum_of_weights(self.weights)


def sum_of_weights(weights: np.ndarray) -> float:
    """Returns the sum of weights of any shape, added in double precision."""
    return float(weights.sum(dtype=np.float64))


@dataclass(frozen=True)
class DocumentTokens:
    """Tokens of all documents, one document after another, as arrays."""

    ids: np.ndarray | Visited
    """The token ids, int32[tokens]. Those of a mix of sources can be sliced, but are never in
    memory as a whole.
    """
    loss_mask: np.ndarray | Visited
    """Mask of the tokens that are training targets, bool[tokens]."""
    starts: np.ndarray
    """First token of each document: int64[documents + 1]."""
    references: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """`Document.reference` of the answers of pairs, float64[documents], else empty."""
    weights: np.ndarray | Visited = field(default_factory=lambda: np.zeros(0, np.float32))
    """`Document.weights` of the tokens, float32[tokens]; empty if all weights are 1."""


@dataclass(frozen=True)
class Order:
    """In which order epochs visit the rows."""

    seed: int
    shuffle: bool
    """Whether each epoch visits the rows in a new random order, or in the order of the data."""
    batch_size: int | None = None
    """Number of rows in a step, if rows of similar length share a step."""

    def of_epoch(self, epoch: int, lengths: np.ndarray) -> np.ndarray:
        """Returns the row numbers, from 0 on, in the order of `epoch` (from 0), int64[rows]. Row i
        has `lengths[i]` tokens.
        """
        rows = len(lengths)
        if not self.shuffle:
            return np.arange(rows)
        draw = np.random.default_rng((epoch, self.seed))
        order = draw.permutation(rows)
        if self.batch_size is None:
            return order
        return grouped_by_length(order, lengths, epoch * rows, self.batch_size, draw)


class RowSet:
    """The rows of a data set. Their tokens stay in files; memory holds about 40 bytes per document,
    whatever its length.
    """

    def __init__(self, documents: DocumentTokens, rows: Rows, pad_id: int, order: Order):
        self._documents = documents
        self.ids = documents.ids
        self.loss_mask = documents.loss_mask
        self.weights = documents.weights
        self.starts = documents.starts
        self.rows = rows
        self.pad_id = pad_id
        self.row_lengths = _row_lengths(documents, rows)
        """Tokens of each row: int64[rows]."""
        self.packed = rows.packed
        self.sequences_per_row = 1
        """Number of lines of tokens in a micro-batch for a row of the set."""
        self._order = order
        # The order of the last epoch is cached: steps request it once per row, and making it takes
        # a pass over all rows.
        self._last_epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def given_references(self) -> tuple[np.ndarray, ...]:
        """Reference log-probabilities in the data, float64[documents], if they have them."""
        return ()

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def loss_tokens(self) -> int:
        return sum(int(np.count_nonzero(chunk)) for chunk in chunks(self.loss_mask))

    @property
    def longest(self) -> int:
        """Tokens of the longest row, or 0 if there are no rows."""
        return int(self.row_lengths.max(initial=0))

    def row(self, i: int) -> Row:
        """Returns row `i`, read from the token files."""
        documents = self.rows[i]
        starts = self.starts[documents]
        ends = self.starts[documents + 1]
        lengths = ends - starts
        places = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist())]
        ids = np.concatenate([self.ids[place] for place in places])
        loss_mask = np.concatenate([self.loss_mask[place] for place in places])
        ends_in_row = np.cumsum(lengths)
        labels = np.full(len(ids), IGNORED, dtype=np.int32)
        labels[:-1] = np.where(loss_mask[1:], ids[1:], IGNORED)
        labels[ends_in_row - 1] = IGNORED  # the next token belongs to another document
        starts_in_row = np.repeat(ends_in_row - lengths, lengths)
        positions = (np.arange(len(ids)) - starts_in_row).astype(np.int32)
        weights = None
        if len(self.weights):
            each = np.concatenate([self.weights[place] for place in places])
            weights = np.append(each[1:], np.float32(0))
            weights[labels == IGNORED] = 0
        return Row(ids, labels, positions, len(documents), weights=weights)

    def sequences(self, i: int) -> list[Row]:
        """Returns what row `i` becomes in a micro-batch, line by line."""
        return [self.row(i)]

    def pair_targets(self, _lines: list[Row], _length: int) -> PairTargets | None:
        """Returns what belongs to lines of pairs, padded to a length; None for other lines."""
        return None

    def as_step(self, found: list[MicroBatch]) -> list[MicroBatch]:
        """Returns the micro-batches of a step, each with what depends on the whole step."""
        return found

    def row_length(self, i: int) -> int:
        """Returns the number of tokens in row `i`."""
        return int(self.row_lengths[i])

    def order(self, epoch: int) -> np.ndarray:
        """Returns the row numbers in the order of `epoch` (from 0), int64[rows]. The order depends
        only on the seed and the epoch.
        """
        if self._last_epoch is None or self._last_epoch[0] != epoch:
            self._last_epoch = (epoch, self._order.of_epoch(epoch, self.row_lengths))
        return self._last_epoch[1]

    def grouped_by_length(self, batch_size: int) -> RowSet:
        """Returns the same rows, of which those of similar length share a step of `batch_size` or
        a micro-batch of an evaluation. Where the order is that of the data, steps keep it.
        """
        order = replace(self._order, batch_size=batch_size)
        return type(self)(self._documents, self.rows, self.pad_id, order)

    def order_of_evaluation(self) -> np.ndarray:
        """Returns all row numbers in the order in which an evaluation takes them, int64[rows]."""
        if self._order.batch_size is None:
            return np.arange(len(self))
        return np.argsort(-self.row_lengths, kind="stable")

    def mean_padded_length(self, batch_size: int, micro_batch_size: int, pad_up_to: int) -> float:
        """Returns the mean length to which the first steps pad their rows."""
        steps = min(_STEPS_MEASURED, len(self) // batch_size)
        if not steps:
            return float(self.longest)
        lengths = self.row_lengths[self.order(0)[: steps * batch_size]].reshape(steps, batch_size)
        bounds = micro_batch_bounds(batch_size, micro_batch_size)
        return mean_padded_length(lengths, bounds, pad_up_to)

    def percent_padding(self, batch_size: int, micro_batch_size: int, pad_up_to: int) -> float:
        """Returns which percentage of the positions of the first steps is padding."""
        steps = min(_STEPS_MEASURED, len(self) // batch_size)
        measured = self.order(0)[: steps * batch_size] if steps else np.argmax(self.row_lengths)
        mean = float(self.row_lengths[measured].mean())
        return 100 * (1 - mean / self.mean_padded_length(batch_size, micro_batch_size, pad_up_to))

    def steps_of(self, epochs: float, batch_size: int) -> int:
        """Returns the number of steps in `epochs` passes over the rows, rounded up: the last step
        may continue into the next pass.
        """
        return max(1, math.ceil(round(len(self) * epochs, 6) / batch_size))


def _row_lengths(documents: DocumentTokens, rows: Rows) -> np.ndarray:
    lengths = np.diff(np.asarray(documents.starts))
    if len(rows) == 0:  # `reduceat` does not accept an empty list of starts
        return lengths
    return np.add.reduceat(lengths[rows.documents], rows.starts[:-1])


@dataclass(frozen=True)
class RowSets:
    """Rows of training and of validation of one data set."""

    train: RowSet
    validation: RowSet


def rows_of_step(rows: RowSet, batch_size: int, step: int) -> list[int]:
    """Returns the numbers of the rows that step `step` (from 1) reads, in the order of the data."""
    first = (step - 1) * batch_size
    chosen = []
    for place in range(first, first + batch_size):
        epoch, within = divmod(place, len(rows))
        chosen.append(int(rows.order(epoch)[within]))
    return chosen


def batches(
    rows: RowSet, batch_size: int, micro_batch_size: int, step: int, pad_up_to: int = 0
) -> list[MicroBatch]:
    """Returns the micro-batches of step `step` (from 1).

    Steps run through the epochs without a break, so each has exactly `batch_size` rows. Within a
    step, rows are sorted by length, which saves padding. `pad_up_to` is for compiled kernels: it is
    the maximum length of a padded row in tokens (`padded_length`).
    """
    chosen = rows_of_step(rows, batch_size, step)
    places = list(range(batch_size))
    if micro_batch_size < batch_size:
        places.sort(key=lambda place: rows.row_length(chosen[place]), reverse=True)
    made = []
    for start, stop in micro_batch_bounds(batch_size, micro_batch_size):
        own = places[start:stop]
        made.append(micro_batch(rows, [chosen[place] for place in own], pad_up_to, own))
    return rows.as_step(made)


def micro_batch_bounds(batch_size: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """Divides a step into micro-batches and returns (first row, row after the last) of each. There
    are as few micro-batches as possible with at most `micro_batch_size` rows each. Their sizes
    differ by at most one row, larger ones first.
    """
    count = -(-batch_size // micro_batch_size)
    size, larger = divmod(batch_size, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return list(itertools.pairwise(starts))


def one_pass(rows: RowSet, micro_batch_size: int, pad_up_to: int = 0) -> Iterator[MicroBatch]:
    """Yields every row once, for evaluation, in `RowSet.order_of_evaluation`. The last micro-batch
    may be smaller. `pad_up_to` is that of `batches`.
    """
    order = rows.order_of_evaluation().tolist()
    for start in range(0, len(rows), micro_batch_size):
        yield micro_batch(rows, order[start : start + micro_batch_size], pad_up_to)


def micro_batch(
    rows: RowSet, chosen: list[int], pad_up_to: int = 0, places: list[int] | None = None
) -> MicroBatch:
    """Returns the rows `chosen`, padded to the length of the longest or, with `pad_up_to`, a little
    more (`padded_length`). They have these `places` in their step; without them, from 0 on.
    """
    parts = [sequence for i in chosen for sequence in rows.sequences(i)]
    length = padded_length(max(len(part.input_ids) for part in parts), pad_up_to)
    shape = (len(parts), length)
    input_ids = np.full(shape, rows.pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    tokens = 0
    for sequence, part in enumerate(parts):
        size = len(part.input_ids)
        input_ids[sequence, :size] = part.input_ids
        labels[sequence, :size] = part.labels
        position_ids[sequence, :size] = part.position_ids
        position_ids[sequence, size:] = np.arange(length - size)
        tokens += size
    # Mapped pages count as memory of this process until they are dropped. Without this, the whole
    # file would be counted in the end.
    drop_pages(rows.ids)
    drop_pages(rows.loss_mask)
    drop_pages(rows.weights)
    packed = any(part.documents > 1 for part in parts)
    return MicroBatch(
        input_ids,
        labels,
        position_ids if packed else None,
        tokens,
        loss_tokens=int((labels != IGNORED).sum()),
        places=_places_of_sequences(rows, len(chosen), places),
        lengths=np.array([len(part.input_ids) for part in parts], dtype=np.int64),
        pairs=rows.pair_targets(parts, length),
        weights=_weights_of_sequences(parts, labels),
    )


def _weights_of_sequences(parts: list[Row], labels: np.ndarray) -> np.ndarray | None:
    """Returns the weights of `labels`, int64[B, T], as `MicroBatch.weights` has them."""
    if all(part.weights is None for part in parts):
        return None
    weights = (labels != IGNORED).astype(np.float32)
    is_weighted = False
    for sequence, part in enumerate(parts):
        if part.weights is not None:
            is_weighted |= bool((part.weights != weights[sequence, : len(part.weights)]).any())
            weights[sequence, : len(part.weights)] = part.weights
    return weights if is_weighted else None


def _places_of_sequences(rows: RowSet, count: int, places: list[int] | None) -> np.ndarray:
    """Returns the place in the step of each line of `count` rows, int64[lines]. The rows have these
    `places`, or are counted from 0.
    """
    of_rows = np.array(range(count) if places is None else places, dtype=np.int64)
    sequences = np.arange(rows.sequences_per_row)
    return (of_rows[:, None] * rows.sequences_per_row + sequences).reshape(-1)

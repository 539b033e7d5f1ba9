"""Rows of answers for preferences. A `PairRows` has rows of which each is a pair: two sequences of
tokens, that of the chosen answer first. A `MarkedRows` has answers that are marked as desirable or
not.

The documents of a pair are stored one behind the other, the rejected answer first. Both sequences
are in one micro-batch, and steps, orders and batch sizes count pairs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.config.preference_settings import Objective
from engine.data.batches.packing import Rows, one_each
from engine.data.batches.rows import (
    IGNORED,
    DocumentTokens,
    MicroBatch,
    Order,
    PairTargets,
    Row,
    RowSet,
)


class PairRows(RowSet):
    """The pairs of a data set. `learn` sets the objective."""

    def __init__(self, documents: DocumentTokens, rows: Rows, pad_id: int, order: Order):
        super().__init__(documents, rows, pad_id, order)
        lengths = np.diff(np.asarray(documents.starts)).reshape(-1, 2)
        self.row_lengths = lengths.max(axis=1, initial=0)
        """Tokens of the longer sequence of each pair, int64[pairs]."""
        self.packed = False
        self.sequences_per_row = 2
        self.objective = Objective()
        logps = documents.references.astype(np.float32).reshape(-1, 2)
        self.references = np.ascontiguousarray(logps[:, ::-1])
        """Reference log-probabilities of the chosen and the rejected answer of each pair,
        float32[pairs, 2]. They are NaN where the data do not have them, and `set_reference_logps`
        was not called.
        """

    @property
    def given_references(self) -> tuple[np.ndarray, ...]:
        logps = self._documents.references
        return () if np.isnan(logps).all() else (logps,)

    @property
    def lacks_reference_logps(self) -> bool:
        """Whether the answers of a pair have nothing that they are compared with."""
        return bool(np.isnan(self.references).any())

    def learn(self, objective: Objective) -> None:
        """Makes the pairs those of this objective."""
        self.objective = objective
        if not objective.needs_reference:
            self.references = np.zeros_like(self.references)

    @property
    def compared(self) -> list[RowSet]:
        """Rows whose log-probabilities the references are, column by column."""
        return [self]

    def set_reference_logps(self, found: np.ndarray) -> None:
        """Takes what the answers are compared with, float32[pairs, 2], chosen answers first."""
        self.references = found.astype(np.float32)

    def sequences(self, i: int) -> list[Row]:
        """Returns the chosen and the rejected answer of pair `i`."""
        rejected, chosen = self.rows[i].tolist()
        return [self._sequence(chosen, i, 0), self._sequence(rejected, i, 1)]

    def _sequence(self, document: int, pair: int, place: int) -> Row:
        """Returns one answer of a pair behind its prompt. ORPO trains the whole text of a chosen
        answer, and the loss of any other form is of the answer alone.
        """
        inside = slice(int(self.starts[document]), int(self.starts[document + 1]))
        ids, loss_mask = self.ids[inside], self.loss_mask[inside]
        whole = self.objective.name == "orpo" and place == 0
        labels = np.full(len(ids), IGNORED, dtype=np.int32)
        labels[:-1] = ids[1:] if whole else np.where(loss_mask[1:], ids[1:], IGNORED)
        answer = np.zeros(len(ids), dtype=bool)
        answer[:-1] = loss_mask[1:]
        positions = np.arange(len(ids), dtype=np.int32)
        return Row(ids, labels, positions, 1, answer, float(self.references[pair, place]))

    def pair_targets(self, sequences: list[Row], length: int) -> PairTargets:
        answer = np.zeros((len(sequences), length), dtype=bool)
        labeled = np.zeros_like(answer)
        for place, sequence in enumerate(sequences):
            assert sequence.answer is not None  # `sequences` has made it
            answer[place, : len(sequence.answer)] = sequence.answer
            labeled[place, : len(sequence.labels)] = sequence.labels != IGNORED
        reference = np.array([sequence.reference for sequence in sequences], dtype=np.float32)
        tokens = int(np.count_nonzero(labeled[::2]))
        return PairTargets(self.objective, answer, labeled, reference, len(sequences) // 2, tokens)

    def as_step(self, found: list[MicroBatch]) -> list[MicroBatch]:
        return _of_whole_step(found)


class MarkedRows(RowSet):
    """Answers of which each is marked as desirable or not. `learn` sets the objective. KTO also
    asks how likely other answers have become. The KL completion of an answer is its prompt with
    another row's answer, at most as long as the longest row. As with TRL, the rows of the data are
    divided into batches in their order, and the other row is the one before in the batch, and for
    the first one the last.
    """

    def __init__(self, documents: DocumentTokens, rows: Rows, pad_id: int, order: Order):
        super().__init__(documents, rows, pad_id, order)
        self.objective = Objective()
        self.desirable = documents.references > 0.5
        """Whether each answer is desirable: bool[rows]."""
        self.references = np.full((len(self), 2), np.nan, dtype=np.float32)
        """Reference log-probabilities of each answer and its KL completion, float32[rows, 2]. They
        are NaN until `set_reference_logps` is called.
        """
        self.kl_completions = _KlCompletions(self)

    @property
    def given_references(self) -> tuple[np.ndarray, ...]:
        return (self._documents.references,)  # the marks

    @property
    def lacks_reference_logps(self) -> bool:
        """Whether answers have nothing that they are compared with."""
        return bool(np.isnan(self.references).any())

    def learn(self, objective: Objective) -> None:
        """Makes the answers those of this objective."""
        self.objective = objective

    @property
    def compared(self) -> list[RowSet]:
        """Rows whose log-probabilities the references are, column by column."""
        return [self, self.kl_completions]

    def set_reference_logps(self, found: np.ndarray) -> None:
        """Takes what answers and strangers are compared with, float32[rows, 2]."""
        self.references = found.astype(np.float32)

    def sequence(self, i: int, answer_of: int, column: int) -> Row:
        """Returns the prompt of row `i` with the answer of row `answer_of`, compared with what
        stands in this column of the references.
        """
        ids, loss_mask = self._tokens(i)
        begin = int(np.argmax(loss_mask))
        if answer_of != i:
            other, of_other = self._tokens(answer_of)
            first = int(np.argmax(of_other))
            ids = np.concatenate([ids[:begin], other[first:]])[: self.longest]
            loss_mask = np.concatenate([np.zeros(begin, bool), of_other[first:]])[: self.longest]
        labels = np.full(len(ids), IGNORED, dtype=np.int32)
        labels[:-1] = np.where(loss_mask[1:], ids[1:], IGNORED)
        positions = np.arange(len(ids), dtype=np.int32)
        answer = labels != IGNORED
        return Row(ids, labels, positions, 1, answer, float(self.references[i, column]))

    def row_before(self, i: int) -> int:
        """Returns the row whose answer the stranger of row `i` has. A row that is alone in its
        batch takes the answer of the row before in the data.
        """
        size = self._order.batch_size or len(self)
        begin = i - i % size
        last = min(begin + size, len(self)) - 1
        if begin == last:
            return (i - 1) % len(self)
        return i - 1 if i > begin else last

    def _tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of row i, int32[T], and the marks of its answer, bool[T]."""
        inside = slice(int(self.starts[i]), int(self.starts[i + 1]))
        return self.ids[inside], self.loss_mask[inside]

    def sequences(self, i: int) -> list[Row]:
        return [replace(self.sequence(i, i, 0), is_desirable=bool(self.desirable[i]))]

    def pair_targets(self, sequences: list[Row], length: int) -> PairTargets:
        return _targets(self.objective, sequences, length)

    def as_step(self, found: list[MicroBatch]) -> list[MicroBatch]:
        return _of_whole_step(found)


class _KlCompletions(RowSet):
    """The stranger of each row of `base`, in the same order."""

    def __init__(self, base: MarkedRows):
        documents = DocumentTokens(base.ids, base.loss_mask, base.starts)
        super().__init__(documents, one_each(len(base)), base.pad_id, Order(0, False))
        self._base = base

    def order(self, epoch: int) -> np.ndarray:
        return self._base.order(epoch)

    def sequences(self, i: int) -> list[Row]:
        return [self._base.sequence(i, self._base.row_before(i), 1)]

    def pair_targets(self, sequences: list[Row], length: int) -> PairTargets:
        return _targets(self._base.objective, sequences, length)

    def as_step(self, found: list[MicroBatch]) -> list[MicroBatch]:
        return _of_whole_step(found)


def _targets(objective: Objective, sequences: list[Row], length: int) -> PairTargets:
    """Returns what a micro-batch of answers with marks has, padded to `length`."""
    answer = np.zeros((len(sequences), length), dtype=bool)
    for place, sequence in enumerate(sequences):
        assert sequence.answer is not None  # `MarkedRows.sequence` has made it
        answer[place, : len(sequence.answer)] = sequence.answer
    reference = np.array([sequence.reference for sequence in sequences], dtype=np.float32)
    desirable = np.array([sequence.is_desirable for sequence in sequences])
    return PairTargets(objective, answer, answer, reference, len(sequences), 0, desirable)


def _of_whole_step(found: list[MicroBatch]) -> list[MicroBatch]:
    """Returns the micro-batches of a step, which know the rows and labels of all of them."""
    targets = [batch.pairs for batch in found if batch.pairs is not None]
    pairs = sum(each.pairs for each in targets)
    tokens = sum(each.chosen_tokens for each in targets)
    return [
        replace(batch, pairs=replace(each, pairs=pairs, chosen_tokens=tokens))
        for batch, each in zip(found, targets)
    ]

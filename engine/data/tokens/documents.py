"""Documents of an example that is trained on: tokens, with a mark on those that carry loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.formats.example import Example, Labeled, Pair, Preference, Single
from engine.data.sources.text_files import Passage
from engine.data.tokens.rendered import RejectedExample


@dataclass(frozen=True)
class Document:
    """T tokens that attend to each other and to nothing else."""

    ids: np.ndarray
    """Token ids, int32[T], with T at most max_seq_len. A plain text is one document of any length
    until `TextRows` divides it.
    """
    loss_mask: np.ndarray
    """Loss mask: the tokens that are training targets, bool[T]. The first token never is one,
    because nothing predicts it.
    """
    answer: tuple[int, int] | None
    """Token range of the last answer, or None if there is no answer or if part of it was cut."""
    length: int
    """Least number of tokens of the document before the cut to max_seq_len: the end of a very long
    text is not tokenized.
    """
    reference: float | None = None
    """Reference log-probability of an answer of a pair, NaN where the row does not have it; 1 for
    an answer that is marked as desirable, and 0 for one that is not. None for any other document.
    """
    weights: np.ndarray | None = None
    """Factor of the loss of each token that is trained, float32[T]; None if all are 1."""

    @property
    def all_weights(self) -> np.ndarray:
        """The weight of each token, float32[T]."""
        return np.ones(len(self.ids), np.float32) if self.weights is None else self.weights

    @property
    def cut(self) -> bool:
        return self.length > len(self.ids)


@dataclass(frozen=True)
class AcceptedExample:
    """An example that is trained on, as one or several documents."""

    documents: list[Document]
    """At least one document; several if turns are trained one at a time. Each document has at least
    one trained token.
    """
    cut: bool
    """Whether part of the example is left out, because it is longer than max_seq_len."""
    answer: tuple[int, int] | None
    """Token range of the example's last answer in the last document, or None if there is no answer
    or if part of it is left out.
    """


@dataclass(frozen=True)
class Documents:
    """Documents of several rows, in flat arrays."""

    ids: np.ndarray
    """Token ids, int32[tokens]."""
    loss_mask: np.ndarray
    """Loss mask: the tokens that are training targets, bool[tokens]."""
    lengths: np.ndarray
    """The lengths of the documents in tokens, int64[documents]."""
    counts: np.ndarray
    """Number of documents of each row, or 0 if it is skipped: int64[rows]."""
    references: np.ndarray
    """`Document.reference` of the answers of pairs, float64[documents]; empty for other
    documents.
    """
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """`Document.weights` of the tokens, float32[tokens]; empty if no document has weights."""

    @classmethod
    def joined(cls, rows: list[list[Document]]) -> Documents:
        documents = [document for row in rows for document in row]
        ids = [document.ids for document in documents]
        loss_mask = [document.loss_mask for document in documents]
        # An empty array comes first in each list, because numpy cannot concatenate an empty list.
        return cls(
            np.concatenate([np.empty(0, np.int32), *ids]),
            np.concatenate([np.empty(0, bool), *loss_mask]),
            np.array([len(document.ids) for document in documents], dtype=np.int64),
            np.array([len(row) for row in rows], dtype=np.int64),
            np.array([one.reference for one in documents if one.reference is not None], float),
            _joined_weights(documents),
        )

    def of_rows(self, wanted: np.ndarray) -> Documents:
        """Returns the documents of the rows that `wanted` (bool[rows]) marks."""
        documents = np.repeat(wanted, self.counts)
        # Wanted documents beside each other are copied together.
        borders = np.flatnonzero(np.diff(documents, prepend=False, append=False))
        starts = np.concatenate([[0], np.cumsum(self.lengths)])[borders].tolist()
        slices = list(map(slice, starts[::2], starts[1::2]))
        return Documents(
            _sliced(self.ids, slices),
            _sliced(self.loss_mask, slices),
            self.lengths[documents],
            self.counts[wanted],
            self.references[documents] if len(self.references) else self.references,
            _sliced(self.weights, slices) if len(self.weights) else self.weights,
        )


def _sliced(values: np.ndarray, slices: list[slice]) -> np.ndarray:
    """Returns some slices of an array of one value per token as one array, [tokens]."""
    return np.concatenate([values[:0], *(values[part] for part in slices)])


def _joined_weights(documents: list[Document]) -> np.ndarray:
    """Returns the weights of all tokens, float32[tokens], or an empty array if all of them are
    1.
    """
    if all(document.weights is None for document in documents):
        return np.zeros(0, np.float32)
    return np.concatenate([document.all_weights for document in documents])


# ---------------------------------------------------------------------- texts of many rows

_TOO_LONG = RejectedExample("the text is longer than data.max_seq_len")


class TextRows:
    """Divides the texts of a source, in their order, into documents that fill a row each. Where a
    text continues, a row begins with the last token of the row before, which is not trained again,
    or with `data.overlap` of them. So each token but the first of a text is trained in exactly one
    row. A text may come in passages (`engine.data.sources.text_files`).
    """

    def __init__(self, config: DataConfig):
        self._limit = config.max_seq_len
        self._long = config.long_texts
        self._repeated = max(1, config.overlap)
        self._step = self._limit - self._repeated
        self._ids = np.empty(0, np.int32)
        self._loss_mask = np.empty(0, bool)
        self._length = 0
        """Number of tokens that the text has had."""
        self._complete: list[Document] = []
        """Documents that belong to the next row of the data."""

    def of_row(
        self, row: dict[str, Any], found: AcceptedExample | RejectedExample
    ) -> AcceptedExample | RejectedExample:
        """Returns the documents that are complete with a row of the data, of which there may be
        none; `found` is the row with its text as one document. The end of a text completes its last
        document. Behind a passage that is skipped, the text begins anew.
        """
        if isinstance(found, RejectedExample):
            self._complete = self.rest()
            return found
        (text,) = found.documents
        self._add(text)
        if isinstance(row, Passage) and row.after:
            documents, self._complete = self._complete, []
            return AcceptedExample(documents, cut=False, answer=None)
        is_cut = self._length > self._limit and self._long != "continue"
        documents = self.rest()
        return (
            _TOO_LONG
            if is_cut and self._long == "skip"
            else AcceptedExample(documents, is_cut, None)
        )

    def rest(self) -> list[Document]:
        """Returns the documents that no row of the data has yet, the end of the text among them."""
        length = len(self._ids) if self._long == "continue" else self._length
        self._complete_with(self._ids, self._loss_mask, length)
        self._ids, self._loss_mask, self._length = self._ids[:0], self._loss_mask[:0], 0
        documents, self._complete = self._complete, []
        return documents

    def of_passages(self, passages: Documents) -> Documents | None:
        """Returns the documents that are complete with each of several rows of the data, as
        `of_row` does, but in one go. Each row is a document of `passages`, and the text continues
        behind all of them. Returns None, and changes nothing, where they must be taken one by one.
        """
        if self._long != "continue" or self._complete:
            return None
        ends = len(self._ids) + np.cumsum(passages.lengths)
        ids, loss_mask = self._filled(passages.ids, passages.loss_mask)
        ends_of_rows = np.arange(len(ids)) * self._step + self._limit
        kept = loss_mask.any(axis=1)
        completed_by = np.searchsorted(ends, ends_of_rows[kept])
        return Documents(
            ids[kept].reshape(-1),
            loss_mask[kept].reshape(-1),
            np.full(len(completed_by), self._limit),
            np.bincount(completed_by, minlength=len(ends)),
            passages.references,
        )

    def _add(self, text: Document) -> None:
        """Adds tokens to the text. What fills a row is complete."""
        self._length += len(text.ids)
        if self._long == "continue":
            for ids, loss_mask in zip(*self._filled(text.ids, text.loss_mask)):
                self._complete_with(ids, loss_mask, self._limit)
            return
        self._ids = np.concatenate([self._ids, text.ids])[: self._limit]
        self._loss_mask = np.concatenate([self._loss_mask, text.loss_mask])[: self._limit]

    def _filled(self, ids: np.ndarray, loss_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds tokens to the text, int32[T], with their marks, bool[T]. Returns those of the rows
        that they fill, int32[rows, max_seq_len] and bool[rows, max_seq_len].
        """
        ids = np.concatenate([self._ids, ids])
        loss_mask = np.concatenate([self._loss_mask, loss_mask])
        if len(ids) < self._limit:
            self._ids, self._loss_mask = ids, loss_mask
            return np.empty((0, self._limit), np.int32), np.empty((0, self._limit), bool)
        rows = (len(ids) - self._repeated) // self._step
        shape, begin = (rows, self._limit), rows * self._step
        # Each row begins `_step` tokens behind the one before, in the same memory.
        size = ids.itemsize
        of_ids = np.ndarray(shape, ids.dtype, ids, strides=(size * self._step, size))
        of_trained = np.ndarray(shape, bool, loss_mask, strides=(self._step, 1)).copy()
        of_trained[1:, : self._repeated] = False
        self._ids, self._loss_mask = ids[begin:], loss_mask[begin:]
        self._loss_mask[: self._repeated] = False
        return of_ids, of_trained

    def _complete_with(self, ids: np.ndarray, loss_mask: np.ndarray, length: int) -> None:
        """Makes tokens, int32[T], and their marks, bool[T], a document if any is trained. It would
        have `length` tokens if it was not cut.
        """
        if loss_mask.any():
            self._complete.append(Document(ids, loss_mask, None, length))


# ---------------------------------------------------------------------- pairs

_NO_REJECTED = RejectedExample("the pair has no rejected answer")
_ALIKE = RejectedExample("both answers of the pair are the same")
_ALIKE_CUT = RejectedExample("both answers of the pair are the same within max_seq_len")


def answers_of(example: Example) -> list[Single]:
    """Returns what is encoded of an example: of a pair the rejected and the chosen answer. The
    chosen one stands for a rejected one that is missing, and `pair_of` skips the pair. Of a
    conversation with a mark that has no prompt of its own, what follows the last question counts.
    """
    if isinstance(example, Preference):
        return [example.rejected or example.chosen, example.chosen]
    if not isinstance(example, Labeled):
        return [example]
    answer = example.answer
    if isinstance(answer, Pair):
        return [answer]
    if not answer.context:
        roles = [message["role"] for message in answer.messages]
        asked = [place for place, role in enumerate(roles) if role == "user"]
        answer = replace(answer, context=asked[-1] + 1 if asked else 0)
    return [answer]


def marked(
    example: Labeled, found: AcceptedExample | RejectedExample
) -> AcceptedExample | RejectedExample:
    """Returns an encoded answer with its mark, or why it is skipped."""
    if isinstance(found, RejectedExample):
        return found
    mark = 1.0 if example.is_desirable else 0.0
    return replace(found, documents=[replace(found.documents[0], reference=mark)])


def pair_of(
    pair: Preference,
    rejected: AcceptedExample | RejectedExample,
    chosen: AcceptedExample | RejectedExample,
) -> AcceptedExample | RejectedExample:
    """Returns the two encoded answers as one example of two documents, the rejected answer first,
    or why the pair is skipped.
    """
    if pair.rejected is None:
        return _NO_REJECTED
    if isinstance(chosen, RejectedExample):
        return chosen
    if isinstance(rejected, RejectedExample):
        return rejected
    (best,), (other,) = chosen.documents, rejected.documents
    cut = chosen.cut or rejected.cut
    # As with TRL, the prompt is what both texts share with it: a template may begin an answer with
    # reasoning in another way than one without.
    begin = min(int(np.argmax(best.loss_mask)), int(np.argmax(other.loss_mask)))
    best, other = _behind(best, begin), _behind(other, begin)
    if np.array_equal(best.ids, other.ids):
        return _ALIKE_CUT if cut else _ALIKE
    of_best, of_other = pair.reference or (math.nan, math.nan)
    documents = [replace(other, reference=of_other), replace(best, reference=of_best)]
    answer = None if chosen.answer is None else (begin, chosen.answer[1])
    return AcceptedExample(documents, cut, answer)


def _behind(document: Document, begin: int) -> Document:
    """Returns a document of which all tokens from `begin` on are marked."""
    loss_mask = np.arange(len(document.ids)) >= begin
    return replace(document, loss_mask=loss_mask)

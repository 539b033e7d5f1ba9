"""An example that is trained on consists of documents: tokens, with a mark on those that carry
loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Document:
    """A document consists of T tokens that attend to each other and to nothing else."""

    ids: np.ndarray
    """The token ids are int32[T], with T at most max_seq_len."""
    trained: np.ndarray
    """It marks the tokens that are training targets, bool[T]. The first token never is one, because
    nothing predicts it.
    """
    answer: tuple[int, int] | None
    """This is the token range of the last answer, or None if there is no answer or if part of it
    was cut.
    """
    length: int
    """The document had at least this many tokens before the cut to max_seq_len: the end of a very
    long text is not tokenised.
    """

    @property
    def cut(self) -> bool:
        return self.length > len(self.ids)


@dataclass(frozen=True)
class Kept:
    """A `Kept` is an example that is trained on, as one or several documents."""

    documents: list[Document]
    """There is at least one document, and several if turns are trained one at a time. Each document
    has at least one trained token.
    """
    cut: bool
    """It is true when part of the example is left out, because it is longer than max_seq_len."""
    answer: tuple[int, int] | None
    """This is the token range of the example's last answer in the last document, or None if there
    is no answer or if part of it is left out.
    """


@dataclass(frozen=True)
class Documents:
    """These flat arrays hold the documents of several rows."""

    ids: np.ndarray
    """The token ids are int32[tokens]."""
    trained: np.ndarray
    """It marks the tokens that are training targets, bool[tokens]."""
    lengths: np.ndarray
    """These are the lengths of the documents in tokens, int64[documents]."""
    counts: np.ndarray
    """Each row has this many documents, or 0 if it is skipped: int64[rows]."""

    @classmethod
    def joined(cls, rows: list[list[Document]]) -> Documents:
        documents = [document for row in rows for document in row]
        ids = [document.ids for document in documents]
        trained = [document.trained for document in documents]
        # An empty array comes first in each list, because numpy cannot concatenate an empty list.
        return cls(
            np.concatenate([np.empty(0, np.int32), *ids]),
            np.concatenate([np.empty(0, bool), *trained]),
            np.array([len(document.ids) for document in documents], dtype=np.int64),
            np.array([len(row) for row in rows], dtype=np.int64),
        )

    def of_rows(self, wanted: np.ndarray) -> Documents:
        """Returns the documents of the rows that `wanted` (bool[rows]) marks."""
        documents = np.repeat(wanted, self.counts)
        tokens = np.repeat(documents, self.lengths)
        return Documents(
            self.ids[tokens], self.trained[tokens], self.lengths[documents], self.counts[wanted]
        )

"""An `Evaluation` is the loss of validation rows, as a whole and of each document in them.

The device leaves the cross-entropy of each position, and the host adds them up by document. So the
documents cost one copy a sweep, of 4 bytes a position, and the sums have the same bits however the
rows were spread over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.data.batches.rows import MicroBatch


@dataclass(frozen=True)
class Evaluation:
    """What `StreamingEngine.evaluate_rows` returns. A packed row has several documents, any other
    row is one; those without a loss are left out.
    """

    loss: float
    """The mean cross-entropy over all tokens that have a loss, weighted as the rows say."""
    sums: np.ndarray
    """The cross-entropies of each document are added up in double precision, each with the weight
    1: float64 [documents], in the order of the micro-batches.
    """
    tokens: np.ndarray
    """Number of tokens of each document that have a loss, int64 [documents]."""


def sums_by_document(
    batches: Sequence[MicroBatch], losses: Sequence[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum of each document, float64 [documents], and its tokens that have a loss, int64
    [documents]. Each micro-batch has `losses` of its positions with a label, float32 [n], in order.
    """
    tokens = np.concatenate([_tokens_of_documents(batch) for batch in batches])
    # One copy for all micro-batches: each would wait for the device.
    each = torch.cat(list(losses)).cpu().numpy().astype(np.float64)
    document_of = np.repeat(np.arange(len(tokens)), tokens)
    return np.bincount(document_of, each, minlength=len(tokens)), tokens


def _tokens_of_documents(batch: MicroBatch) -> np.ndarray:
    """Returns how many labels each document has that has any: int64 [documents]."""
    has_label = batch.labels >= 0
    if batch.position_ids is None:
        counts = has_label.sum(axis=1)
    else:
        begins = batch.position_ids == 0
        begins[:, 0] = True
        counts = np.bincount(np.cumsum(begins)[has_label.ravel()])
    return counts[counts > 0]

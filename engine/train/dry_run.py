"""The dry run: one step on the longest rows before the first, so that a run that would fail fails
in its first minute.
"""

from __future__ import annotations

import numpy as np

from engine.data.rows import MicroBatch, RowSet, micro_batch, micro_batch_bounds

LEAST_STEPS = 10
"""Runs of fewer steps go without: it takes as long as one of them, and they are over soon."""


def longest_batches(
    rows: RowSet, batch_size: int, micro_batch_size: int, pad_up_to: int = 0
) -> list[MicroBatch]:
    """The micro-batches of a step on the longest rows, in the shapes that `engine.data.rows` gives
    a step at most. Rows are taken again where there are too few. pad_up_to: as there.
    """
    count = min(batch_size, len(rows))
    longest = np.argpartition(-rows.row_lengths, count - 1)[:count]
    longest = longest[np.argsort(-rows.row_lengths[longest], kind="stable")]
    chosen = np.repeat(longest, -(-batch_size // count))[:batch_size].tolist()
    return [
        micro_batch(rows, chosen[start:stop], pad_up_to)
        for start, stop in micro_batch_bounds(batch_size, micro_batch_size)
    ]

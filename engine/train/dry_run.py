"""A dry run is one step on the longest rows, taken before the first step.

A run that would run out of memory then fails in its first minute.
"""

from __future__ import annotations

import numpy as np

from engine.data.rows import MicroBatch, RowSet, micro_batch, micro_batch_bounds

LEAST_STEPS = 10
"""Shorter runs have no dry run: it takes as long as a step, and they are over soon anyway."""


def longest_batches(
    rows: RowSet, batch_size: int, micro_batch_size: int, pad_up_to: int = 0
) -> list[MicroBatch]:
    """Returns the micro-batches of a step on the longest rows, the largest shapes of any step.

    If there are too few rows, some are used more than once. `pad_up_to` is that of
    `engine.data.rows.micro_batch`.
    """
    count = min(batch_size, len(rows))
    # Partitioning finds the longest rows of a large data set without sorting all of it.
    longest = np.argpartition(-rows.row_lengths, count - 1)[:count]
    longest = longest[np.argsort(-rows.row_lengths[longest], kind="stable")]
    repeats = -(-batch_size // count)
    chosen = np.repeat(longest, repeats)[:batch_size].tolist()
    return [
        micro_batch(rows, chosen[start:stop], pad_up_to)
        for start, stop in micro_batch_bounds(batch_size, micro_batch_size)
    ]

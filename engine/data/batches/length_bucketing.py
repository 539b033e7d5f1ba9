"""Rows of similar length that share a step, so that little padding is computed.

- An epoch is a random permutation of the rows. It is divided into pools of many steps.
- Within a pool, rows are sorted by length and cut into steps.
- Then the steps of the whole epoch are shuffled, so that their lengths come in random order.
Each epoch makes other groups, and every row comes once an epoch. The order depends on the seed and
the epoch alone.
"""

from __future__ import annotations

import numpy as np

POOL_STEPS = 64
"""Number of steps whose rows make up a pool. A larger one saves little padding; a smaller one mixes
lengths better.
"""


ROW_MULTIPLE = 128
"""Number of tokens to whose multiples rows for compiled kernels are padded. Fewer lengths mean
fewer kernels, and fewer recordings of them.
"""
_LEAST_MULTIPLE = 32
_SHARE = 4
"""For a short row, a multiple of 128 would be mostly padding. So the multiple is at most a fourth
of the power of two below the row's length, but at least 32: rows of up to 2,048 tokens have 24
lengths.
"""


def padded_length(length: int, at_most: int) -> int:
    """Returns the padded length of a row of `length` tokens for compiled kernels: `length` rounded
    up to a multiple of `ROW_MULTIPLE`, of a short row to a smaller one, but at most `at_most`. No
    row is longer than `at_most`, unless that is 0, which means no padding.
    """
    power = 1 << max(0, length - 1).bit_length() >> 1
    multiple = min(ROW_MULTIPLE, max(_LEAST_MULTIPLE, power // _SHARE))
    return max(length, min(-(-length // multiple) * multiple, at_most))


def grouped_by_length(
    order: np.ndarray, lengths: np.ndarray, first: int, batch_size: int, draw: np.random.Generator
) -> np.ndarray:
    """Returns the rows of an epoch, int64[rows], in groups of similar length that are the epoch's
    steps.

    `order` is a random permutation of the rows, int64[rows], and row i has `lengths[i]` tokens. The
    epoch begins at place `first` of all epochs, which decides with the batch size where its steps
    begin. The rows of a step that two epochs share are drawn at random.
    """
    head = min(-first % batch_size, len(order))
    steps = (len(order) - head) // batch_size
    stop = head + steps * batch_size
    whole = order[head:stop]
    pools = np.arange(len(whole)) // (POOL_STEPS * batch_size)
    by_length = whole[np.lexsort((-lengths[whole], pools))]
    shuffled = by_length.reshape(steps, batch_size)[draw.permutation(steps)]
    return np.concatenate([order[:head], shuffled.reshape(-1), order[stop:]])


def mean_padded_length(lengths: np.ndarray, bounds: list[tuple[int, int]], pad_up_to: int) -> float:
    """Returns the mean length of padded rows. `lengths`, int64[steps, rows], are those of the rows
    of some steps, and `bounds` cut a step, sorted from the longest row, into micro-batches.
    """
    longest_first = -np.sort(-lengths, axis=1)
    positions = 0
    for start, stop in bounds:
        for longest in longest_first[:, start].tolist():
            positions += (stop - start) * padded_length(longest, pad_up_to)
    return positions / lengths.size

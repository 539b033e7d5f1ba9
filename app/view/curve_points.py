"""Curves are thinned to few enough points to draw here, and smoothed."""

from __future__ import annotations

import numpy as np

MAX_POINTS = 1200
SMOOTH_STEPS = 25
"""The mean of a curve is made of so many steps at most."""
SMOOTH_PARTS = 20
"""The mean of a short curve is made of one part in so many of it."""


def downsample(
    x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns points of the curve x[n], y[n] in their order, no more than `limit`. The least and
    the greatest of each stretch are kept, so that no spike is lost.
    """
    if len(x) <= limit:
        return x, y
    # The first and the last point are kept; each stretch between them gives two.
    buckets = (limit - 2) // 2
    size = -(-(len(x) - 2) // buckets)
    inner = y[1:-1]
    padded = np.pad(inner, (0, -len(inner) % size), mode="edge").reshape(-1, size)
    filled = np.where(np.isnan(padded), np.inf, padded)
    # NaN would win both comparisons, so it stands for the other end in each.
    lows = filled.argmin(axis=1)
    highs = np.where(np.isnan(padded), -np.inf, padded).argmax(axis=1)
    starts = 1 + np.arange(len(padded)) * size
    kept = np.zeros(len(x), dtype=bool)  # a mask is faster than sorting the indices
    extremes = np.concatenate([starts + lows, starts + highs])
    kept[np.minimum(extremes, len(x) - 1)] = True  # padding lies behind the end
    kept[[0, -1]] = True
    return x[kept], y[kept]


def smoothing_window(length: int) -> int:
    """Returns the number of steps that the mean of a curve of this length is made of."""
    return min(SMOOTH_STEPS, max(1, length // SMOOTH_PARTS))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of `window` values around each of values[n], of fewer at the ends. The mean
    is centred, so that the curve does not lag.
    """
    if not len(values):
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    places = np.arange(len(values))
    starts = np.maximum(0, places - window // 2)
    ends = np.minimum(len(values), places + (window + 1) // 2)
    return (sums[ends] - sums[starts]) / (ends - starts)

"""Curves, smoothed and thinned to few enough points to draw."""

from __future__ import annotations

import numpy as np

MAX_POINTS = 1200
SMOOTH_STEPS = 25
"""Largest number of steps in the moving mean of a curve."""
SMOOTH_PARTS = 20
"""Number of parts of a short curve of which the moving mean covers one."""


def downsample(
    x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `limit` points of the curve x[n], y[n], in their order. The minimum and the
    maximum of each stretch are kept, so that no spike is lost.
    """
    if len(x) <= limit:
        return x, y
    # The first and the last point are kept; each stretch between them contributes two points.
    buckets = (limit - 2) // 2
    size = -(-(len(x) - 2) // buckets)
    inner = y[1:-1]
    padded = np.pad(inner, (0, -len(inner) % size), mode="edge").reshape(-1, size)
    filled = np.where(np.isnan(padded), np.inf, padded)
    # NaN would win both comparisons, so it is replaced by the opposite extreme in each of them.
    lows = filled.argmin(axis=1)
    highs = np.where(np.isnan(padded), -np.inf, padded).argmax(axis=1)
    starts = 1 + np.arange(len(padded)) * size
    kept = np.zeros(len(x), dtype=bool)  # a mask is faster than sorting the indices
    extremes = np.concatenate([starts + lows, starts + highs])
    kept[np.minimum(extremes, len(x) - 1)] = True  # padding is past the end
    kept[[0, -1]] = True
    return x[kept], y[kept]


def smoothing_window(length: int) -> int:
    """Returns the number of steps in the moving mean of a curve of this length."""
    return min(SMOOTH_STEPS, max(1, length // SMOOTH_PARTS))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of `window` values around each of values[n], or of fewer at the ends. The
    mean is centered, so that the curve does not lag.
    """
    if not len(values):
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    places = np.arange(len(values))
    starts = np.maximum(0, places - window // 2)
    ends = np.minimum(len(values), places + (window + 1) // 2)
    return (sums[ends] - sums[starts]) / (ends - starts)

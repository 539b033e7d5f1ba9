"""Curves with few enough points to draw, and smoothed ones."""

from __future__ import annotations

import numpy as np

MAX_POINTS = 1200
SMOOTH_STEPS = 25


def downsample(
    x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` of the points, with the least and the greatest of each stretch kept, so that
    no spike is lost.
    """
    if len(x) <= limit:
        return x, y
    buckets = (limit - 2) // 2
    size = -(-(len(x) - 2) // buckets)
    inner = y[1:-1]
    padded = np.pad(inner, (0, -len(inner) % size), mode="edge").reshape(-1, size)
    filled = np.where(np.isnan(padded), np.inf, padded)
    lows = filled.argmin(axis=1)
    highs = np.where(np.isnan(padded), -np.inf, padded).argmax(axis=1)
    starts = 1 + np.arange(len(padded)) * size
    kept = np.zeros(len(x), dtype=bool)  # faster than sorting their numbers
    kept[np.minimum(np.concatenate([[0], starts + lows, starts + highs]), len(x) - 1)] = True
    kept[-1] = True
    return x[kept], y[kept]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of `window` values around each (fewer at the ends), so that the curve does not lag."""
    if not len(values):
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    places = np.arange(len(values))
    starts = np.maximum(0, places - window // 2)
    ends = np.minimum(len(values), places + (window + 1) // 2)
    return (sums[ends] - sums[starts]) / (ends - starts)

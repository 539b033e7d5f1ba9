"""Growth in samples of memory. All functions are pure.

- Memory grows if each quarter of the second half of the samples contributes its part of the growth.
- Otherwise memory is steady from the first sample after which all are within `TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.verdict.losses import median

TOLERANCE = 0.02
"""Share by which steady samples differ from their middle at most."""
FEWEST_SAMPLES = 8
"""Least number of samples for a statement."""
GROWTH_SHARE = 0.01
"""Share of their first value that growth over the second half of the samples must exceed to be
reported.
"""
EVEN_SHARE = 1 / 12
"""Least share of the growth in the second half that each of its quarters must contribute. A jump in
a single step is not continuing growth.
"""
SLOWING = 0.9
"""Share of what the quarter before contributed, below which growth slows in each quarter."""


@dataclass(frozen=True)
class MemoryGrowth:
    """Growth in a series of samples. By default there is none."""

    steady_since: int | None = None
    """Step from which the samples are within `TOLERANCE`. None if that is not known, or if there
    are too few such samples.
    """
    share: float = 0.0
    """Largest share by which the steady samples differ from their middle."""
    is_growing: bool = False
    """Whether the samples grow throughout."""
    grown: float = 0.0
    """Growth of the samples over their second half, or 0 unless they grow throughout."""
    grows_since: int = 0
    """Step at which the second half begins."""
    per_step: float = 0.0
    """Growth per step: in the second half or, where that is less, lately."""
    to_come: float = math.inf
    """Largest growth to come if growth slows; infinite for growth that does not slow."""


def memory_growth(steps: Sequence[int], values: Sequence[float]) -> MemoryGrowth:
    """Returns what samples in the order of their steps show; there are as many values as steps.
    Fewer than `FEWEST_SAMPLES` show nothing.
    """
    at = np.asarray(steps)
    samples = np.asarray(values, dtype=float)
    if len(samples) < FEWEST_SAMPLES or not samples[-1] > 0:
        return MemoryGrowth()
    medians = _growing_quarters(samples)
    if medians is not None:
        # The centers of the first and the last quarter are three quarters of the half apart.
        grown = 4 / 3 * float(medians[-1] - medians[0])
        lately = 4 * float(medians[-1] - medians[-2])
        first = len(samples) // 2
        length = max(1, int(at[-1] - at[first]))
        return MemoryGrowth(
            is_growing=True,
            grown=grown,
            grows_since=int(at[first]),
            per_step=min(grown, lately) / length,
            to_come=_to_come(medians),
        )
    # Accumulated from the last sample backwards, so that index n covers the n + 1 latest samples.
    highest = np.maximum.accumulate(samples[::-1])
    lowest = np.minimum.accumulate(samples[::-1])
    shares = (highest - lowest) / (highest + lowest)
    within = int(np.argmax(shares > TOLERANCE)) or len(samples)
    if within < FEWEST_SAMPLES:
        return MemoryGrowth()
    return MemoryGrowth(
        steady_since=int(at[len(samples) - within]), share=float(shares[within - 1])
    )


def _growing_quarters(samples: np.ndarray) -> np.ndarray | None:
    """Returns the medians[4] of the quarters of the second half of samples[n] if each quarter of it
    grew, else None.
    """
    half = samples[len(samples) // 2 :]
    if len(half) < FEWEST_SAMPLES:
        return None
    # Medians are used so that single peaks do not count.
    medians = np.array([median(part) for part in np.array_split(half, 4)])
    total = medians[-1] - medians[0]
    is_even = (np.diff(medians) >= EVEN_SHARE * total).all()
    return medians if is_even and total > GROWTH_SHARE * medians[0] else None


def _to_come(medians: np.ndarray) -> float:
    """Returns how much samples with these medians[4] of quarters will grow at most, if their growth
    slows by the same factor from each quarter to the next.
    """
    changes = np.diff(medians)
    factor = math.sqrt(changes[-1] / changes[0])
    if factor >= SLOWING:
        return math.inf
    # From the middle of the last quarter on: the sum of a geometric series.
    return float(changes[-1] * factor / (1 - factor))

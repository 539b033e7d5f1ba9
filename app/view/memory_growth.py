"""Whether memory grows or stays as it is, is worked out here from samples alone. All functions are
pure.

- Memory grows where each quarter of the latter half of the samples brings its part of the growth.
- Otherwise memory is steady from the first sample on after which all lie within `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 0.02
"""Steady samples lie above or below their middle by this share at most."""
FEWEST_SAMPLES = 8
"""A statement is made of so many samples at least."""
GROWTH_SHARE = 0.01
"""Growth is told from this share in the latter half of the samples on."""
EVEN_SHARE = 1 / 12
"""Each quarter of the latter half must bring this share of its growth. Growth in one step alone is
none that goes on.
"""


@dataclass(frozen=True)
class MemoryGrowth:
    """A `MemoryGrowth` is what a row of samples says. By default it says nothing."""

    steady_since: int | None = None
    """The samples lie within `TOLERANCE` from this step on. It is None where that is not known, or
    where too few do.
    """
    share: float = 0.0
    """The steady samples lie above or below their middle by this share."""
    is_growing: bool = False
    """The samples grow all along."""
    grown: float = 0.0
    """The samples grew by so much in the latter half; 0 unless they grow all along."""
    grows_since: int = 0
    """The latter half begins at this step."""
    per_step: float = 0.0
    """The samples grow by so much each step there."""


def memory_growth(steps: Sequence[int], values: Sequence[float]) -> MemoryGrowth:
    """Returns what samples in the order of their steps say; there are as many values as steps. They
    say nothing where there are fewer than `FEWEST_SAMPLES`.
    """
    at = np.asarray(steps)
    samples = np.asarray(values, dtype=float)
    if len(samples) < FEWEST_SAMPLES or not samples[-1] > 0:
        return MemoryGrowth()
    grown = _grown(samples)
    if grown:
        first = len(samples) // 2
        length = max(1, int(at[-1] - at[first]))
        return MemoryGrowth(
            is_growing=True, grown=grown, grows_since=int(at[first]), per_step=grown / length
        )
    # From the last sample backwards, so that place n tells of the n + 1 latest samples.
    highest = np.maximum.accumulate(samples[::-1])
    lowest = np.minimum.accumulate(samples[::-1])
    shares = (highest - lowest) / (highest + lowest)
    within = int(np.argmax(shares > TOLERANCE)) or len(samples)
    if within < FEWEST_SAMPLES:
        return MemoryGrowth()
    return MemoryGrowth(
        steady_since=int(at[len(samples) - within]), share=float(shares[within - 1])
    )


def _grown(samples: np.ndarray) -> float:
    """Returns how much the latter half of the samples[n] grew if each quarter of it did, else 0."""
    half = samples[len(samples) // 2 :]
    if len(half) < FEWEST_SAMPLES:
        return 0.0
    # Medians, so that single peaks do not count.
    medians = np.array([np.median(part) for part in np.array_split(half, 4)])
    total = medians[-1] - medians[0]
    is_even = (np.diff(medians) >= EVEN_SHARE * total).all()
    if not is_even or total <= GROWTH_SHARE * medians[0]:
        return 0.0
    # The medians of the outer quarters lie three quarters of the half apart.
    return 4 / 3 * float(total)

"""Does memory grow, or stay as it is? A statement made from samples alone, pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 0.02
"""Share by which samples that stay as they are may lie above or below their middle."""
FEWEST_SAMPLES = 8
"""That a statement is made of."""
GROWTH_SHARE = 0.01
"""Growth of the latter half of the samples from which it is told."""
EVEN_SHARE = 1 / 12
"""Of that growth, what each quarter of them must bring: growth in one step is none that goes on."""


@dataclass(frozen=True)
class MemoryGrowth:
    """What a row of samples says. `steady_since`: the step from which on all lie within
    `TOLERANCE`, None while that is unknown or too few do; `share`: how far they lie above or below
    their middle. `is_growing`: they grow all along.
    """

    steady_since: int | None = None
    share: float = 0.0
    is_growing: bool = False
    grown: float = 0.0
    """Units of the samples by which they grew in the latter half, 0 unless they grow all along."""
    grows_since: int = 0
    """The step that the latter half begins at."""
    per_step: float = 0.0
    """Growth of a step there."""


def memory_growth(steps: Sequence[int], values: Sequence[float]) -> MemoryGrowth:
    """Of samples in the order of their steps, as many values as steps. Nothing is said of fewer
    than `FEWEST_SAMPLES`.
    """
    at, samples = np.asarray(steps), np.asarray(values, dtype=float)
    if len(samples) < FEWEST_SAMPLES or not samples[-1] > 0:
        return MemoryGrowth()
    grown = _grown(samples)
    if grown:
        first = len(samples) // 2
        length = max(1, int(at[-1] - at[first]))
        return MemoryGrowth(
            is_growing=True, grown=grown, grows_since=int(at[first]), per_step=grown / length
        )
    highest, lowest = np.maximum.accumulate(samples[::-1]), np.minimum.accumulate(samples[::-1])
    shares = (highest - lowest) / (highest + lowest)
    within = int(np.argmax(shares > TOLERANCE)) or len(samples)
    if within < FEWEST_SAMPLES:
        return MemoryGrowth()
    return MemoryGrowth(
        steady_since=int(at[len(samples) - within]), share=float(shares[within - 1])
    )


def _grown(samples: np.ndarray) -> float:
    """How much the latter half grew, if it did in each quarter of it; medians, so that single peaks
    do not count. Those of the outer quarters lie three quarters of the half apart.
    """
    half = samples[len(samples) // 2 :]
    if len(half) < FEWEST_SAMPLES:
        return 0.0
    medians = np.array([np.median(part) for part in np.array_split(half, 4)])
    total = medians[-1] - medians[0]
    is_even = (np.diff(medians) >= EVEN_SHARE * total).all()
    return 4 / 3 * float(total) if total > GROWTH_SHARE * medians[0] and is_even else 0.0

"""The losses of a run's steps, prepared for the rules, with their noise. All functions are pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.runs.record.snapshot import RunSnapshot

NOISE_STEPS = 50
"""Number of steps from which the noise of the loss is taken."""
BLOCK_STEPS = 10
"""Number of steps in a block."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median in multiples of that of a mean, for normal noise."""


@dataclass(frozen=True)
class Losses:
    """Losses of a run's steps, in order."""

    values: np.ndarray
    """Losses [steps]."""
    steps: np.ndarray
    """Numbers of the steps [steps]; they leave out the steps that were skipped or thinned out."""
    rates: np.ndarray
    """Learning rates [steps]."""
    fresh: int
    """Index from which the steps are of the latest session, with its present settings."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def begun(self) -> float:
        """The loss of the first step, which is computed before its update, or infinity where it is
        not known.
        """
        return float(self.values[0]) if len(self) and self.steps[0] == 1 else math.inf

    @property
    def warm(self) -> int:
        """The index of the first step at the highest rate, where a warm-up ends."""
        return int(np.argmax(self.rates)) if len(self.rates) else 0


def losses_of(snapshot: RunSnapshot) -> Losses:
    """Returns the losses of a run."""
    table = snapshot.steps
    # They are copied: a table cannot grow while another array shares its memory.
    steps = np.array(table.step)
    first = max([(snapshot.resumed_step or 0) + 1, *(event.step for event in snapshot.changes)])
    return Losses(
        np.array(table.loss),
        steps,
        np.array(table.learning_rate),
        int(np.searchsorted(steps, first)),
    )


def median(values: np.ndarray) -> np.ndarray:
    """Returns the medians[...] of values[..., n], a scalar for values[n]. For the few values of a
    rule this is much faster than that of numpy.
    """
    count = values.shape[-1]
    half = count // 2
    ordered = np.partition(values, (max(0, half - 1), half))
    upper = ordered.take(half, axis=-1)
    return upper if count % 2 else (upper + ordered.take(half - 1, axis=-1)) / 2


def noise(losses: np.ndarray) -> float:
    """Returns the standard deviation of losses[steps] around their trend.

    It is taken from the differences of successive losses, from which a slow trend vanishes, by
    their median absolute deviation, which single spikes do not move.
    """
    if len(losses) < 3:
        return 0.0
    changes = np.diff(losses)
    deviation = median(np.abs(changes - median(changes)))
    # 1.4826 makes a median deviation a standard one; a difference has twice a loss's variance.
    return 1.4826 * float(deviation) / math.sqrt(2)


def rough_noise(losses: np.ndarray) -> float:
    """Returns the standard deviation of losses[steps] around their trend, hard steps included.

    Where steps take their rows from easy and hard sources in turn, most differences may be small.
    So all of them count here, but for the few largest, which spikes make.
    """
    changes = np.sort(np.abs(np.diff(losses)))
    kept = changes[: len(changes) - len(changes) // 12]
    return math.sqrt(float(np.mean(kept**2)) / 2) if len(kept) else 0.0


def median_error(spread: float, count: int) -> float:
    """Returns the standard error of the median of `count` losses with this noise."""
    return MEDIAN_ERROR * spread / math.sqrt(max(1, count))


def block_error(losses: np.ndarray) -> float:
    """Returns the standard error of the mean level of losses[steps], from the medians of blocks.

    Successive losses may be alike, so that their differences show less than the noise; the medians
    of blocks of `BLOCK_STEPS` are nearly independent.
    """
    count = len(losses) // BLOCK_STEPS
    if count < 3:
        return 0.0
    medians = median(losses[: count * BLOCK_STEPS].reshape(count, BLOCK_STEPS))
    # The differences of blocks are free of a slow trend, and have twice the variance of one.
    return float(np.std(np.diff(medians))) / math.sqrt(2 * count)

"""Two signs that a run learns badly are looked for here: its loss diverges, or it overfits. All
functions are pure and take a snapshot.

A sign is reported only if it is far outside the noise of the losses, so that a run that is merely
noisy shows none. Overfitting is judged as by Prechelt's generalisation loss: held-out loss above
its best so far, while the training loss goes on falling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.view.curve_points import smooth, smoothing_window
from engine.runs.snapshot import RunSnapshot

FEWEST_STEPS = 30
"""A loss is said to diverge only after this many steps."""
BASE_STEPS = 20
"""The best loss is the lowest median of this many steps."""
LAST_STEPS = 10
"""These many of the latest steps must all be above the best loss."""
NOISE_STEPS = 50
"""The noise of the loss is taken from this many of the latest steps."""
RISE_SHARE, RISE, RISE_NOISES = 0.5, 0.5, 4.0
"""A diverging loss is above its best by this share of the best, by this much, and by this many
times its noise.
"""
FEWEST_EVALS = 4
LAST_EVALS = 3
"""These many of the latest evaluations must all be above the best one."""
HELD_OUT_SHARE, HELD_OUT_RISE = 0.05, 0.03
"""A rising held-out loss is above its best by this share of the best, and by this much."""
TOKEN_SPREAD = 1.0
"""The change of a token's loss between two evaluations is taken to spread by this much (nats) over
the tokens; records do not hold it.
"""
ERRORS = 3.0
"""The rise must also exceed this many standard errors of an evaluation."""


@dataclass(frozen=True)
class HeldOut:
    """A `HeldOut` says how the held-out loss went."""

    first: float
    last: float
    best: float
    best_step: int
    is_above_best: bool
    """The last value is above the best one by more than the noise."""
    overfits: bool
    """The latest values are above the best one while the training loss is not."""


@dataclass(frozen=True)
class Divergence:
    """A `Divergence` says that the training loss rose far above its best."""

    best: float
    """This is the lowest median of `BASE_STEPS` steps."""
    last: float
    """This is the median of the latest `LAST_STEPS` steps."""


def held_out(snapshot: RunSnapshot) -> HeldOut | None:
    """Returns how the held-out loss went, or None without an evaluation."""
    evals = snapshot.evals
    if not len(evals):
        return None
    losses = np.array(evals.loss)
    place = int(np.argmin(losses))
    best = float(losses[place])
    tokens = max(1, evals.loss_tokens[-1])
    margin = max(
        HELD_OUT_SHARE * abs(best), HELD_OUT_RISE, ERRORS * TOKEN_SPREAD / math.sqrt(tokens)
    )
    above = losses > best + margin
    rises = len(losses) >= FEWEST_EVALS and bool(above[-LAST_EVALS:].all())
    return HeldOut(
        first=float(losses[0]),
        last=float(losses[-1]),
        best=best,
        best_step=evals.step[place],
        is_above_best=bool(above[-1]),
        overfits=rises and _has_not_risen(snapshot, evals.step[place]),
    )


def _has_not_risen(snapshot: RunSnapshot, since: int) -> bool:
    """Returns whether the smoothed training loss is at most what it was after step `since`."""
    steps = snapshot.steps
    if not len(steps):
        return False
    losses = smooth(np.array(steps.loss), smoothing_window(len(steps)))
    place = int(np.searchsorted(np.array(steps.step), since))
    return bool(losses[-1] <= losses[min(place, len(losses) - 1)])


def divergence(snapshot: RunSnapshot) -> Divergence | None:
    """Returns how far the training loss rose if it diverges, or else None. A spike from which it
    has recovered is none.
    """
    losses = np.array(snapshot.steps.loss)
    if len(losses) < FEWEST_STEPS:
        return None
    last = losses[-LAST_STEPS:]
    windows = np.lib.stride_tricks.sliding_window_view(losses[:-LAST_STEPS], BASE_STEPS)
    best = float(np.median(windows[::LAST_STEPS], axis=1).min())
    changes = np.diff(losses[-NOISE_STEPS:])
    deviation = np.median(np.abs(changes - np.median(changes)))
    # 1.4826 makes a median deviation a standard one; a difference has twice a loss's variance.
    noise = 1.4826 * float(deviation) / math.sqrt(2)
    limit = best + max(RISE_SHARE * abs(best), RISE, RISE_NOISES * noise)
    level = float(np.median(last))
    if level <= limit or not (last > best).all():
        return None
    return Divergence(best, level)

"""Whether the training loss rises for good, and whether its rate is too high. All functions are
pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.labels import in_digits, in_loss
from app.verdict.findings import Finding, Offer
from app.verdict.losses import NOISE_STEPS, Losses, median, noise, rough_noise
from engine.config.settings import TrainConfig
from engine.runs.record.snapshot import RunSnapshot
from engine.text import counted

FEWEST_STEPS = 30
"""Number of steps before which no loss counts as diverging."""
BASE_STEPS = 20
"""Number of steps in the median whose lowest value is the best loss."""
LAST_STEPS = 10
"""Number of latest steps that must all be above the best loss. As many good ones withdraw it."""
RISE_SHARE, RISE, RISE_NOISES = 0.5, 0.5, 4.0
"""Least rise of a diverging loss above its best: as a share of the best, in itself, and in
multiples of its noise.
"""
SPIKE_STEPS = 100
SPIKES, SPIKE_NOISES = 5, 6.0
"""Number of spikes, and their least height in multiples of the noise above the losses around them,
from which the rate counts as too high.
"""
SPIKE_LASTS, SPIKE_SHARE = 3, 0.2
"""Least number of steps that a spike lasts, since the weights suffered, and largest share of the
steps that is high. A batch of harder rows is over after a step; where many are harder, that is the
data.
"""
AROUND_STEPS = 11
"""Number of steps around a step with whose median it is compared."""
LOWER_RATE = 3
"""Divisor of the learning rate in the advice to a diverging run."""


@dataclass(frozen=True)
class Divergence:
    """A rise of the training loss far above its best."""

    best: float
    """Lowest median of `BASE_STEPS` steps before it rose."""
    last: float
    """Median of the latest `LAST_STEPS` steps."""
    highest: float
    """Highest loss."""
    limit: float
    """Loss above which it had to rise."""
    since: int
    """Step at which the rule held last."""
    is_over: bool
    """Whether as many steps in a row as the rule asks for have been back below the limit since
    then.
    """


def divergence(losses: Losses) -> Divergence | None:
    """Returns how far the training loss rose if it diverges or did so before, or else None.

    The rule is applied to every step. It holds until as many steps in a row as it asks for are
    back below the limit. After a resume or a change, it asks for steps since then, but the best
    loss of before still counts: the rows are the same.
    """
    values = losses.values
    # The rule is judged at rows[n], by the LAST_STEPS losses up to there.
    first = max(FEWEST_STEPS - 1, losses.fresh + LAST_STEPS - 1)
    rows = np.arange(first, len(values))
    if not len(rows):
        return None
    starts = rows - LAST_STEPS + 1
    medians = base_medians(values)
    known = (rows - LAST_STEPS - BASE_STEPS + 1) // LAST_STEPS  # windows before the last steps
    best = np.minimum.accumulate(medians)[known]
    floor = best + np.maximum(RISE_SHARE * np.abs(best), RISE)
    # A median is above the floor only if the highest loss is, which is faster to check.
    is_above = _rolling(np.minimum, values)[starts] > best
    is_above &= _rolling(np.maximum, values)[starts] > floor
    for place in np.flatnonzero(is_above)[::-1].tolist():
        row = int(rows[place])
        level = median(values[row + 1 - LAST_STEPS : row + 1])
        if level <= floor[place]:
            continue
        end = int(np.argmin(medians[: known[place] + 1])) * LAST_STEPS + BASE_STEPS
        spread = max(
            noise(values[max(0, row + 1 - NOISE_STEPS) : row + 1]),
            rough_noise(values[max(0, end - NOISE_STEPS) : end]),
        )
        limit = max(float(floor[place]), float(best[place]) + RISE_NOISES * spread)
        if level > limit:
            # The noise of a loss that diverges says nothing about where it was good.
            is_over = _has_recovered(values[row + 1 :], float(floor[place]))
            last = float(median(values[-LAST_STEPS:]))
            since, highest = int(losses.steps[row]), float(values.max())
            return Divergence(float(best[place]), last, highest, limit, since, is_over)
    return None


def _rolling(least: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Returns the least, or the greatest, of each `LAST_STEPS` successive values[n]."""
    of_two = least(values[:-1], values[1:])
    of_four = least(of_two[:-2], of_two[2:])
    of_eight = least(of_four[:-4], of_four[4:])
    return least(of_eight[:-2], of_two[8:])


def base_medians(values: np.ndarray) -> np.ndarray:
    """Returns the medians[windows] of `BASE_STEPS` of values[steps], one after every
    `LAST_STEPS`.
    """
    return median(np.lib.stride_tricks.sliding_window_view(values, BASE_STEPS)[::LAST_STEPS])


def _has_recovered(after: np.ndarray, limit: float) -> bool:
    """Returns whether `LAST_STEPS` in a row of after[steps] are at most `limit`."""
    if len(after) < LAST_STEPS:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(after <= limit, LAST_STEPS)
    return bool(windows.all(axis=1).any())


def spikes(losses: Losses) -> int:
    """Returns how many separate spikes the latest steps after the warm-up had."""
    values = losses.values[max(losses.warm, losses.fresh) :][-SPIKE_STEPS:]
    if len(values) < SPIKE_STEPS:
        return 0
    padded = np.pad(values, AROUND_STEPS // 2, mode="edge")
    around = median(np.lib.stride_tricks.sliding_window_view(padded, AROUND_STEPS))
    limits = around + SPIKE_NOISES * noise(values)
    high: np.ndarray = values > limits
    if high.mean() > SPIKE_SHARE:
        return 0
    # The least of some truths is whether all of them hold.
    lasting = np.lib.stride_tricks.sliding_window_view(high, SPIKE_LASTS).min(axis=1)
    begins = lasting & ~np.concatenate([[False], lasting[:-1]])
    return int(begins.sum())


# ------------------------------------------------------------------ in words


def of_divergence(losses: Losses, config: TrainConfig | None) -> Finding | None:
    """Returns that the loss diverges, or that it did so and came back."""
    rose = divergence(losses)
    if rose is None:
        return None
    above = f"The median of {LAST_STEPS} steps was above {in_loss(rose.limit)} at step"
    if rose.is_over:
        return Finding(
            "rate too high",
            "calm",
            f"The loss exploded ({in_loss(rose.best)} → {in_loss(rose.highest)}) and came back.",
            "Lower the learning rate next time.",
            f"{above} {rose.since:,}; its best median before was {in_loss(rose.best)}.",
        )
    best = min(losses.begun, rose.best)
    return Finding(
        "diverging",
        "bad",
        f"Getting worse: training loss {in_loss(best)} → {in_loss(rose.last)}.",
        too_high(config),
        f"{above} {rose.since:,}, and no {LAST_STEPS} steps in a row have been good since.",
        lower_rate(config),
    )


def of_spikes(losses: Losses, config: TrainConfig | None) -> Finding | None:
    """Returns that the learning rate is too high, if the loss has many spikes."""
    count = spikes(losses)
    if count < SPIKES:
        return None
    return Finding(
        "rate too high",
        "warn",
        "The loss jumps up again and again: the learning rate may be too high.",
        "Try a third of it.",
        f"In the latest {SPIKE_STEPS} steps it jumped {count} times, each time by more than "
        f"{SPIKE_NOISES:g} times its usual noise.",
        lower_rate(config),
    )


def of_skipped(snapshot: RunSnapshot, config: TrainConfig | None) -> Finding | None:
    """Returns that steps were skipped lately, if they were."""
    late = [each for each in snapshot.skipped if each.step > snapshot.step - SPIKE_STEPS]
    if not late:
        return None
    was = "was" if len(late) == 1 else "were"
    return Finding(
        "skipped steps",
        "warn",
        f"{counted(len(late), 'step')} {was} skipped of the latest {SPIKE_STEPS}: the "
        "loss or the gradient norm was not a finite number.",
        "Look at the rows that Log names. If they are good, try a third of the learning rate.",
        f"The {late[-1].what} of step {late[-1].step:,} was the last of them.",
        lower_rate(config),
    )


def too_high(config: TrainConfig | None) -> str:
    """Returns one sentence on the learning rate of a run that gets worse."""
    rate = "" if config is None else f" ({in_digits(config.train.learning_rate)})"
    return f"The learning rate{rate} is too high."


def lower_rate(config: TrainConfig | None) -> Offer | None:
    """Returns the offer to divide the learning rate by `LOWER_RATE`."""
    if config is None:
        return None
    rate = float(f"{config.train.learning_rate / LOWER_RATE:.2g}")
    label = f"learning rate {in_digits(rate)} instead of {in_digits(config.train.learning_rate)}"
    return Offer(label, {"train.learning_rate": rate})

"""The held-out losses are judged here: how they went, whether the run overfits, and whether they
stand still. All functions are pure.

Overfitting is judged as by Prechelt's generalisation loss: the held-out loss is above its best so
far while the training loss goes on falling. Evaluations of the same rows are compared row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.verdict.findings import Finding
from app.verdict.losses import NOISE_STEPS, Losses, median, median_error, noise
from app.words import in_digits, in_share
from engine.runs.held_out import RowLosses
from engine.runs.snapshot import RunSnapshot

FEWEST_EVALS = 4
LAST_EVALS = 3
"""These many of the latest evaluations must all be above the best one."""
RISE_SHARE, RISE = 0.05, 0.03
"""A rising held-out loss is above its best by this share of the best, and by this much."""
ERRORS = 3.0
"""The rise must also exceed this many standard errors of the difference, and this many times the
noise from one evaluation to the next.
"""
FEWEST_ROWS = 8
"""The standard error is taken from the rows if there are at least this many."""
TOKEN_SPREAD = 1.0
"""Without the losses of rows, the change of a token's loss is taken to spread by this much (nats)
over the tokens; so is that of a pair, or of an answer with a mark, over these.
"""
TRAIN_STEPS = 20
"""The training loss at an evaluation is the median of this many steps before it."""
PLATEAU_EVALS, PLATEAU_LAST, PLATEAU_SHARE, PLATEAU_GAIN = 8, 4, 0.25, 0.005
"""The loss stands still if, of at least 8 evaluations, the latest 4, which are over at least a
quarter of the run, gained less than half a percent.
"""
HIGH_RATE = 0.1
"""A loss that stands still is worth a remark while the rate is above this share of its peak."""


@dataclass(frozen=True)
class HeldOut:
    """A `HeldOut` says how the held-out loss went."""

    steps: np.ndarray
    """`steps[evaluations]` are those after which the same rows were evaluated."""
    losses: np.ndarray
    """`losses[evaluations]` are the losses of these."""
    counted: int
    """The loss is a mean over this many trained tokens or, of preferences, over so many rows."""
    is_of_preferences: bool
    """The loss is that of pairs, or of answers with marks."""
    place: int
    """The best evaluation has this index."""
    margins: np.ndarray
    """An evaluation counts as worse if it is above the best one by its `margins[evaluations]`."""
    is_paired: bool
    """The margins of the latest evaluations are taken from the losses of single rows."""

    @property
    def first(self) -> float:
        return float(self.losses[0])

    @property
    def last(self) -> float:
        return float(self.losses[-1])

    @property
    def best(self) -> float:
        return float(self.losses[self.place])

    @property
    def best_step(self) -> int:
        return int(self.steps[self.place])

    @property
    def is_above_best(self) -> bool:
        """Returns whether the last value is above the best one by more than the noise."""
        return bool(self.losses[-1] > self.best + self.margins[-1])

    @property
    def has_improved(self) -> bool:
        """Returns whether the best value is below the first one by more than 1 % and the noise."""
        least = max(0.01 * abs(self.first), ERRORS * TOKEN_SPREAD / math.sqrt(self.counted))
        return self.first - self.best > least

    def rises(self, since: int) -> bool:
        """Returns whether the latest values, all after step `since`, are above the best one."""
        above = self.losses > self.best + self.margins
        enough = len(above) >= FEWEST_EVALS and self.steps[-LAST_EVALS] > since
        return bool(enough and above[-LAST_EVALS:].all())


def held_out(snapshot: RunSnapshot) -> HeldOut | None:
    """Returns how the held-out loss went, or None without an evaluation. Only evaluations of the
    rows that are held out now are compared.
    """
    table = snapshot.evals
    if not len(table):
        return None
    counts = np.array(table.loss_tokens)
    same = counts == counts[-1]
    steps, losses = np.array(table.step)[same], np.array(table.loss)[same]
    place = int(np.argmin(losses))
    best = float(losses[place])
    # A pair has one loss, however many tokens it has.
    preferred = bool(table.preference)
    counted = max(1, _rows(snapshot) if preferred else int(counts[-1]))
    errors = np.full(len(losses), TOKEN_SPREAD / math.sqrt(counted))
    paired = []
    for late in range(max(0, len(losses) - LAST_EVALS), len(losses)):
        error = paired_error(rows_of(snapshot, steps[place]), rows_of(snapshot, steps[late]))
        if error is not None and late != place:
            errors[late] = error
            paired.append(late)
    # What comes before the best one falls, and would count as noise where it does so fast.
    after = losses[place:] if len(losses) - place > LAST_EVALS else losses
    least = max(RISE_SHARE * abs(best), RISE, ERRORS * noise(after))
    margins = np.maximum(least, ERRORS * errors)
    is_paired = len(paired) == LAST_EVALS
    return HeldOut(steps, losses, counted, preferred, place, margins, is_paired)


def _rows(snapshot: RunSnapshot) -> int:
    """Returns how many rows are held out, or 0 if the record does not say."""
    rows = snapshot.data.get("eval_rows")
    return rows if isinstance(rows, int) else 0


def rows_of(snapshot: RunSnapshot, step: int) -> RowLosses | None:
    """Returns the losses of the held-out rows after a step, or None if they are not known."""
    return snapshot.eval_rows.get(int(step))


def paired_error(before: RowLosses | None, after: RowLosses | None) -> float | None:
    """Returns the standard error of the difference between two evaluations of the same rows, or
    None where they do not tell it.

    The rows vary much more among each other than between two evaluations, so their differences are
    taken row by row, each weighted by its tokens.
    """
    if before is None or after is None or len(before.losses) != len(after.losses):
        return None
    weights = np.array(after.tokens, dtype=float)
    if len(weights) != len(after.losses):
        return None
    changes = (np.array(after.losses) - np.array(before.losses))[weights > 0]
    weights = weights[weights > 0]
    count = len(weights)
    if count < FEWEST_ROWS:
        return None
    weights /= weights.sum()
    squares = weights**2 * (changes - (weights * changes).sum()) ** 2
    return math.sqrt(float(squares.sum()) * count / (count - 1))


# ------------------------------------------------------------------ in words


def of_held_out(went: HeldOut | None, losses: Losses) -> Finding | None:
    """Returns that the run overfits, or that both of its losses rise, if they do."""
    since = int(losses.steps[losses.fresh - 1]) if 0 < losses.fresh <= len(losses) else 0
    if went is None or not went.rises(since):
        return None
    rise = in_digits(float(went.margins[-1]))
    evidence = (
        f"The latest {LAST_EVALS} of {len(went.losses)} evaluations are each more than {rise} "
        "above the best one"
    )
    numbers = f"{in_digits(went.last)} now, {in_digits(went.best)} at step {went.best_step:,}"
    if _training_rose(losses, went):
        return Finding(
            "diverging",
            "warn",
            f"Held-out and training loss both rise again: held out {numbers}.",
            "A lower learning rate is the first thing to try.",
            f"{evidence}, and the training loss is higher than it was then.",
        )
    of = "rows" if went.is_of_preferences else "tokens"
    by = "counted row by row" if went.is_paired else f"estimated from the number of their {of}"
    rises = f"eld-out loss rises while the training loss falls: {numbers}."
    return Finding(
        "overfitting" if went.is_paired else "possibly overfitting",
        "warn",
        f"H{rises}" if went.is_paired else f"Possibly overfitting: h{rises}",
        "The model learns its rows by heart: fewer steps, more data or a lower learning rate would "
        "help.",
        f"{evidence}; their noise is {by}.",
    )


def _training_rose(losses: Losses, went: HeldOut) -> bool:
    """Returns whether the training loss at the last evaluation is above that at the best one, by
    more than its noise.
    """
    ends = np.searchsorted(losses.steps, went.steps[[went.place, -1]], side="right")
    then, now = (losses.values[max(0, end - TRAIN_STEPS) : end] for end in ends)
    if not len(now):
        return False
    if len(then) < TRAIN_STEPS:  # the best one was before the first steps
        then = losses.values[:TRAIN_STEPS]
    spread = noise(losses.values[max(0, int(ends[1]) - NOISE_STEPS) : int(ends[1])])
    error = math.sqrt(2) * median_error(spread, TRAIN_STEPS)
    return bool(median(now) > median(then) + 2 * error)


def of_plateau(snapshot: RunSnapshot, went: HeldOut | None, losses: Losses) -> Finding | None:
    """Returns that the held-out loss stands still though the rate is high, if it does."""
    if went is None or len(went.losses) < PLATEAU_EVALS or not len(losses):
        return None
    if losses.rates[-1] <= HIGH_RATE * losses.rates.max():
        return None
    early = went.steps[-1] - PLATEAU_SHARE * snapshot.total_steps
    first = min(len(went.losses) - PLATEAU_LAST, int(np.searchsorted(went.steps, early)))
    if first < 1:
        return None
    before, since = float(went.losses[:first].min()), float(went.losses[first:].min())
    gain = (before - since) / abs(before) if before else 0.0
    if gain >= PLATEAU_GAIN or went.is_above_best:
        return None
    return Finding(
        "plateau",
        "calm",
        f"The held-out loss stands still at {in_digits(went.last)} since step "
        f"{int(went.steps[first - 1]):,}.",
        "It may fall again as the rate does; more of the same steps would bring little.",
        f"The latest {len(went.losses) - first} evaluations gained less than "
        f"{in_share(PLATEAU_GAIN)}, while the rate is above {in_share(HIGH_RATE)} of its peak.",
    )

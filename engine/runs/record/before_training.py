"""Whether the weights of a run are worse than those with which it began. The verdict on a run, in
the app and in a terminal, begins with this. All functions are pure.

The state before training is known from the evaluation of step 0, and from the training loss of step
1, which is computed before its update. An evaluation is the better evidence: it is of the same
rows. The first loss is that of one batch, and is compared with care.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine.runs.record.evaluations import Evaluated, margin, of_the_same_rows
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import Best

LAST_EVALS = 2
"""Number of the latest evaluations that must be worse than that before training, of a run that
continues; of one that is over, the last one.
"""
LAST_STEPS = 10
"""Without evaluations, number of the latest losses that must all be above the first one."""
RISE_SHARE, RISE = 0.5, 0.5
"""The median of these must be above the first loss by this fraction of it, and by this much,"""
NOISES = 4.0
"""and above it by this multiple of the noise. Noise counts as a fraction of the loss here: that of
a loss that has exploded tells nothing of how far the first batch may have been from the mean.
"""
NOISE_STEPS = 50
MOST = 100.0
"""Power of e that is infinite for any loss."""
FEWEST_STEPS = 30
"""Number of steps from which a run that continues is judged by its training loss."""


@dataclass(frozen=True)
class Worse:
    """A loss by which the weights are worse than before training."""

    of: Literal["validation", "training"]
    """The loss that is worse."""
    before: float
    now: float
    margin: float
    """Amount by which a loss must be above that before training."""

    def sentence(self) -> str:
        """Returns one sentence for a terminal and for a list."""
        since = "before training" if self.of == "validation" else "in the first step"
        return (
            f"Worse than before training: the {self.of} loss is {self.now:.4f}, and was "
            f"{self.before:.4f} {since}."
        )


def worse_text(snapshot: RunSnapshot) -> str:
    """Returns the end of the verdict on a run that has made its model worse: one sentence or, if
    better weights are kept, two. The text is empty for any other run.
    """
    worse, best = worse_than_before(snapshot, is_over=True), snapshot.best
    if worse is None:
        return ""
    text = worse.sentence()
    if best is not None and best.kept and worse.of == "validation" and best.loss < worse.before:
        text += f" The weights of step {best.step:,}, which are kept as the best, are better: "
        text += f"{best.loss:.4f}."
    return text


def worse_than_before(snapshot: RunSnapshot, is_over: bool | None = None) -> Worse | None:
    """Returns by what the latest weights of a run are worse than those before training, or None if
    they are not, or if it is unknown. `is_over` is the snapshot's own unless it is given: a run
    that ends asks before it is recorded.
    """
    over = snapshot.is_over if is_over is None else is_over
    evals = evaluations(snapshot)
    worse = of_evaluations(evals, over)
    if worse is not None or (evals and evals[-1].step >= snapshot.step):
        return worse
    steps = snapshot.steps
    if not len(steps) or steps.step[0] != 1:
        return None
    return of_training(steps.loss[0], steps.loss[-NOISE_STEPS:], len(steps), over)


def better_kept(snapshot: RunSnapshot) -> Best | None:
    """Returns the best weights of a run if they are kept, and for certain better than those before
    training; None where others are exported.
    """
    best = snapshot.best
    if best is None or not best.kept or snapshot.exported_step not in (None, best.step):
        return None
    return best if is_better_at(best.step, evaluations(snapshot)) else None


def is_better_at(step: int, evals: Sequence[Evaluated]) -> bool:
    """Returns whether the weights after `step` are better than those before training by more than
    the noise. `evals` are of the same rows, in order.
    """
    if not evals or evals[0].step != 0:
        return False
    return any(
        evals[0].loss > each.loss + margin(each, evals[0]) for each in evals if each.step == step
    )


def evaluations(snapshot: RunSnapshot) -> list[Evaluated]:
    """Returns the evaluations of the present validation rows, in order."""
    table = snapshot.evals
    if not len(table):
        return []
    # A pair has one loss, however many tokens it has.
    pairs = snapshot.data.get("eval_rows") if table.preference else None
    losses = [pairs] * len(table) if isinstance(pairs, int) else table.loss_tokens
    rows = snapshot.eval_rows
    found = [
        Evaluated(step, loss, tokens, count, rows.get(step))
        for step, loss, tokens, count in zip(table.step, table.loss, table.loss_tokens, losses)
    ]
    return of_the_same_rows(found)


def of_evaluations(evals: Sequence[Evaluated], is_over: bool) -> Worse | None:
    """Returns by how much the validation loss is above that before training, if it is. `evals` are
    of the same rows, in order.
    """
    if not evals or evals[0].step != 0:
        return None
    first, *later = evals
    latest = later[-1:] if is_over else later[-LAST_EVALS:]
    if len(latest) < (1 if is_over else LAST_EVALS):
        return None
    if any(each.loss <= first.loss + margin(first, each) for each in latest):
        return None
    return Worse("validation", first.loss, latest[-1].loss, margin(first, latest[-1]))


def of_training(first: float, latest: Sequence[float], count: int, is_over: bool) -> Worse | None:
    """Returns by how much the training loss is above that of the first step, if it is for certain.

    latest: the losses of the last steps, up to `NOISE_STEPS`. count: number of steps so far.
    """
    fewest = LAST_STEPS + 1 if is_over else FEWEST_STEPS
    last = latest[-LAST_STEPS:]
    if count < fewest or len(last) < LAST_STEPS or min(last) <= first:
        return None
    now = statistics.median(last)
    least = max(RISE_SHARE * abs(first), RISE)
    if first > 0:
        least = max(least, first * math.expm1(min(NOISES * _relative_noise(latest), MOST)))
    if not now > first + least:
        return None
    return Worse("training", first, now, least)


def _relative_noise(losses: Sequence[float]) -> float:
    """Returns the standard deviation of the logarithm of losses around their trend, without the
    largest twelfth of the changes, which spikes make.
    """
    logs = [math.log(loss) for loss in losses if loss > 0 and math.isfinite(loss)]
    changes = sorted(abs(late - early) for early, late in pairwise(logs))
    kept = changes[: len(changes) - len(changes) // 12]
    return math.sqrt(sum(change**2 for change in kept) / len(kept) / 2) if kept else 0.0

"""Whether a run learns at all: from its training loss and, where there are evaluations, from its
validation loss. All functions are pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.form.examples import example_on_other_data
from app.labels import in_digits, in_loss, in_share
from app.verdict.findings import Finding, Offer
from app.verdict.losses import NOISE_STEPS, Losses, block_error, median, median_error, noise
from app.verdict.next_try import TOO_SMALL, next_try
from app.verdict.validation import Validation
from engine.config.settings import TrainConfig
from engine.runs.record.snapshot import RunSnapshot
from engine.text import counted

FEWEST_STEPS = 100
"""Number of steps, besides twice the warm-up and `FEWEST_SHARE` of all steps, before which no run
counts as not learning.
"""
FEWEST_SHARE = 0.2
EARLY_STEPS = 30
"""Number of steps from which a run may count as learning."""
FIRST_STEPS = 20
"""Number of steps whose median is the loss at the beginning."""
LEAST_GAIN = 0.01
"""Share of its first value by which a loss must fall."""
LEAST_ERRORS, EARLY_ERRORS = 2.0, 3.0
"""Number of standard errors that a fall must exceed, and more while there are few steps."""
RESOLUTION = 0.03
"""Fraction of the loss that must be visible above the noise for a run to count as not learning."""
LEARNED_LOSS = 0.05
"""Loss below which nothing is left to learn from the beginning."""
JUDGED_EVERY = 10
"""Number of steps after each of which the rule is judged, so that no single step changes it."""
STEADY_SHARE = 0.4
"""Share of the fall from which a rate is too low if the second half of the run, by the sum of its
rates, brought it.
"""
HIGHER_RATE = 3
"""Factor of the learning rate in the advice to a run whose rate is too low."""
FEWEST_ANSWERS = 20
"""Number of validation prompts from which it is judged whether any answer is exact."""


@dataclass(frozen=True)
class Progress:
    """Course of the training loss from the beginning until now."""

    made: int
    """Number of steps that the run has made."""
    count: int
    """Number of steps that are judged."""
    needed: int
    """Number of steps after which it is known whether the run learns."""
    first: float
    """Loss at the beginning."""
    begun: float
    """Loss of the first step, before its update, or infinite where it is not known."""
    last: float
    """Loss of the latest fifth of the steps, or of 20."""
    least: float
    """Least fall of the loss."""
    is_learning: bool
    """Whether the loss has fallen by more than its noise."""
    is_clear: bool
    """Whether there are enough steps to find that it has not."""


def progress(losses: Losses, total: int) -> Progress:
    """Returns how the training loss went, judged after a multiple of `JUDGED_EVERY` steps.

    The first steps are compared with the latest ones, which shows a quick fall, and the first third
    with the last, which shows a slow one above more noise.
    """
    count = len(losses) - len(losses) % JUDGED_EVERY
    needed = max(FEWEST_STEPS, 2 * losses.warm, math.ceil(FEWEST_SHARE * total))
    values = losses.values[:count]
    if count < EARLY_STEPS:
        return Progress(
            len(losses), count, needed, math.nan, math.inf, math.nan, math.nan, False, False
        )
    tail, third = max(FIRST_STEPS, count // 5), count // 3
    begin, end = noise(values[:NOISE_STEPS]), noise(values[-NOISE_STEPS:])
    first, last = float(median(values[:FIRST_STEPS])), float(median(values[-tail:]))
    error = math.hypot(median_error(begin, FIRST_STEPS), median_error(end, tail))
    errors = LEAST_ERRORS if count >= needed else EARLY_ERRORS
    least = max(LEAST_GAIN * abs(first), errors * error)
    early, late = float(median(values[:third])), float(median(values[-third:]))
    slow_error = math.hypot(median_error(begin, third), median_error(end, third))
    slow_error = max(slow_error, math.sqrt(2) * block_error(values[-third:]))
    slow_least = max(LEAST_GAIN * abs(early), errors * slow_error)
    seen = LEAST_ERRORS * slow_error / max(abs(early), 1e-12)
    if seen > RESOLUTION:
        needed = max(needed, math.ceil(count * (seen / RESOLUTION) ** 2))
    is_learning = first - last > least or early - late > slow_least
    is_clear = count >= needed
    begun = losses.begun
    return Progress(len(losses), count, needed, first, begun, last, least, is_learning, is_clear)


@dataclass(frozen=True)
class Learning:
    """Whether a run learns, by all that is known of it."""

    progress: Progress
    went: Validation | None

    @property
    def falls(self) -> bool:
        """Whether one of its losses has fallen, wherever it began."""
        return self.progress.is_learning or (self.went is not None and self.went.has_improved)

    @property
    def is_above_before(self) -> bool:
        """Whether the run is no better than before training: by the validation loss or, where that
        is not known, by the loss of the first step.
        """
        if self.went is not None and len(self.went.steps) > 1 and self.went.steps[0] == 0:
            return self.went.is_above_before
        return self.progress.last >= self.progress.begun

    @property
    def learns(self) -> bool:
        """Whether a loss has fallen, and below what it was before training."""
        return self.falls and not self.is_above_before

    @property
    def does_not(self) -> bool:
        """Whether it is certain that the run does not learn."""
        is_known = self.progress.is_clear and self.progress.first >= LEARNED_LOSS
        return is_known and not self.falls and not self._validation_fell

    @property
    def _validation_fell(self) -> bool:
        went = self.went
        return went is not None and went.first - went.best >= LEAST_GAIN * abs(went.first)


def learning(snapshot: RunSnapshot, losses: Losses, went: Validation | None) -> Learning:
    """Returns whether a run learns."""
    return Learning(progress(losses, snapshot.total_steps), went)


# ------------------------------------------------------------------ in words


def of_learning(found: Learning) -> Finding:
    """Returns the finding whether the run learns, or that it is too early to know."""
    made, went = found.progress, found.went
    if found.does_not:
        return Finding(
            "not learning",
            "warn",
            f"It does not learn: the training loss went from {in_loss(made.first)} to "
            f"{in_loss(made.last)} in {made.count:,} steps.",
            "Check in New that the preview shows in green what it shall learn. If so, try three "
            "times the learning rate.",
            f"{_compared(made)}. A fall of less than {in_loss(made.least)} may be noise."
            f"{_validation_stands(went)}",
        )
    if found.falls and found.is_above_before:
        return _above_before(found)
    if not found.learns:
        return _too_early(made)
    if went is not None and len(went.losses) > 1 and went.has_improved:
        lowest = ""
        if went.place != len(went.losses) - 1:
            lowest = f", lowest {in_loss(went.best)} at step {went.best_step:,}"
        fell = f"{in_loss(went.first)} → {in_loss(went.last)}"
        text = f"Learning well. Validation loss {fell}{lowest}."
    else:
        # A quick fall may end before the first steps do, and a loss that rose at first began lower.
        began = made.first if made.last < made.first else made.begun
        began = min(began, made.begun)
        text = f"Learning well. Training loss {in_loss(began)} → {in_loss(made.last)}."
    evidence = f"{_compared(made)}." if made.count >= EARLY_STEPS else ""
    return Finding("doing well", "good", text, evidence=evidence)


def _above_before(found: Learning) -> Finding:
    """Returns that a loss falls, but from above what it was before training."""
    made, went = found.progress, found.went
    if went is not None and went.is_above_before:
        text = (
            f"The validation loss is {in_loss(went.last)}, no lower than the "
            f"{in_loss(went.first)} before training."
        )
    else:
        text = (
            f"The training loss is {in_loss(made.last)}, no lower than the "
            f"{in_loss(made.begun)} of the first step."
        )
    return Finding("too early", "calm", text, evidence=f"{_compared(made)}.")


def _too_early(made: Progress) -> Finding:
    text = f"Warming up: verdict by step {made.needed:,}."
    if made.is_clear:  # the validation loss says otherwise, or there was nothing left to learn
        text = f"The training loss has hardly changed: {in_loss(made.last)} now."
    if made.count < EARLY_STEPS:
        return Finding("too early", "calm", text)
    return Finding(
        "too early",
        "calm",
        text,
        evidence=f"{_compared(made)}. A fall of less than {in_loss(made.least)} may be noise.",
    )


def _compared(made: Progress) -> str:
    return (
        f"Typical training loss: {in_loss(made.first)} in the first {FIRST_STEPS} steps, "
        f"{in_loss(made.last)} in the latest {max(FIRST_STEPS, made.count // 5):,}"
    )


def _validation_stands(went: Validation | None) -> str:
    if went is None or len(went.losses) < 2:
        return ""
    return (
        f" The validation loss was {in_loss(went.first)} in the first evaluation and "
        f"{in_loss(went.best)} in the best one."
    )


def of_low_rate(
    losses: Losses, found: Learning, config: TrainConfig | None, passes: float | None = None
) -> Finding | None:
    """Returns that the learning rate was too low, if the loss of a finished run fell as steadily at
    its end as at its beginning, for what its rate was then. passes: those that it has made over its
    rows, if that is known.
    """
    values, rates = losses.values, losses.rates
    if len(values) < FEWEST_STEPS or losses.fresh or not found.learns:
        return None
    if config is not None and config.objective.is_preference:
        return None  # the loss of pairs may fall as long as it is let, and lower is not better
    sums = np.cumsum(rates)
    middle = int(np.searchsorted(sums, sums[-1] / 2))
    half = FIRST_STEPS // 2
    if middle < FIRST_STEPS or len(values) - middle < FIRST_STEPS:
        return None
    between = float(median(values[middle - half : middle + half]))
    first = float(median(values[:FIRST_STEPS]))
    last = float(median(values[-FIRST_STEPS:]))
    share = (between - last) / (first - last) if first > last else 0.0
    error = math.sqrt(2) * median_error(noise(values[-NOISE_STEPS:]), FIRST_STEPS)
    if share < STEADY_SHARE or between - last < EARLY_ERRORS * error:
        return None
    offer = _higher_rate(config)
    rate = ""
    if offer is not None:
        rate = f"a learning rate of {in_digits(offer.changes['train.learning_rate'])}"
    return Finding(
        "rate too low",
        "calm",
        f"The loss was still falling at the end: try {next_try('still falls', passes, rate)}.",
        "",
        f"{in_share(share)} of the fall came in the second half of the run, weighted by the "
        f"learning rate. With {in_share(STEADY_SHARE)} or more, it counts as still falling.",
        offer,
    )


def _higher_rate(config: TrainConfig | None) -> Offer | None:
    if config is None:
        return None
    rate = float(f"{HIGHER_RATE * config.train.learning_rate:.2g}")
    label = f"learning rate {in_digits(rate)} instead of {in_digits(config.train.learning_rate)}"
    return Offer(label, {"train.learning_rate": rate})


def of_answers(snapshot: RunSnapshot, found: Learning) -> Finding | None:
    """Returns that no answer is exact yet though the loss falls."""
    known = [match for match in snapshot.exact_matches if match.moment == "after"]
    if not known or known[-1].correct or known[-1].total < FEWEST_ANSWERS or not found.learns:
        return None
    return Finding(
        "nothing exact",
        "calm",
        "The loss falls, but no answer is right yet.",
        "Compare the answers before and after to see how close they come.",
        f"None of {known[-1].total:,} validation prompts got the expected answer.",
    )


def of_small_model(snapshot: RunSnapshot, config: TrainConfig | None) -> Finding | None:
    """Returns that the model of an example is too small for other data, of which it answers nothing
    right.
    """
    if config is None or example_on_other_data(config) is None:
        return None
    known = [match for match in snapshot.exact_matches if match.moment == "after" and match.total]
    if not known or known[-1].correct:
        return None
    return Finding(
        "too small",
        "calm",
        TOO_SMALL,
        "",
        f"None of {counted(known[-1].total, 'validation prompt')} got the expected answer.",
    )

"""The validation losses: how they went, whether the run overfits or memorizes its rows, whether it
is worse than before training, and whether they stand still. All functions are pure.

Overfitting is judged as by Prechelt's generalization loss: the validation loss is above its best so
far while the training loss continues to fall. Evaluations of the same rows are compared row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.labels import in_loss, in_share
from app.verdict.findings import Finding
from app.verdict.losses import NOISE_STEPS, Losses, median, median_error, noise
from app.verdict.next_try import next_try
from engine.runs.record.before_training import Worse, evaluations
from engine.runs.record.evaluations import ERRORS, RISE, RISE_SHARE, TOKEN_SPREAD, paired_error
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import Best

FEWEST_EVALS = 4
LAST_EVALS = 3
"""Number of latest evaluations that must all be above the best one."""
NOISES = 3.0
"""Multiples of the noise from one evaluation to the next that the rise must also exceed."""
TRAIN_STEPS = 20
"""Number of steps before an evaluation whose median is the training loss at it."""
PLATEAU_EVALS, PLATEAU_LAST, PLATEAU_SHARE, PLATEAU_GAIN = 8, 4, 0.25, 0.005
"""The loss stands still if, of at least 8 evaluations, the latest 4, which are over at least a
quarter of the run, gained less than half a percent.
"""
FAR_BELOW, GAP = 0.1, 0.5
"""A run memorizes its rows if its training loss is below this share of the validation loss and by
more than this below it, in its latest evaluations; if its training loss has also fallen to less
than `FAR_BELOW` of what the fall of the validation loss would have made of it; and if the
validation loss does not fall any more.
"""
MEMORIZED_EVALS = 2
"""Number of such evaluations, since the training loss shows an update one evaluation later. One is
enough in a run that is over and has no more.
"""
STILL_FALLS = 0.01
"""Share by which the latest validation loss is below all others while it falls."""
KNOWN_BY_HEART, KEPT_OF_BEFORE = 0.05, 0.5
"""Rows with a training loss below this are known by heart. Then the run memorizes them even if the
validation loss falls, while that has more than this share of what it was before training.
"""
HIGH_RATE = 0.1
"""Share of its peak above which the rate makes a loss that stands still worth a remark."""


@dataclass(frozen=True)
class Validation:
    """Course of the validation loss."""

    steps: np.ndarray
    """Steps [evaluations] after which the same rows were evaluated."""
    losses: np.ndarray
    """Losses [evaluations]."""
    counted: int
    """Number of trained tokens or, of preferences, of rows that the loss is a mean over."""
    is_of_preferences: bool
    """Whether the loss is that of pairs, or of answers with labels."""
    place: int
    """Index of the best evaluation."""
    margins: np.ndarray
    """How far [evaluations] an evaluation must be above the best one to count as worse."""
    is_paired: bool
    """Whether the margins of the latest evaluations are taken from the losses of single rows."""

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
        """Whether the last value is above the best one by more than the noise."""
        return bool(self.losses[-1] > self.best + self.margins[-1])

    @property
    def is_above_before(self) -> bool:
        """Whether the last value is not below that before training."""
        return len(self.steps) > 1 and self.steps[0] == 0 and self.last >= self.first

    @property
    def has_improved(self) -> bool:
        """Whether the best value is below the first one by more than 1 % and the noise."""
        least = max(0.01 * abs(self.first), ERRORS * TOKEN_SPREAD / math.sqrt(self.counted))
        return self.first - self.best > least

    def rises(self, since: int) -> bool:
        """Returns whether the latest values, all after step `since`, are above the best one."""
        above = self.losses > self.best + self.margins
        enough = len(above) >= FEWEST_EVALS and self.steps[-LAST_EVALS] > since
        return bool(enough and above[-LAST_EVALS:].all())


def validation(snapshot: RunSnapshot) -> Validation | None:
    """Returns how the validation loss went, or None without an evaluation. Only evaluations of the
    validation rows of now are compared.
    """
    evals = evaluations(snapshot)
    if not evals:
        return None
    steps = np.array([each.step for each in evals])
    losses = np.array([each.loss for each in evals])
    place = int(np.argmin(losses))
    best = float(losses[place])
    counted = max(1, evals[-1].counted)
    errors = np.full(len(losses), TOKEN_SPREAD / math.sqrt(counted))
    paired = []
    for late in range(max(0, len(losses) - LAST_EVALS), len(losses)):
        error = paired_error(evals[place].rows, evals[late].rows)
        if error is not None and late != place:
            errors[late] = error
            paired.append(late)
    # What comes before the best one falls, and would count as noise where it does so fast.
    after = losses[place:] if len(losses) - place > LAST_EVALS else losses
    least = max(RISE_SHARE * abs(best), RISE, NOISES * noise(after))
    margins = np.maximum(least, ERRORS * errors)
    is_paired = len(paired) == LAST_EVALS
    preferred = bool(snapshot.evals.preference)
    return Validation(steps, losses, counted, preferred, place, margins, is_paired)


# ------------------------------------------------------------------ in words


def of_validation(
    went: Validation | None,
    losses: Losses,
    passes: float | None = None,
    kept: Best | None = None,
    worse: Worse | None = None,
) -> Finding | None:
    """Returns that the run overfits, or that both of its losses rise, if they do. passes: those
    that it has made over its rows, if that is known. kept: its best weights, where they are kept
    and better than those before training; only with them it is `worse` than before.
    """
    since = int(losses.steps[losses.fresh - 1]) if 0 < losses.fresh <= len(losses) else 0
    rises = went is not None and went.rises(since)
    if went is None or not (rises or worse is not None):
        return None
    if rises or worse is None:
        rise = in_loss(float(went.margins[-1]))
        evidence = (
            f"The latest {LAST_EVALS} of {len(went.losses)} evaluations are each more than {rise} "
            "above the best one"
        )
    else:
        rise = in_loss(worse.margin)
        evidence = f"The latest evaluation is more than {rise} above the one before training"
    numbers = f"{in_loss(went.last)} now, {in_loss(went.best)} at step {went.best_step:,}"
    if _training_rose(losses, went):
        return Finding(
            "diverging",
            "bad",
            f"Validation and training loss both rise again: validation {numbers}.",
            "Try a lower learning rate first.",
            f"{evidence}, and the training loss is higher than it was then.",
        )
    of = "rows" if went.is_of_preferences else "tokens"
    chance = f"is more than chance with this number of validation {of}"
    if went.is_paired:
        chance = "is more than chance, as the single validation rows show"
    text = f"alidation loss rises while the training loss falls: {numbers}."
    text = f"V{text}" if went.is_paired else f"Possibly overfitting: v{text}"
    if kept is not None:
        text = f"{best_is_kept(kept)}."
        evidence = f"Validation loss: {numbers}. {evidence}"
    return Finding(
        "overfitting" if went.is_paired else "possibly overfitting",
        "warn",
        text,
        f"The model learns its rows by heart: {next_try('best was earlier', passes)} would help.",
        f"{evidence}. That {chance}.",
    )


def best_is_kept(kept: Best) -> str:
    """Returns, in a few words, that a run got worse after its best step, whose weights it keeps."""
    return f"Best at step {kept.step:,}, worse after; the best weights are kept"


def of_before(
    snapshot: RunSnapshot, worse: Worse | None, passes: float | None = None
) -> Finding | None:
    """Returns that the run is worse than before training, if it is, after so many passes."""
    if worse is None:
        return None
    now, before = in_loss(worse.now), in_loss(worse.before)
    if worse.of == "validation":
        text = f"Worse than before training: validation loss {before} → {now}."
    else:
        text = f"Worse than before training: training loss {before} (step 1) → {now}."
    return Finding(
        "worse than before training",
        "bad",
        text,
        _instead(snapshot, worse, passes),
        f"The {worse.of} loss rose by more than its noise, {in_loss(worse.margin)}.",
    )


def _instead(snapshot: RunSnapshot, worse: Worse, passes: float | None) -> str:
    """Returns what to take or to do instead of weights that are worse than before training."""
    best = snapshot.best
    if best is not None and worse.of == "validation" and best.loss < worse.before:
        kept = "are kept" if best.kept else "are not kept"
        return (
            f"Step {best.step:,} was better: {in_loss(best.loss)}. Its weights {kept}. "
            f"Next time try {next_try('best was earlier', passes)}."
        )
    return "These weights gain nothing. Try a lower learning rate first."


def of_memorizing(
    snapshot: RunSnapshot, went: Validation | None, losses: Losses, passes: float | None = None
) -> Finding | None:
    """Returns that the run memorizes its rows, if it does: it knows them by heart, and nothing
    else. passes: those that it has made over its rows, if that is known.
    """
    after = [] if went is None else [at for at, step in enumerate(went.steps) if step]
    fewest = 1 if snapshot.is_over else MEMORIZED_EVALS
    if went is None or len(after) < fewest or not len(losses):
        return None
    trained = math.nan
    for at in after[-MEMORIZED_EVALS:]:
        trained = _trained_before(losses, int(went.steps[at]))
        held = float(went.losses[at])
        if not (trained < FAR_BELOW * held and held - trained > GAP):
            return None
    if not went.steps[0] and went.first > 0:
        fell = went.last / went.first
        if trained >= FAR_BELOW * fell * losses.begun:
            return None  # the validation rows were harder from the beginning
    falls = len(after) > 1 and went.last < (1 - STILL_FALLS) * went.losses[:-1].min()
    is_by_heart = trained < KNOWN_BY_HEART and went.last > KEPT_OF_BEFORE * went.first
    if (falls or len(after) < 2) and not is_by_heart:
        return None
    helps = next_try("best was earlier" if went.is_above_best else "learns by heart", passes)
    best = ""
    if went.is_above_best and went.best_step:
        best = f" It was lowest at step {went.best_step:,}: {in_loss(went.best)}."
    return Finding(
        "memorizes",
        "warn",
        f"It memorizes its rows: training loss {in_loss(trained)}, validation loss "
        f"{in_loss(went.last)}.",
        f"It knows them by heart and little else: {helps} would help.",
        f"The median loss of the {TRAIN_STEPS} steps up to the latest evaluation is below "
        f"{in_share(FAR_BELOW)} of the validation loss.{best}",
    )


def _trained_before(losses: Losses, step: int) -> float:
    """Returns the median training loss of the steps up to an evaluation, or infinity if there are
    too few.
    """
    end = int(np.searchsorted(losses.steps, step, side="right"))
    if end < TRAIN_STEPS:
        return math.inf
    return float(median(losses.values[end - TRAIN_STEPS : end]))


def _training_rose(losses: Losses, went: Validation) -> bool:
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


def of_plateau(snapshot: RunSnapshot, went: Validation | None, losses: Losses) -> Finding | None:
    """Returns that the validation loss stands still though the rate is high, if it does."""
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
        f"The validation loss stands still at {in_loss(went.last)} since step "
        f"{int(went.steps[first - 1]):,}.",
        "It may fall again when the learning rate does. More steps at this rate bring little.",
        f"The latest {len(went.losses) - first} evaluations gained less than "
        f"{in_share(PLATEAU_GAIN)}, while the learning rate is above {in_share(HIGH_RATE)} of its "
        "peak.",
    )

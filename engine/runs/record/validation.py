"""The evaluations of a run: which was the best, whether its weights are kept, and the losses of
single rows.

The best has the lowest validation loss or, where a run chooses by exact match, the highest fraction
of validation prompts that are answered exactly; of equal ones the one with the lower loss. An
evaluation that did not measure what a run chooses by is not compared.

The evaluation before the first step, of step 0, is what the others are compared with. The best is
of weights that the run has trained, and must be better than those before training: where none are,
there is no best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.runs.record.evaluations import RowLosses
from engine.runs.record.event_tables import EvalTable
from engine.runs.record.events import BestBy, BestKept, EvalFinished, ExactMatchMeasured

NEWEST_ROWS = 4
"""Number of evaluations, the newest ones, for which the losses of rows are held, beside the best,
and the one before the first step.
"""


@dataclass(frozen=True)
class Score:
    """Result of the weights after a step in an evaluation."""

    step: int
    loss: float
    """Loss of the validation rows."""
    correct: int = 0
    total: int = 0
    """Number of the `total` validation prompts that were answered exactly; `total` is 0 if none was
    asked, or if the run chooses by the loss.
    """

    @property
    def share(self) -> float | None:
        """Fraction of prompts that were answered exactly, or None if none was asked."""
        return self.correct / self.total if self.total else None

    def is_better_than(self, other: Score | None, by: BestBy) -> bool:
        """Returns whether these weights are to be preferred, of two that are compared `by` this."""
        return other is None or _rank(self, by) < _rank(other, by)


@dataclass(frozen=True)
class Best(Score):
    """The weights of a run with the best score; of equal ones they are the first."""

    kept: bool = False
    """The weights of this step are on the disk (`output.keep_best`)."""

    @property
    def by(self) -> BestBy:
        """Measure by which they are the best."""
        return "exact_match" if self.total else "loss"


@dataclass
class ValidationScores:
    """Validation scores in a run's snapshot."""

    by: BestBy = "loss"
    """Measure by which the weights are compared."""
    before: Score | None = None
    """Score of the weights before the first step; None if they were not evaluated."""
    best: Best | None = None
    """Best weights after a step, if any were better than those before the first one."""
    newest: Score | None = None
    """Score of the newest evaluation after a step that can be compared."""
    since_best: int = 0
    """Number of evaluations after the best one or, where there is none, after that before the first
    step.
    """
    kept: Score | None = None
    """Score of the best of those weights that could be kept. A newer best may have found no room on
    the disk.
    """
    rows: dict[int, RowLosses] = field(default_factory=dict)
    """Losses of rows by step, as far as the record has them, in the order of steps."""

    def evaluated(self, event: EvalFinished) -> None:
        """Adds the next evaluation."""
        if self.by == "loss":
            self._compare(Score(event.step, event.loss))
        if event.row_losses:
            rows = RowLosses(tuple(event.row_losses), tuple(event.row_tokens))
            self.rows.pop(event.step, None)  # a repeated one is the newest
            self.rows[event.step] = rows
        self._hold_rows()

    def answered(self, event: ExactMatchMeasured, evals: EvalTable) -> None:
        """Adds answers to validation prompts. `evals` has the evaluations so far: they are compared
        with the loss of the newest, if that is of the same step.
        """
        is_new = self.newest is None or event.step > self.newest.step
        is_evaluated = len(evals) and evals.step[-1] == event.step
        # Answers at the end, of weights that were compared before, count no second time.
        if self.by == "exact_match" and event.total and is_new and is_evaluated:
            self._compare(Score(event.step, evals.loss[-1], event.correct, event.total))
            self._hold_rows()

    def written(self, event: BestKept) -> None:
        """Adds weights that are kept from now on, in place of earlier ones."""
        self.kept = Score(event.step, event.loss, event.correct, event.total)
        self._mark_kept()

    def begin(
        self, by: BestBy, step: int, evals: EvalTable, answers: Sequence[ExactMatchMeasured]
    ) -> None:
        """Compares anew for a session that continues from `step`, and drops what belongs to later
        steps. `evals` and `answers` are those that are left.
        """
        self.by = by
        self.rows = {of: rows for of, rows in self.rows.items() if of <= step}
        if self.kept is not None and self.kept.step > step:
            self.kept = None
        elif self.kept is not None and by == "loss":
            self.kept = Score(self.kept.step, self.kept.loss)
        self.before, self.best, self.newest, self.since_best = None, None, None, 0
        asked = {event.step: event for event in reversed(answers) if event.total}
        for place, of in enumerate(evals.step):
            if by == "loss":
                self._compare(Score(of, evals.loss[place]))
            elif of in asked:
                correct, total = asked[of].correct, asked[of].total
                self._compare(Score(of, evals.loss[place], correct, total))

    def _compare(self, score: Score) -> None:
        if score.step <= 0:
            self.before = score
            return
        self.newest = score
        if score.is_better_than(self.best or self.before, self.by):
            self.best = Best(score.step, score.loss, score.correct, score.total)
            self.since_best = 0
            self._mark_kept()
        else:
            self.since_best += 1

    def _hold_rows(self) -> None:
        """Drops the losses of rows of all evaluations but the newest, the best, the lowest, and the
        one before the first step.
        """
        held = {0, *list(self.rows)[-NEWEST_ROWS:]}
        if self.rows:  # the best by answers may not have the lowest loss
            held.add(min(self.rows, key=lambda step: self.rows[step].mean))
        if self.best is not None:
            held.add(self.best.step)
        self.rows = {step: rows for step, rows in self.rows.items() if step in held}

    def _mark_kept(self) -> None:
        if self.best is not None:
            is_kept = self.kept is not None and self.kept.step == self.best.step
            self.best = replace(self.best, kept=is_kept)


def _rank(score: Score, by: BestBy) -> tuple[float, float]:
    """Returns a pair that is smaller for better weights."""
    if by == "loss":
        return 0.0, score.loss
    # What was kept for its loss has no share, so it is worse than all that has one.
    return (1.0 if score.share is None else -score.share), score.loss

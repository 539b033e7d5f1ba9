"""Comparison of two evaluations of the same validation rows: whether one is worse than the other by
more than its noise. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RISE_SHARE, RISE = 0.05, 0.03
"""A loss that is worse is above the other one by this fraction of that, and by this much."""
ERRORS = 3.0
"""Number of standard errors of the difference that the rise must exceed."""
FEWEST_ROWS = 8
"""Number of rows from which the standard error is computed from the rows."""
TOKEN_SPREAD = 1.0
"""Standard deviation, in nats, of the change of a token's loss over the tokens, where the losses of
rows are unknown; so is that of a pair, or of an answer with a mark, over these.
"""


@dataclass(frozen=True)
class RowLosses:
    """Losses of the rows of one evaluation. They can be compared in pairs with those of another one
    of the same run: entry i of both is about the same rows, if `tokens` are equal.
    """

    losses: tuple[float, ...]
    """Mean loss over the tokens of each row that have a loss, or of each group of rows."""
    tokens: tuple[int, ...]
    """Number of tokens of the row, or of the group, that have a loss."""

    @property
    def mean(self) -> float:
        """Mean over all tokens."""
        weighted = zip(self.losses, self.tokens)
        return sum(loss * count for loss, count in weighted) / max(1, sum(self.tokens))


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of validation rows."""

    step: int
    loss: float
    tokens: int
    """Number of tokens of the rows that have a loss. Evaluations with other numbers are of other
    rows.
    """
    counted: int
    """Number of tokens or, of preferences, rows over which the loss is a mean."""
    rows: RowLosses | None = None


def paired_error(before: RowLosses | None, after: RowLosses | None) -> float | None:
    """Returns the standard error of the difference between two evaluations of the same rows, or
    None where it is unknown.

    The rows vary much more among each other than between two evaluations, so their differences are
    taken row by row, each weighted by its tokens.
    """
    if before is None or after is None or len(before.losses) != len(after.losses):
        return None
    if len(after.tokens) != len(after.losses):
        return None
    pairs = [
        (late - early, count)
        for early, late, count in zip(before.losses, after.losses, after.tokens)
        if count > 0
    ]
    if len(pairs) < FEWEST_ROWS:
        return None
    total = sum(count for _, count in pairs)
    mean = math.fsum(change * count for change, count in pairs) / total
    squares = math.fsum((count / total) ** 2 * (change - mean) ** 2 for change, count in pairs)
    return math.sqrt(squares * len(pairs) / (len(pairs) - 1))


def margin(before: Evaluated, after: Evaluated) -> float:
    """Returns by how much `after` must be above `before` to count as worse."""
    error = paired_error(before.rows, after.rows)
    if error is None:
        error = TOKEN_SPREAD / math.sqrt(max(1, after.counted))
    return max(RISE_SHARE * abs(before.loss), RISE, ERRORS * error)


def of_the_same_rows(evaluations: Sequence[Evaluated]) -> list[Evaluated]:
    """Returns the evaluations of the present validation rows, which the last one is of."""
    return [each for each in evaluations if each.tokens == evaluations[-1].tokens]

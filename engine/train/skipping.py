"""A step whose loss or gradient norm is not finite can be skipped (`train.nonfinite`).

A skipped step counts as one of the run's steps: it has read its rows, and the schedule of the
learning rate goes on as if it had been applied. It changes no weight and no moment, and AdamW does
not count it among its updates. torch's GradScaler does the same. The checkpoints keep the list of
skipped steps, so a resumed run counts alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import NonFiniteError
from engine.words import counted

MOST_IN_A_ROW = 5
"""After this many skipped steps in a row, the weights are at fault rather than the rows."""
MOST_SKIPPED = 100
"""A run skips at most this many steps."""
_ROWS_TOLD = 8


def refuse_further(error: NonFiniteError, step: int, skipped: Sequence[int]) -> None:
    """Raises NonFiniteError if step `step`, which failed with `error`, may not be skipped as well.

    `skipped` are the steps that were skipped before.
    """
    in_a_row = 0
    while step - 1 - in_a_row in skipped:
        in_a_row += 1
    if in_a_row >= MOST_IN_A_ROW:
        raise NonFiniteError(
            f"The {error.what} of step {step:,} is not a finite number, and the "
            f"{counted(in_a_row, 'step')} before it had to be skipped for the same reason, so the "
            "weights are at fault rather than the rows; start a new run with a lower "
            "train.learning_rate.",
            step,
            error.what,
        )
    if len(skipped) >= MOST_SKIPPED:
        raise NonFiniteError(
            f"The {error.what} of step {step:,} is not a finite number, and the run has skipped "
            f"{counted(len(skipped), 'step')} already, which is the most; look at the rows of "
            "skipped steps in the log, and start a new run without them.",
            step,
            error.what,
        )


def skipped_in_words(error: NonFiniteError, step: int, rows: Sequence[int], count: int) -> str:
    """Returns a sentence for the log. `count` is how many steps are skipped by now."""
    told = ", ".join(f"{row:,}" for row in rows[:_ROWS_TOLD])
    more = f" and {len(rows) - _ROWS_TOLD:,} more" if len(rows) > _ROWS_TOLD else ""
    return (
        f"Step {step:,} is skipped without an update, since its {error.what} is not a finite "
        f"number. It read the training rows {told}{more}, counted from 0. That is "
        f"{counted(count, 'skipped step')} of at most {MOST_SKIPPED}."
    )

"""A `StepOrder` judges which step numbers in a record are plausible.

A damaged digit must not hide the rest of a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 2
"""The line of an event that belongs to a step may precede the step's own line by this many
steps.
"""


@dataclass
class StepOrder:
    """A `StepOrder` keeps the latest plausible step of a record.

    - Every step has its own line. So from one step's line to another's, the step number can grow by
      at most the number of lines between them, and it never decreases within a session.
    - A number that breaks this rule is ignored.
    - Two such numbers in a row that are consecutive are accepted: in that case, the line of a
      resume or many other lines are missing.
    """

    last: int = 0
    """The latest plausible step is kept here."""
    line: int = 0
    """The latest plausible step was read from the line with this number."""
    odd: int | None = None
    """The previous step number is kept here if it was not plausible."""

    def begin(self, step: int, line: int) -> None:
        """Begins a session at line `line`, which continues after `step`."""
        self.last = step
        self.line = line
        self.odd = None

    def takes(self, step: int, line: int) -> bool:
        """Returns whether `step` is accepted at `line`, which is counted from the record's
        start.
        """
        fits = self.last < step <= self.last + line - self.line
        if fits or (self.odd is not None and step == self.odd + 1):
            # `begin` is inlined here, since this runs for each step of a long record.
            self.last = step
            self.line = line
            self.odd = None
            return True
        self.odd = step
        return False

    def may_belong(self, step: int) -> bool:
        """Returns whether an event that belongs to a step, such as an evaluation, can belong to
        `step`.

        Before the first step, any number is accepted.
        """
        return step >= 0 and (not self.last or step <= self.last + AHEAD)

"""A `StepOrder` judges which step numbers of a record can be true.

A damaged digit must not hide the rest of a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 2
"""The line of an event that belongs to a step may stand so many steps before the step's own."""


@dataclass
class StepOrder:
    """A `StepOrder` knows the latest step of a record that counts.

    - Every step has a line of its own. So from one step's line to another's, the number can grow by
      at most the number of lines between them, and it never falls within a session.
    - A number that does not fit is passed over.
    - Two numbers in a row that follow each other do count: then the line of a resume is missing, or
      many lines are.
    """

    last: int = 0
    """This is the latest step that counts."""
    line: int = 0
    """In this line stood the latest step that counts."""
    odd: int | None = None
    """The number of the step before stands here when it did not fit."""

    def begin(self, step: int, line: int) -> None:
        """Begins a session at the line `line`; it goes on after `step`."""
        self.last = step
        self.line = line
        self.odd = None

    def takes(self, step: int, line: int) -> bool:
        """Tells whether the step number at `line`, counted from the record's start, counts."""
        fits = self.last < step <= self.last + line - self.line
        if fits or (self.odd is not None and step == self.odd + 1):
            # Written out, since this runs for each step of a long record.
            self.last = step
            self.line = line
            self.odd = None
            return True
        self.odd = step
        return False

    def may_belong(self, step: int) -> bool:
        """Tells whether an event that belongs to a step, such as an evaluation, can be of `step`.

        Before the first step any number can.
        """
        return step >= 0 and (not self.last or step <= self.last + AHEAD)

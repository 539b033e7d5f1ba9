"""Which step numbers of a record can be true: a damaged digit must not hide the curve behind it."""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 2
"""Steps by which what belongs to a step may stand before its own line."""


@dataclass
class StepOrder:
    """Every step takes a line, so a number may grow by the lines since the last one at most, and
    never falls within a session. One that does not fit is passed over; two that follow each other
    do count: then it was the line of a resume that is missing, or many lines are.
    """

    last: int = 0
    """The latest step that counts."""
    line: int = 0
    """The line where it stood."""
    odd: int | None = None
    """The step before, when it did not fit."""

    def begin(self, step: int, line: int) -> None:
        """A session goes on after `step`, by the line `line`."""
        self.last, self.line, self.odd = step, line, None

    def takes(self, step: int, line: int) -> bool:
        """Whether the number of the step at `line` (lines counted from the start of the record)
        counts.
        """
        if self.last < step <= self.last + line - self.line or (
            self.odd is not None and step == self.odd + 1
        ):
            self.last, self.line, self.odd = step, line, None
            return True
        self.odd = step
        return False

    def may_belong(self, step: int) -> bool:
        """Whether something that was measured at a step, an evaluation for instance, can be of
        `step`. Before the first step nothing is known.
        """
        return step >= 0 and (not self.last or step <= self.last + AHEAD)

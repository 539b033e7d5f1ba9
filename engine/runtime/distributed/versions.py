"""The ranks agree here on which step's state their common planes hold.

- No rank writes a step into the planes before rank 0 says `Go`. Rank 0 says so once the
  clip factor is known and no reader needs the planes as they are: a checkpoint or the best weights
  that are being written while steps go on.
- A step counts as complete once every rank has written its shards.

So rank 0 always knows whether the planes are whole, also when a rank is lost: that rank cannot
have written a step that rank 0 did not let it write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.runtime.host.plane_version import PlaneVersion


class RankZeroVersion(PlaneVersion):
    """Plane version of rank 0. `go` tells the other ranks that they may write a step, and `wait`
    returns once they have written it.
    """

    def __init__(
        self, units: Sequence[str], go: Callable[[int], None], wait: Callable[[int], None]
    ):
        super().__init__()
        self._units = units
        self._go = go
        self._wait = wait
        self._going = threading.Lock()
        self._gone = 0

    def begin(self, step: int, unit: str) -> None:
        with self._going:
            if step > self._gone:
                for each in self._units:
                    super().begin(step, each)
                self._go(step)
                self._gone = step
        super().begin(step, unit)

    def complete(self, step: int) -> None:
        if step == self._gone:  # a step that is skipped is written by nobody
            self._wait(step)
        super().complete(step)

    def abort(self) -> None:
        super().abort()
        self._gone = self.step  # nobody has written more, or will


class WorkerVersion(PlaneVersion):
    """Plane version of a worker."""

    def __init__(self) -> None:
        super().__init__()
        self._told = threading.Condition()
        self._gone = 0
        self._is_over = False

    def go(self, step: int) -> None:
        """Says that rank 0 lets this rank write `step`. Any thread may call it."""
        with self._told:
            self._gone = step
            self._told.notify_all()

    def end_waits(self) -> None:
        """Says that rank 0 has no step under way any more. If an update waits for its word, its
        step was given up since a number is not finite, and the update writes back what it reads.
        Any thread may call it.
        """
        with self._told:
            self._is_over = True
            self._told.notify_all()

    def expect(self) -> None:
        """Says that a step follows, whose updates wait for rank 0's word."""
        with self._told:
            self._is_over = False

    def begin(self, step: int, unit: str) -> None:
        with self._told:
            self._told.wait_for(lambda: self._gone >= step or self._is_over)
        super().begin(step, unit)

"""A `PlaneGuard` holds back updates of planes that somebody still reads.

A checkpoint is written while steps go on. The ops that change planes call `before_change` first,
and the checkpoint decides there how long they wait (`engine.checkpoints.plane_snapshot`). No plan
has a wait for this: the guard delays an op on its own lane, and delays change no result (law 3).
"""

from __future__ import annotations

from collections.abc import Callable


class PlaneGuard:
    """A `PlaneGuard` belongs to one engine. At most one reader holds planes at a time."""

    def __init__(self) -> None:
        self._held: tuple[int, Callable[[str], None]] | None = None

    def hold(self, step: int, protect: Callable[[str], None]) -> None:
        """Makes ops of steps after `step` call ``protect(unit)`` before they change a unit's
        planes.

        It must be called when `step` has been submitted and the step after it has not.
        """
        self._held = (step, protect)

    def release(self) -> None:
        """Lets all ops go on from now on."""
        self._held = None

    def before_change(self, unit: str, step: int) -> None:
        """Returns once an op of step number `step` may change the planes of `unit`."""
        held = self._held  # read once, since another thread may release it
        if held is not None and step > held[0]:
            held[1](unit)

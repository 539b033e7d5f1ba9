"""A tracker that takes the curves of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine.runs.trackers.points import Point


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets of a run besides its curves."""

    id: str
    name: str
    folder: Path
    parameters: Mapping[str, str | int | float | bool]
    """Settings of the run by dotted name, without what may be secret."""
    known_as: str = ""
    """Id that the tracker gave the run in an earlier session, or empty."""


class Tracker(Protocol):
    """A tracker, open for one run. Its methods raise whatever its package raises."""

    run: str
    """Id by which the tracker knows the run."""
    where: str
    """Address or folder where a person finds the curves."""

    def held(self) -> Mapping[str, int]:
        """Returns the last step that it has of each curve, as far as it is known."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Takes points, which are in the order of the record."""
        ...

    def close(self, state: str, /) -> None:
        """Sends what is left. The run has ended in `state`, a value of `RunEnded.state_text`."""
        ...


@runtime_checkable
class Rewinding(Tracker, Protocol):
    """A tracker that takes the whole record at each opening, where values of steps that were
    trained again replace the earlier ones. Any other tracker keeps the first value of a step, and
    is never given a second one.
    """

    def rewind(self, step: int) -> None:
        """Forgets all values after `step`, which come again."""
        ...

"""The steps of a bench that count: those after the warm-up. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

AGREEMENT = 0.03
"""Fraction by which the longer one of two steps that agree may take more."""


@dataclass(frozen=True)
class Steady:
    """The steps that count, and their times."""

    seconds: list[float]
    """Seconds of each step that counts."""
    warm_up: int
    """Number of steps before them that do not count."""
    is_steady: bool
    """Whether two successive steps agreed, which ended the warm-up. If not, it is half of the
    steps.
    """

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def deviation(self) -> float | None:
        """Standard deviation in seconds; None of a single step."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as a bench prints them."""
        return {
            "steps": len(self.seconds),
            "warm_up_steps": self.warm_up,
            "is_steady": self.is_steady,
            "seconds": self.mean,
            "least_seconds": min(self.seconds),
            "most_seconds": max(self.seconds),
            "seconds_deviation": self.deviation,
        }


def steady(seconds: Sequence[float]) -> Steady:
    """Returns the steps that count, of those that took `seconds`, one or more in order.

    The warm-up ends with the first two successive steps that agree, and that are no slower than the
    median from then on: steps that compile may agree among themselves.
    """
    for place, (one, other) in enumerate(pairwise(seconds)):
        usual = statistics.median(seconds[place:])
        longest = max(one, other)
        if longest <= (1 + AGREEMENT) * min(one, other) and longest <= (1 + AGREEMENT) * usual:
            return Steady(list(seconds[place:]), place, True)
    half = len(seconds) // 2
    return Steady(list(seconds[half:]), half, False)


def warm_up_text(figures: dict[str, Any]) -> str:
    """Returns a text on the warm-up, for what `Steady.to_dict` returned."""
    steps, warm_up = figures["steps"], figures["warm_up_steps"]
    limit = f"{100 * AGREEMENT:.0f} %"
    if figures["is_steady"]:
        return f"{warm_up} steps, until two in a row agreed within {limit}"
    return (
        f"no two steps in a row agreed within {limit}, so the mean of the last {steps} of "
        f"{steps + warm_up} may be off; give more --seconds"
    )

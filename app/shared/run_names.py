"""Names of several runs, told apart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence


def distinct_names(runs: Sequence[tuple[str, float]]) -> list[str]:
    """Returns a name for each run, given its name and its start in Unix seconds. Runs with the same
    name get the time of their start.
    """
    counts = Counter(name for name, _ in runs)
    return [_told_apart(name, start, counts[name]) for name, start in runs]


def _told_apart(name: str, start: float, count: int) -> str:
    moment = time.strftime("%b %d, %H:%M:%S", time.localtime(start))
    return name if count == 1 else f"{name} ({moment})"

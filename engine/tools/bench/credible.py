"""Figures of a bench that cannot be true are not shown: a rate above what the machine reaches at
its best, or a fraction of more than the whole. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLERANCE = 0.1
"""Relative error of the rates that a machine reaches, which are measured before the steps."""


def share_of(rate: float | None, best: float) -> float | None:
    """Returns a rate as a fraction of the best that a machine reaches; None without a rate. A rate
    that is a little above it has reached it, and one that is far above is returned unchanged, for
    `without_doubtful` to refuse.
    """
    if rate is None:
        return None
    share = rate / best
    return 1.0 if 1 < share <= 1 + TOLERANCE else share


def without_doubtful(figures: Mapping[str, Any], shares: Mapping[str, str]) -> dict[str, Any]:
    """Returns `figures` with None for each fraction above 1 and for the figure that it belongs to,
    and a sentence on each in `doubtful`.

    shares: for the name of each fraction, that of its figure, or "" where there is none.
    """
    found = dict(figures)
    doubtful = []
    for share, figure in shares.items():
        value = figures[share]
        if value is None or value <= 1 + TOLERANCE:
            continue
        of = f"{figure} has " if figure else ""
        doubtful.append(
            f"{of}{share} of {value:.2f}, which cannot be; measure again when nothing else runs."
        )
        found |= {share: None} | ({figure: None} if figure else {})
    return found | {"doubtful": doubtful}

"""Figures of a step, from the spans of its ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from engine.planning.schedule.ops import Lane
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.stalls import overlap_seconds

PAIRS = (
    (Lane.H2D, Lane.COMPUTE),
    (Lane.D2H, Lane.COMPUTE),
    (Lane.H2D, Lane.D2H),
    (Lane.HOST, Lane.COMPUTE),
)
DEVICE_LANES = (Lane.H2D, Lane.COMPUTE, Lane.D2H)


def overlaps(spans: Sequence[Span]) -> dict[str, float]:
    """Returns the seconds in which pairs of lanes, and H2D, COMPUTE and D2H together, were busy at
    the same time.
    """
    result = {f"{a}+{b}": overlap_seconds(spans, a, b) for a, b in PAIRS}
    begins = [(span.start, span.op.lane, 1) for span in spans]
    ends = [(span.end, span.op.lane, -1) for span in spans]
    running: dict[Lane, int] = defaultdict(int)
    last = together = 0.0
    for moment, lane, change in sorted(begins + ends):
        if all(running[name] for name in DEVICE_LANES):
            together += moment - last
        running[lane] += change
        last = moment
    return result | {"H2D+COMPUTE+D2H": together}


def longest_gaps(spans: Sequence[Span], previous: Sequence[Span] | None) -> list[tuple[str, float]]:
    """Returns the 12 longest gaps between two ops of COMPUTE, longest first: the op after the gap,
    and seconds. The gap after the last op of the step before is included.
    """
    own = [span for span in spans if span.op.lane == Lane.COMPUTE]
    if previous:
        before = [span for span in previous if span.op.lane == Lane.COMPUTE]
        own = [max(before, key=lambda span: span.end), *own]
    gaps = [(after.op.label, after.start - earlier.end) for earlier, after in pairwise(own)]
    return sorted(gaps, key=lambda gap: gap[1], reverse=True)[:12]


def seconds_by_kind(spans: Sequence[Span]) -> dict[str, float]:
    """Returns the seconds that ops of each kind took together."""
    result: dict[str, float] = defaultdict(float)
    for span in spans:
        result[span.op.kind] += span.end - span.start
    return dict(result)

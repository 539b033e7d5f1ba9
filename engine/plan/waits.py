"""From the spans of a step to what a person asks: how long did compute wait, and for what? Pure
functions.

A gap is time in which the COMPUTE lane had ended one op and not begun the next. Its cause is read
off the plan: the op that the next one waited for, by the plan or because it was before it on its
lane, and that ended last, then what that op waited for in turn, back to the start of the gap.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.plan.ops import UPDATE_LANES, Lane, OfMicroBatch, Span

CAUSES = {Lane.H2D: "h2d", Lane.D2H: "d2h", Lane.HOST: "optimizer"} | dict.fromkeys(
    UPDATE_LANES, "optimizer"
)
OTHER = "other"


@dataclass(frozen=True)
class Wait:
    """A stretch in which COMPUTE waited, in seconds on the clock of the spans, and for what: h2d,
    d2h, optimizer, other.
    """

    start: float
    end: float
    cause: str


def seconds_by_cause(waits: Iterable[Wait]) -> dict[str, float]:
    """All four causes, 0.0 for those that do not occur."""
    exposed = dict.fromkeys(["h2d", "d2h", "optimizer", OTHER], 0.0)
    for wait in waits:
        exposed[wait.cause] += wait.end - wait.start
    return exposed


def waits_of(
    spans: Sequence[Span], previous: Sequence[Span] | None, inline: bool, seconds: float = math.inf
) -> list[Wait]:
    """The stretches of one step in which COMPUTE waited, in order of time; they never overlap.

    spans: one for each op of the plan, in plan order. previous: those of the step before, or None
    for the first step after a stop. inline: all lanes ran on one thread, so whatever ran in a gap
    is its cause. seconds: that the step is said to have taken; only so long before its COMPUTE lane
    ended is looked at, since a gap before may belong to the step before.
    """
    earlier = None if previous is None else _Step(previous, None)
    step = _Step(spans, earlier)
    others: list[Span] = []
    if inline:
        others = sorted(
            (s for s in [*(previous or ()), *spans] if s.op.lane != Lane.COMPUTE),
            key=lambda s: s.start,
        )
    last_end = (
        max((s.end for s in previous if s.op.lane == Lane.COMPUTE), default=None)
        if previous
        else None
    )
    begin = max((s.end for s in spans if s.op.lane == Lane.COMPUTE), default=math.inf) - seconds
    waits: list[Wait] = []
    for span in spans:
        if span.op.lane != Lane.COMPUTE:
            continue
        if last_end is not None and span.start > max(begin, last_end):
            gap_begin = max(begin, last_end)
            waits += (
                _inline_causes(gap_begin, span.start, others)
                if inline
                else _waited_for(gap_begin, span, step)
            )
        last_end = span.end if last_end is None else max(last_end, span.end)
    return _joined(waits)


def _joined(waits: Sequence[Wait]) -> list[Wait]:
    """Neighbours of one cause as one."""
    joined: list[Wait] = []
    for wait in waits:
        if wait.end <= wait.start:
            continue
        if joined and joined[-1].cause == wait.cause and joined[-1].end == wait.start:
            joined[-1] = Wait(joined[-1].start, wait.end, wait.cause)
        else:
            joined.append(wait)
    return joined


class _Step:
    """The spans of a step, and what each had to wait for."""

    def __init__(self, spans: Sequence[Span], before: _Step | None):
        self.spans, self.before = spans, before
        self.last: dict[str, Span] = {}
        self._preceding: list[Span | None] = []
        for span in spans:
            self._preceding.append(self.last.get(span.op.lane))
            self.last[span.op.lane] = span

    def waits(self, span: Span) -> list[tuple[Span, _Step]]:
        """With the step that each belongs to."""
        found = [(self.spans[k], self) for k in span.op.waits]
        preceding = self._preceding[span.op.index]
        if preceding is not None:
            found.append((preceding, self))
        if self.before is not None:
            found += [(self.before.spans[k], self.before) for k in span.op.waits_previous]
            if preceding is None and span.op.lane in self.before.last:
                found.append((self.before.last[span.op.lane], self.before))
        return found


def _waited_for(begin: float, span: Span, step: _Step) -> list[Wait]:
    """The gap from `begin` to `span`, from what its op waited for, and what that waited for in
    turn.
    """
    end, current, found = span.start, span, []
    while end > begin:
        waits = step.waits(current)
        if not waits:
            break
        limiting, step = max(waits, key=lambda wait: wait[0].end)
        if limiting.end <= begin:
            break
        # Between the end of what was waited for and the next op's start lies only launch overhead.
        # Clocks of host and device differ by microseconds, so what was waited for may seem to end
        # late.
        late = min(end, limiting.end)
        start = min(late, max(begin, limiting.start))
        found += [Wait(late, end, OTHER), Wait(start, late, CAUSES.get(limiting.op.lane, OTHER))]
        end, current = start, limiting
    return [Wait(begin, end, OTHER), *reversed(found)]


def _inline_causes(begin: float, end: float, others: Sequence[Span]) -> list[Wait]:
    """The gap from `begin` to `end` by what ran in it. `others`, in order of time, do not overlap:
    they ran on one thread.
    """
    found = []
    for other in others[max(0, bisect.bisect_right(others, begin, key=lambda s: s.start) - 1) :]:
        if other.start >= end:
            break
        start, stop = max(begin, other.start), min(end, other.end)
        if stop > start:
            found += [Wait(begin, start, OTHER), Wait(start, stop, CAUSES[other.op.lane])]
            begin = stop
    return [*found, Wait(begin, end, OTHER)]


def as_records(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Spans as the record keeps them, in plan order, in seconds from the first, to the microsecond."""
    begin = min(span.start for span in spans)
    return [
        {
            "unit": s.op.unit,
            "op": s.op.kind.value,
            "lane": s.op.lane.value,
            "micro_batch": s.op.micro_batch if isinstance(s.op, OfMicroBatch) else None,
            "start": round(s.start - begin, 6),
            "end": round(s.end - begin, 6),
        }
        for s in spans
    ]


def waits_as_records(waits: Sequence[Wait], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Waits beside `as_records(spans)`, on the same clock: one that began before the step's first
    op did has a start below 0. Those shorter than half a microsecond are left out.
    """
    begin = min(span.start for span in spans)
    records = [
        {"start": round(w.start - begin, 6), "end": round(w.end - begin, 6), "cause": w.cause}
        for w in waits
    ]
    return [record for record in records if record["end"] > record["start"]]


def overlap_seconds(spans: Sequence[Span], lane: Lane, other: Lane) -> float:
    """Seconds in which both lanes were at work."""

    def merged(name: Lane) -> list[tuple[float, float]]:
        result: list[tuple[float, float]] = []
        for start, end in sorted((s.start, s.end) for s in spans if s.op.lane == name):
            if result and start <= result[-1][1]:
                result[-1] = (result[-1][0], max(end, result[-1][1]))
            else:
                result.append((start, end))
        return result

    first, second, total = merged(lane), merged(other), 0.0
    while first and second:
        (a, b), (c, d) = first[-1], second[-1]
        total += max(0.0, min(b, d) - max(a, c))
        (first if a > c else second).pop()  # from the end: the one that begins later meets no other
    return total

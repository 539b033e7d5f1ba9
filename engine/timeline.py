"""From the spans of a step to what a person asks: how long did compute wait, and for what? Pure functions.

A gap is time in which the COMPUTE lane had ended one op and not begun the next. Its cause is read off the plan: the op
that the next one waited for, by the plan or because it was before it on its lane, and that ended last, then what that op
waited for in turn, back to the start of the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.executor import Span
from engine.plan import COMPUTE, D2H, H2D, HOST, UPDATES

CAUSES = {H2D: "h2d", D2H: "d2h", HOST: "optimizer"} | dict.fromkeys(UPDATES, "optimizer")


def exposed_seconds(spans: Sequence[Span], previous: Sequence[Span] | None, inline: bool,
                    seconds: float = math.inf) -> dict[str, float]:
    """Seconds that COMPUTE waited in one step, by cause (h2d, d2h, optimizer, other).

    spans: one for each op of the plan, in plan order. previous: those of the step before, or None for the first step
    after a stop. inline: all lanes ran on one thread, so whatever ran in a gap is its cause. seconds: that the step is said to
    have taken; only so long before its COMPUTE lane ended is looked at, since a gap before may belong to the step before.
    """
    exposed = dict.fromkeys(["h2d", "d2h", "optimizer", "other"], 0.0)
    earlier = None if previous is None else _Step(previous, None)
    step = _Step(spans, earlier)
    others = [s for s in [*(previous or ()), *spans] if s.op.lane != COMPUTE] if inline else []
    last_end = max((s.end for s in previous if s.op.lane == COMPUTE), default=None) if previous else None
    begin = max((s.end for s in spans if s.op.lane == COMPUTE), default=math.inf) - seconds
    for span in spans:
        if span.op.lane != COMPUTE:
            continue
        if last_end is not None and span.start > max(begin, last_end):
            if inline:
                _blame_inline(exposed, max(begin, last_end), span.start, others)
            else:
                _blame_waits(exposed, max(begin, last_end), span, step)
        last_end = span.end if last_end is None else max(last_end, span.end)
    return exposed


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


def _blame_waits(exposed: dict[str, float], begin: float, span: Span, step: _Step) -> None:
    end, current = span.start, span
    while end > begin:
        waits = step.waits(current)
        if not waits:
            break
        limiting, step = max(waits, key=lambda wait: wait[0].end)
        if limiting.end <= begin:
            break
        # Between the end of what was waited for and the next op's start lies only launch overhead. Clocks of host and
        # device differ by microseconds, so what was waited for may seem to end late.
        late = min(end, limiting.end)
        start = min(late, max(begin, limiting.start))
        exposed["other"] += end - late
        exposed[CAUSES.get(limiting.op.lane, "other")] += late - start
        end, current = start, limiting
    exposed["other"] += max(0.0, end - begin)


def _blame_inline(exposed: dict[str, float], begin: float, end: float, others: Sequence[Span]) -> None:
    left = end - begin
    for other in others:
        shared = min(end, other.end) - max(begin, other.start)
        if shared > 0:
            exposed[CAUSES[other.op.lane]] += shared
            left -= shared
    exposed["other"] += max(0.0, left)


def as_records(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Spans as the record keeps them, in seconds from the first, to the microsecond."""
    begin = min(span.start for span in spans)
    return [{"unit": s.op.unit, "op": s.op.kind, "lane": s.op.lane, "micro_batch": s.op.micro_batch,
             "start": round(s.start - begin, 6), "end": round(s.end - begin, 6)} for s in spans]


def overlap_seconds(spans: Sequence[Span], lane: str, other: str) -> float:
    """Seconds in which both lanes were at work."""
    def merged(name: str) -> list[tuple[float, float]]:
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

"""From the spans of a step, this file derives how long the COMPUTE lane waited, and for what. Pure
functions.

- A gap is the time between the end of one op on the COMPUTE lane and the start of the next.
- Its cause follows from the plan. Among the ops that the next one waited for, by the plan or
  because they were before it on its lane, the one that ended last is the cause.
- What that op waited for is found in the same way, and so on, back to the start of the gap.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.planning.schedule.ops import DISK_LANES, UPDATE_LANES, Lane, OfMicroBatch, Op, OpKind
from engine.planning.schedule.schedule import Span

CAUSES = (
    {Lane.H2D: "h2d", Lane.D2H: "d2h", Lane.HOST: "optimizer"}
    | dict.fromkeys(UPDATE_LANES, "optimizer")
    | dict.fromkeys(DISK_LANES, "disk")
    | {Lane.COLLECTIVE: "exchange"}
)
OTHER = "other"
"""Cause of a wait that no op explains, such as launch overhead."""


@dataclass(frozen=True)
class Wait:
    """A wait is an interval in which COMPUTE waited, in seconds on the clock of the spans. `cause`
    is what it waited for: h2d, d2h, optimizer, disk, exchange (between ranks) or other.
    """

    start: float
    end: float
    cause: str


def seconds_by_cause(waits: Iterable[Wait]) -> dict[str, float]:
    """Returns the seconds of all causes, 0.0 for those that do not occur. The disk and the exchange
    between ranks are among them only where they occur.
    """
    exposed = dict.fromkeys(["h2d", "d2h", "optimizer", OTHER], 0.0)
    for wait in waits:
        exposed[wait.cause] = exposed.get(wait.cause, 0.0) + wait.end - wait.start
    return exposed


def waits_of(
    spans: Sequence[Span], previous: Sequence[Span] | None, inline: bool, seconds: float = math.inf
) -> list[Wait]:
    """Returns the intervals of one step in which COMPUTE waited, in order of time. They never
    overlap.

    spans: one for each op of the plan, in plan order. previous: those of the step before, or None
    for the first step after a stop. inline: all lanes ran on one thread, so whatever ran in a gap
    is its cause. seconds: the reported duration of the step. Only gaps within this many seconds
    before the end of its COMPUTE lane are considered, since an earlier gap may belong to the step
    before.
    """
    step = _Step(spans, None if previous is None else _Step(previous, None))
    others = _other_lanes([*(previous or ()), *spans]) if inline else []
    last_end = _compute_end(previous or ())
    compute_end = _compute_end(spans)
    if compute_end is None:
        return []
    begin = compute_end - seconds
    waits: list[Wait] = []
    for span in spans:
        if span.op.lane != Lane.COMPUTE:
            continue
        if last_end is None:
            last_end = span.end
            continue
        gap_begin = max(begin, last_end)
        if span.start > gap_begin and inline:
            waits += _inline_causes(gap_begin, span.start, others)
        elif span.start > gap_begin:
            waits += _waited_for(gap_begin, span, step)
        last_end = max(last_end, span.end)
    return _joined(waits)


def _compute_end(spans: Sequence[Span]) -> float | None:
    """Returns when the COMPUTE lane ended its last op; None where it had none."""
    return max((span.end for span in spans if span.op.lane == Lane.COMPUTE), default=None)


def _other_lanes(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans of all lanes except COMPUTE, in order of time."""
    others = [span for span in spans if span.op.lane != Lane.COMPUTE]
    return sorted(others, key=lambda span: span.start)


def _joined(waits: Sequence[Wait]) -> list[Wait]:
    """Joins adjacent waits with the same cause, and leaves out waits of no length."""
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
    """Holds the spans of a step, and finds what each had to wait for."""

    def __init__(self, spans: Sequence[Span], before: _Step | None):
        self.spans = spans
        self.before = before
        self.last: dict[str, Span] = {}
        self._preceding: list[Span | None] = []
        for span in spans:
            self._preceding.append(self.last.get(span.op.lane))
            self.last[span.op.lane] = span

    def waits(self, span: Span) -> list[tuple[Span, _Step]]:
        """Returns the spans that `span` waited for, each with the step that it belongs to."""
        found = [(self.spans[index], self) for index in span.op.waits]
        preceding = self._preceding[span.op.index]
        if preceding is not None:
            found.append((preceding, self))
        if self.before is not None:
            before = self.before
            found += [(before.spans[index], before) for index in span.op.waits_previous]
            if preceding is None and span.op.lane in self.before.last:
                found.append((self.before.last[span.op.lane], self.before))
        return found


def _waited_for(begin: float, span: Span, step: _Step) -> list[Wait]:
    """Explains the gap from `begin` to `span` by what its op waited for, and by what that op waited
    for in turn.
    """
    end = span.start
    current = span
    found: list[Wait] = []  # from the latest to the earliest
    while end > begin:
        waits = step.waits(current)
        if not waits:
            break
        limiting, step = max(waits, key=lambda wait: wait[0].end)
        if limiting.end <= begin:
            break
        # The time from the end of the limiting op to the start of the next op is only launch
        # overhead. Clocks of host and device differ by microseconds, so the limiting op may seem to
        # end after the next one has started.
        late = min(end, limiting.end)
        start = min(late, max(begin, limiting.start))
        found.append(Wait(late, end, OTHER))
        found.append(Wait(start, late, CAUSES.get(limiting.op.lane, OTHER)))
        end = start
        current = limiting
    return [Wait(begin, end, OTHER), *reversed(found)]


def _inline_causes(begin: float, end: float, others: Sequence[Span]) -> list[Wait]:
    """Explains the gap from `begin` to `end` by what ran in it. The spans in `others` are in order
    of time and do not overlap, because they ran on one thread.
    """
    found = []
    # The last span that started before the gap may reach into it.
    first = bisect.bisect_right(others, begin, key=lambda span: span.start) - 1
    for other in others[max(0, first) :]:
        if other.start >= end:
            break
        start, stop = max(begin, other.start), min(end, other.end)
        if stop > start:
            found += [Wait(begin, start, OTHER), Wait(start, stop, CAUSES[other.op.lane])]
            begin = stop
    return [*found, Wait(begin, end, OTHER)]


def first_start(spans: Sequence[Span]) -> float:
    """Returns when the first of these ops began."""
    return min(span.start for span in spans)


def as_records(
    spans: Sequence[Span], begin: float | None = None, rank: int = 0
) -> list[dict[str, Any]]:
    """Returns the spans of a rank in the form used in run records, in plan order. Times are seconds
    from `begin`, or else from the first start, rounded to microseconds.
    """
    begin = first_start(spans) if begin is None else begin
    return records_of(ran(spans), begin, rank)


class RanOp(NamedTuple):
    """When an op ran, as a record has it, in seconds on the backend's clock."""

    unit: str
    kind: OpKind
    lane: Lane
    micro_batch: int | None
    start: float
    end: float


def _micro_batch_of(op: Op) -> int | None:
    return op.micro_batch if isinstance(op, OfMicroBatch) else None


def ran(spans: Iterable[Span]) -> list[RanOp]:
    """Returns what a record says of ops, in their order."""
    return [
        RanOp(
            span.op.unit,
            span.op.kind,
            span.op.lane,
            _micro_batch_of(span.op),
            span.start,
            span.end,
        )
        for span in spans
    ]


def records_of(ops: Iterable[RanOp], begin: float, rank: int = 0) -> list[dict[str, Any]]:
    """Returns the ops of a rank in the form used in run records, in their order. Times are seconds
    from `begin`, rounded to microseconds.
    """
    return [_as_record(op, begin) | _of_rank(rank) for op in ops]


def _of_rank(rank: int) -> dict[str, Any]:
    """Returns what a record says of a rank: nothing of rank 0, the only one in most records."""
    return {"rank": rank} if rank else {}


def _as_record(op: RanOp, begin: float) -> dict[str, Any]:
    return {
        "unit": op.unit,
        "op": op.kind.value,
        "lane": op.lane.value,
        "micro_batch": op.micro_batch,
        "start": round(op.start - begin, 6),
        "end": round(op.end - begin, 6),
    }


def waits_as_records(waits: Sequence[Wait], begin: float, rank: int = 0) -> list[dict[str, Any]]:
    """Returns the waits of a rank as records, on the same clock as `as_records`. A wait that began
    before `begin` has a negative start. Waits shorter than half a microsecond are left out.
    """
    records = []
    for wait in waits:
        start, end = round(wait.start - begin, 6), round(wait.end - begin, 6)
        if end > start:
            record = {"start": start, "end": end, "cause": wait.cause}
            records.append(record | _of_rank(rank))
    return records


def overlap_seconds(spans: Sequence[Span], lane: Lane, other: Lane) -> float:
    """Returns the number of seconds in which both lanes were busy."""
    ours, theirs = _stretches(spans, lane), _stretches(spans, other)
    total = 0.0
    while ours and theirs:
        our_start, our_end = ours[-1]
        their_start, their_end = theirs[-1]
        total += max(0.0, min(our_end, their_end) - max(our_start, their_start))
        # The interval that begins later overlaps no earlier interval of the other lane.
        if our_start > their_start:
            ours.pop()
        else:
            theirs.pop()
    return total


def _stretches(spans: Sequence[Span], lane: Lane) -> list[tuple[float, float]]:
    """Returns the intervals in which a lane was busy, in order of time. Adjacent ones are joined
    into one.
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans if span.op.lane == lane):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found

"""Recorded spans prepared for drawing: grouped by lane, merged down to a limited number, and turned
into the phases of a step. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypeVar

from engine.planning.schedule.ops import RARE_LANES, Lane
from engine.runs.record.events import Span, Wait

MAX_SPANS = 1500
MAX_PHASES = 240
LANES = (
    Lane.H2D,
    Lane.STATES_IN,
    Lane.COMPUTE,
    Lane.UPDATE,
    Lane.D2H,
    Lane.STATES_OUT,
    Lane.GRADIENTS_OUT,
    Lane.HOST,
    Lane.COLLECTIVE,
    Lane.READ,
    Lane.WRITE,
)
"""Lanes from top to bottom: transfers to the device, work on it, transfers from it, the host, the
other GPUs, and the disk.
"""
GAPS_SEEN = 500
"""The drawn time divided by this number is the shortest gap between spans that is drawn."""

PHASES = {
    "embed": "Forward",
    "forward": "Forward",
    "loss": "Loss",
    "recompute": "Backward",
    "backward": "Backward",
    "embed_backward": "Backward",
    "reduce": "Backward",
}
"""Phase that each op of COMPUTE begins. Ops that are not listed here belong to the current phase.
"""

Window = tuple[float, float]
"""Start and end, in seconds from the step's first op."""

Interval = TypeVar("Interval", Span, Wait)


class TimedSpan(Span):
    """Span with the predicted duration of its op, where there is one."""

    predicted: NotRequired[float]


class MergedSpan(TimedSpan):
    """One bar of the drawing, which represents neighboring spans of one lane."""

    count: int
    """Number of spans that the bar represents."""
    last: str
    """Unit of the last of these spans; `unit` is that of the first."""
    share: dict[str, float]
    """Seconds of each op in the bar."""


def within(intervals: Sequence[Interval], window: Window | None) -> list[Interval]:
    """Returns the spans, or the waits, that are at least partly inside the window, or all of them
    without a window.
    """
    if window is None:
        return list(intervals)
    begin, end = window
    return [each for each in intervals if each["end"] >= begin and each["start"] <= end]


def lane_names(spans: Sequence[Span]) -> list[Lane]:
    """Returns the lanes of a step. Those that only some plans use are included only if they have
    spans, the other lanes always.
    """
    used = {span["lane"] for span in spans}
    return [lane for lane in LANES if lane in used or lane not in RARE_LANES]


def lanes_of(
    spans: Sequence[Span], limit: int = MAX_SPANS, names: Sequence[Lane] | None = None
) -> dict[Lane, list[MergedSpan]]:
    """Returns the spans of each lane in order of time, at most `limit` in all. `names` are the
    lanes; by default, they are the lanes that `spans` use.

    Neighbors of a lane are merged until the limit is met: the shortest first, and those of one op
    before those of several. The merged span has the op that fills most of it.
    """
    lanes: dict[Lane, list[MergedSpan]] = {}
    for lane in names or lane_names(spans):
        own = [_unmerged(span) for span in spans if span["lane"] == lane]
        lanes[lane] = sorted(own, key=_start)
    first = min((span["start"] for span in spans), default=0.0)
    last = max((span["end"] for span in spans), default=0.0)
    width = (last - first) / MAX_SPANS
    # Passes alternate: first neighbors of one op are merged up to a width, then any neighbors up
    # to that width, then the width is doubled.
    is_any_op = False
    while sum(map(len, lanes.values())) > limit:
        lanes = {lane: _merge(own, width, is_any_op) for lane, own in lanes.items()}
        if is_any_op:
            width *= 2
        is_any_op = not is_any_op
    return lanes


def _start(interval: Span | Wait) -> float:
    return interval["start"]


def _unmerged(span: Span) -> MergedSpan:
    share = {span["op"]: span["end"] - span["start"]}
    # The copy also has the prediction if `span` is a `TimedSpan`.
    return {**span, "count": 1, "last": span["unit"], "share": share}


def _merge(spans: list[MergedSpan], width: float, is_any_op: bool) -> list[MergedSpan]:
    """Returns the spans of a lane after one pass, which joins neighbors as long as the result is
    no longer than `width` seconds.
    """
    joined: list[MergedSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if (
            last is not None
            and span["end"] - last["start"] <= width
            and (is_any_op or span["op"] == last["op"])
        ):
            joined[-1] = _both(last, span)
        else:
            joined.append(span)
    return joined


def _both(one: MergedSpan, other: MergedSpan) -> MergedSpan:
    """Returns the span that represents two neighbors."""
    share = one["share"].copy()
    for op, seconds in other["share"].items():
        share[op] = share.get(op, 0.0) + seconds
    both = one.copy()
    both["end"] = max(one["end"], other["end"])
    both["last"] = other["last"]
    both["share"] = share
    both["count"] = one["count"] + other["count"]
    both["op"] = max(share, key=share.__getitem__)
    return both


def gaps_of(
    compute: Sequence[Span], length: float, window: Window | None = None
) -> list[tuple[float, float]]:
    """Returns the gaps between the spans of the COMPUTE lane that are long enough to be seen, as
    pairs of start and end in seconds. The step is `length` seconds long. If `compute` has only the
    spans of a `window`, only the window is searched for gaps.
    """
    begin, end = window or (0.0, length)
    shortest = (end - begin) / GAPS_SEEN
    gaps = []
    busy_until = max(0.0, begin)
    for span in compute:
        if span["start"] - busy_until > shortest:
            gaps.append((busy_until, span["start"]))
        busy_until = max(busy_until, span["end"])
    return gaps


def longest(waits: Sequence[Wait], limit: int) -> list[Wait]:
    """Returns the longest waits, at most `limit`, in order of time."""
    kept = sorted(waits, key=lambda wait: wait["start"] - wait["end"])[:limit]
    return sorted(kept, key=_start)


@dataclass(frozen=True)
class Phase:
    """Part of a step; its times are in seconds from the step's first op."""

    name: str
    """Forward, Loss or Backward, or Updates once COMPUTE has finished."""
    label: str
    """Name with the round that the phase belongs to, if a step has several."""
    short: str
    """Label of a phase that is drawn narrow."""
    start: float
    end: float


def phases_of(spans: Sequence[Span]) -> list[Phase]:
    """Returns the phases of a step from its COMPUTE spans, in order of time and without gaps. If
    there are more than MAX_PHASES, the shortest are left out. Without COMPUTE spans of a known
    phase, there are no phases.
    """
    compute = sorted((span for span in spans if span["lane"] == Lane.COMPUTE), key=_start)
    turns = _turns(compute)
    if not turns:
        return []
    done = max(span["end"] for span in compute)
    end = max(span["end"] for span in spans)
    rounds = sum(name == "Forward" for name, _ in turns)
    number = 0
    phases = []
    for index, (name, start) in enumerate(turns):
        is_last = index + 1 == len(turns)
        stop = done if is_last else turns[index + 1][1]
        number += name == "Forward"
        if rounds > 1:
            label, short = f"{name}, round {number} of {rounds}", f"{name} {number}/{rounds}"
        else:
            label = short = name
        phases.append(Phase(name, label, short, start, stop))
    if end > done:
        phases.append(Phase("Updates", "Updates", "Updates", done, end))
    if len(phases) > MAX_PHASES:
        kept = sorted(phases, key=lambda phase: phase.start - phase.end)[:MAX_PHASES]
        phases = sorted(kept, key=lambda phase: phase.start)
    return phases


def _turns(compute: Sequence[Span]) -> list[tuple[str, float]]:
    """Returns each phase that COMPUTE begins, with the time at which it does."""
    turns: list[tuple[str, float]] = []
    for span in compute:
        name = PHASES.get(span["op"])
        if name is not None and (not turns or turns[-1][0] != name):
            turns.append((name, span["start"]))
    return turns

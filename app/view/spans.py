"""Recorded spans as they can be drawn: by lane, merged to a bounded number, and as the phases of a
step. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.plan.ops import UPDATE_LANES, Lane

MAX_SPANS = 1500
MAX_PHASES = 240
LANES = (Lane.H2D, Lane.STATES_IN, Lane.COMPUTE, Lane.UPDATE, Lane.D2H, Lane.STATES_OUT, Lane.HOST)
"""From top to bottom: what comes in, what the device does with it, what goes out, and the host."""

PHASES = {
    "embed": "Forward",
    "forward": "Forward",
    "loss": "Loss",
    "recompute": "Backward",
    "backward": "Backward",
    "embed_backward": "Backward",
    "reduce": "Backward",
}
"""Of an op of COMPUTE; the others belong to whatever is going on."""


Window = tuple[float, float]
"""A stretch of a step, in seconds from its first op: from, to."""


def within(pieces: list[dict[str, Any]], window: Window | None) -> list[dict[str, Any]]:
    """The spans, or waits, that the window shows at least a part of; all of them without one."""
    if window is None:
        return pieces
    return [piece for piece in pieces if piece["end"] >= window[0] and piece["start"] <= window[1]]


def lane_names(spans: list[dict[str, Any]]) -> list[str]:
    """The lanes of a step: those of optimizers on the device where they have spans, the others
    always.
    """
    used = {span["lane"] for span in spans}
    return [lane for lane in LANES if lane in used or lane not in UPDATE_LANES]


def lanes_of(
    spans: list[dict[str, Any]], limit: int = MAX_SPANS, names: list[str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Spans by lane in order of time, at most `limit` in all: the shortest neighbours of a lane are
    merged first, those of one op before others. A merged span has `count` > 1 and the op that fills
    most of it. `names`: the lanes, those of `spans` if not given.
    """
    lanes = {
        lane: sorted(
            (span for span in spans if span["lane"] == lane), key=lambda span: span["start"]
        )
        for lane in names or lane_names(spans)
    }
    length = max((span["end"] for span in spans), default=0.0) - min(
        (span["start"] for span in spans), default=0.0
    )
    merged = {
        lane: [
            dict(span, count=1, last=span["unit"], share={span["op"]: span["end"] - span["start"]})
            for span in own
        ]
        for lane, own in lanes.items()
    }
    width, any_op = length / MAX_SPANS, False
    while sum(map(len, merged.values())) > limit:
        merged = {lane: _merge(own, width, any_op) for lane, own in merged.items()}
        width, any_op = (2 * width, False) if any_op else (width, True)
    return merged


def _merge(spans: list[dict[str, Any]], width: float, any_op: bool) -> list[dict[str, Any]]:
    """One pass over a lane that joins neighbours while the result is no longer than `width`
    seconds.
    """
    joined: list[dict[str, Any]] = []
    for span in spans:
        last = joined[-1] if joined else None
        if (
            last is not None
            and span["end"] - last["start"] <= width
            and (any_op or span["op"] == last["op"])
        ):
            share = dict(last["share"])
            for op, seconds in span["share"].items():
                share[op] = share.get(op, 0.0) + seconds
            joined[-1] = dict(
                last,
                end=max(last["end"], span["end"]),
                last=span["last"],
                share=share,
                count=last["count"] + span["count"],
                op=max(share, key=share.get),
            )
        else:
            joined.append(span)
    return joined


def gaps_of(
    compute: list[dict[str, Any]], length: float, window: Window | None = None
) -> list[tuple[float, float]]:
    """Gaps between the spans of the COMPUTE lane that are long enough to be seen, as (start, end)
    in seconds. `length`: of the step; `window`: where only the spans in it are given.
    """
    begin, end = window or (0.0, length)
    gaps, busy_until = [], max(0.0, begin)
    for span in compute:
        if span["start"] - busy_until > (end - begin) / 500:
            gaps.append((busy_until, span["start"]))
        busy_until = max(busy_until, span["end"])
    return gaps


def longest(waits: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit` of the waits, in order of time."""
    kept = sorted(waits, key=lambda wait: wait["start"] - wait["end"])[:limit]
    return sorted(kept, key=lambda wait: wait["start"])


@dataclass(frozen=True)
class Phase:
    """A stretch of a step, in seconds from its first op: Forward, Loss, Backward, or Updates once
    COMPUTE has done all. `label` and `short` also say of which round, where there are several.
    """

    name: str
    label: str
    short: str
    start: float
    end: float


def phases_of(spans: list[dict[str, Any]], limit: int = MAX_PHASES) -> list[Phase]:
    """The phases of a step by its COMPUTE spans, in order of time and without gaps. Of more than
    `limit`, the shortest are left out. Empty without COMPUTE spans of a known phase.
    """
    compute = sorted(
        (span for span in spans if span["lane"] == Lane.COMPUTE), key=lambda span: span["start"]
    )
    turns: list[tuple[str, float]] = []
    for span in compute:
        name = PHASES.get(span["op"])
        if name is not None and (not turns or turns[-1][0] != name):
            turns.append((name, span["start"]))
    if not turns:
        return []
    rounds = sum(name == "Forward" for name, _ in turns)
    done, end = max(span["end"] for span in compute), max(span["end"] for span in spans)
    phases, number = [], 0
    for (name, start), (_, stop) in zip(turns, [*turns[1:], ("", done)]):
        number += name == "Forward"
        label, short = (
            (f"{name}, round {number} of {rounds}", f"{name} {number}/{rounds}")
            if rounds > 1
            else (name, name)
        )
        phases.append(Phase(name, label, short, start, stop))
    if end > done:
        phases.append(Phase("Updates", "Updates", "Updates", done, end))
    if len(phases) > limit:
        kept = sorted(phases, key=lambda phase: phase.start - phase.end)[:limit]
        phases = sorted(kept, key=lambda phase: phase.start)
    return phases

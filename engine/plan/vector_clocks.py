"""A vector clock gives, for each lane, the latest op that is known to have finished. No torch.

Ops of one lane run in order, so the latest finished op of a lane implies that all ops before it
have finished. When an op waits for another, everything in the other's clock has finished too, so
the clocks are merged (Mattern, "Virtual time and global states of distributed systems", 1989).
"""

from __future__ import annotations

from engine.plan.ops import Lane

VectorClock = dict[Lane, int]
"""The key is a lane, and the value is the position of its latest op that has finished."""


def merge(clock: VectorClock, other: VectorClock) -> None:
    """Raises the positions in `clock` to those in `other` where the latter are later."""
    for lane, position in other.items():
        if position > clock.get(lane, -1):
            clock[lane] = position

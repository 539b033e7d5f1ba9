"""A vector clock tells what is known to have finished: for each lane, the latest op that has. No
torch.

Ops of one lane run in order, so the latest finished op of a lane stands for all ops before it. When
an op waits for another, everything in the other's clock has finished too, so the clocks are merged
(Mattern, "Virtual time and global states of distributed systems", 1989).
"""

from __future__ import annotations

from engine.plan.ops import Lane

VectorClock = dict[Lane, int]
"""For each lane, it is the position of the latest op that has finished."""


def merge(clock: VectorClock, other: VectorClock) -> None:
    """Adds to `clock` what `other` knows to have finished."""
    for lane, position in other.items():
        if position > clock.get(lane, -1):
            clock[lane] = position

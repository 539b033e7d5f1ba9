"""`simulate`: when every op of a plan would run, from how long each takes. Pure arithmetic, no
torch.

Lanes are what the backends are: each runs its ops in plan order, an op starts once its lane is free
and all that it waits for has ended. How long an op takes is estimated in `engine.fit.cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.plan.ops import Lane, Op, StepPlan

_STEPS = 4
"""Steps in a row after which the time of one no longer depends on the first."""


@dataclass(frozen=True)
class Simulated:
    """A step in the steady state."""

    seconds: float
    """From the moment a step is applied to the moment the next one is."""
    busy: dict[Lane, float]
    """Seconds of work by lane."""
    starts: tuple[float, ...]
    """When each op begins, in seconds from the first op of its step, in plan order."""
    ends: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """Seconds in which COMPUTE had nothing to do."""
        return max(0.0, self.seconds - self.busy[Lane.COMPUTE])


def simulate(plan: StepPlan, seconds_of: Callable[[Op], float], inline: bool = False) -> Simulated:
    """`seconds_of`: how long an op runs on its lane. inline: all lanes are one thread, as on the
    CPU.
    """
    durations = [seconds_of(op) for op in plan.ops]
    free = dict.fromkeys(Lane, 0.0)
    previous: Sequence[float] = ()
    applied, starts, ends = [0.0], [], []
    for _ in range(_STEPS):
        starts, ends = [], []
        for op, duration in zip(plan.ops, durations):
            lane = Lane.COMPUTE if inline else op.lane
            start = max(
                [free[lane], *(ends[k] for k in op.waits)]
                + ([previous[k] for k in op.waits_previous] if previous else [])
            )
            starts.append(start)
            ends.append(start + duration)
            free[lane] = start + duration
        applied.append(max(ends))
        previous = ends
    busy = {lane: sum(d for op, d in zip(plan.ops, durations) if op.lane == lane) for lane in Lane}
    begin = min(starts, default=0.0)
    return Simulated(
        applied[-1] - applied[-2],
        busy,
        tuple(start - begin for start in starts),
        tuple(end - begin for end in ends),
    )

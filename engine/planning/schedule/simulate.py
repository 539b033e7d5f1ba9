"""`simulate` computes when every op of a plan would run, given the duration of each op. Pure
arithmetic, no torch.

- Lanes are simulated as the backends run them: each lane runs its ops in plan order.
- An op starts once its lane is free and every op that it waits for has ended, in this step or in
  the step before.
- The plan is run for a few steps in a row. By the last of them, the time from one step's end to the
  next no longer depends on the first step. The times of the last step are returned.

How long an op takes is estimated in `engine.planning.fit.cost_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.planning.schedule.ops import Lane, Op
from engine.planning.schedule.schedule import StepPlan

STEPS = 4
"""Number of consecutive steps after which the time of a step no longer depends on the first."""


@dataclass(frozen=True)
class Simulated:
    """Times of a simulated step in the steady state."""

    seconds: float
    """The time from the moment a step is applied to the moment the next one is applied."""
    busy: dict[Lane, float]
    """Seconds of the step for which each lane is busy."""
    starts: tuple[float, ...]
    """Seconds after the first op of its step at which each op begins, in plan order."""
    ends: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """Seconds in which COMPUTE had nothing to do."""
        return max(0.0, self.seconds - self.busy[Lane.COMPUTE])


def simulate(
    plan: StepPlan, seconds_of: Callable[[Op], float], inline: bool = False, steps: int = STEPS
) -> Simulated:
    """Returns the times at which the ops of `plan` would run.

    seconds_of: how long an op runs on its lane. inline: all lanes run on one thread, as on the CPU.
    steps: number that run in a row, the last of which counts. One alone begins when nothing runs
    any more.
    """
    durations = [seconds_of(op) for op in plan.ops]
    free = dict.fromkeys(Lane, 0.0)
    applied = [0.0]
    starts: list[float] = []
    ends: list[float] = []
    for _ in range(steps):
        starts, ends = _run_step(plan.ops, durations, free, ends, inline)
        applied.append(max(ends))
    busy = dict.fromkeys(Lane, 0.0)
    for op, duration in zip(plan.ops, durations):
        busy[op.lane] += duration
    begin = min(starts, default=0.0)
    return Simulated(
        seconds=applied[-1] - applied[-2],
        busy=busy,
        starts=tuple(start - begin for start in starts),
        ends=tuple(end - begin for end in ends),
    )


def _run_step(
    ops: Sequence[Op],
    durations: Sequence[float],
    free: dict[Lane, float],
    previous: Sequence[float],
    inline: bool,
) -> tuple[list[float], list[float]]:
    """Returns when the ops of one step start and end, and updates `free`, the time at which each
    lane becomes free. previous: when the ops of the step before ended; empty for the first step.
    """
    starts: list[float] = []
    ends: list[float] = []
    for op, duration in zip(ops, durations):
        lane = Lane.COMPUTE if inline else op.lane
        start = free[lane]
        for index in op.waits:
            start = max(start, ends[index])
        if previous:
            for index in op.waits_previous:
                start = max(start, previous[index])
        starts.append(start)
        ends.append(start + duration)
        free[lane] = start + duration
    return starts, ends

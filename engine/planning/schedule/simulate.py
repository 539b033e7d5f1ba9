"""`simulate` computes when every op of a plan would run, given the duration of each op. Pure
arithmetic, no torch.

- Lanes are simulated as the backends run them: each lane runs its ops in plan order.
- An op starts once its lane is free, what it reads has been written, and nothing uses what it
  overwrites any more, in this step or in the step before. The waits of a plan say the same with
  fewer words (`derive_waits`). They are not needed here: finding them takes longer than all the
  rest, and the planner simulates a dozen plans for each choice.
- The plan is run for a few steps in a row. By the last of them, the time from one step's end to the
  next no longer depends on the first step. The times of the last step are returned.

How long an op takes is estimated in `engine.planning.fit.simulate_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.planning.schedule.buffers import Buffer
from engine.planning.schedule.ops import Lane, Op, Uses
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
    clock = _Clock(plan.ops, inline)
    applied = [0.0]
    starts: list[float] = []
    ends: list[float] = []
    for _ in range(steps):
        starts, ends = clock.run_step(durations)
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


class _Clock:
    """The times at which lanes become free and buffers were last written and read."""

    def __init__(self, ops: Sequence[Op], inline: bool):
        buffers: dict[Buffer, int] = {}
        lanes = dict.fromkeys(Lane, 0) if inline else {lane: at for at, lane in enumerate(Lane)}

        def numbers(uses: Uses) -> list[int]:
            # Numbers take a fraction of the time of buffers, whose hashes are those of four fields.
            return [buffers.setdefault(buffer, len(buffers)) for buffer, _ in uses]

        self._ops = [(lanes[op.lane], numbers(op.reads), numbers(op.writes)) for op in ops]
        self._free = [0.0] * len(Lane)
        self._written = [0.0] * len(buffers)
        self._read = [0.0] * len(buffers)
        """When the last op ends that has read a buffer since it was written."""

    def run_step(self, durations: Sequence[float]) -> tuple[list[float], list[float]]:
        """Returns when the ops of one step start and end, after the steps before."""
        free, written, read = self._free, self._written, self._read
        starts: list[float] = []
        ends: list[float] = []
        for (lane, reads, writes), duration in zip(self._ops, durations):
            start = free[lane]
            for buffer in reads:
                if written[buffer] > start:
                    start = written[buffer]
            for buffer in writes:
                if written[buffer] > start:
                    start = written[buffer]
                if read[buffer] > start:
                    start = read[buffer]
            end = start + duration
            for buffer in reads:
                if end > read[buffer]:
                    read[buffer] = end
            for buffer in writes:
                written[buffer] = end
                read[buffer] = 0.0
            starts.append(start)
            ends.append(end)
            free[lane] = end
        return starts, ends

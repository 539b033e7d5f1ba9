"""`costs_of` finds what it costs a step that units live where they do. It simulates the plan, which
takes longer than to say what lies where (`engine.planning.fit.pool`). No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.settings import TrainConfig
from engine.machine.device import rates_of
from engine.machine.disk_rates import with_disk
from engine.machine.read_machine import Machine
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.pool import Units, units_by_place
from engine.planning.fit.requirements import NOTHING_MORE, Requirements, SessionFacts
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.buffers import Word
from engine.planning.schedule.ops import Lane, Op, OpKind
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.simulate import Simulated
from engine.planning.shape.model_shape import ModelShape

LEAST_SHARE = 0.0005
"""Fraction of a step below which work is not shown."""


class Work(Word):
    """A step does this work beside computing, since not everything is in one place."""

    TO_GPU = "to_gpu"
    """Weights, gradients and states are copied over the bus to the GPU."""
    TO_HOST = "to_host"
    """Gradients and states are copied over the bus to RAM."""
    HOST_OPTIMIZER = "host_optimizer"
    GPU_OPTIMIZER = "gpu_optimizer"
    BLOCK_INPUTS = "block inputs"
    """Inputs of blocks are copied over the bus, both ways."""
    COLLECTIVE = "exchange"
    """GPUs gather weights from each other, and add up their gradient accumulators."""
    DISK = "disk"
    """Moments and block inputs are read from the disk and written there."""


_WORK = {
    OpKind.PREFETCH: Work.TO_GPU,
    OpKind.FETCH_GRAD: Work.TO_GPU,
    OpKind.FETCH_STATES: Work.TO_GPU,
    OpKind.FETCH_GRADIENT: Work.TO_GPU,
    OpKind.OFFLOAD: Work.TO_HOST,
    OpKind.OFFLOAD_KEPT_GRADIENT: Work.TO_HOST,
    OpKind.OFFLOAD_WEIGHTS: Work.TO_HOST,
    OpKind.OFFLOAD_STATES: Work.TO_HOST,
    OpKind.UPDATE: Work.HOST_OPTIMIZER,
    OpKind.UPDATE_MOMENTS: Work.HOST_OPTIMIZER,
    OpKind.DEVICE_UPDATE: Work.GPU_OPTIMIZER,
    OpKind.UPDATE_IN_PLACE: Work.GPU_OPTIMIZER,
    OpKind.OFFLOAD_BLOCK_INPUT: Work.BLOCK_INPUTS,
    OpKind.FETCH_BLOCK_INPUT: Work.BLOCK_INPUTS,
    OpKind.ALL_GATHER: Work.COLLECTIVE,
    OpKind.REDUCE_SCATTER: Work.COLLECTIVE,
    OpKind.READ_STATES: Work.DISK,
    OpKind.WRITE_STATES: Work.DISK,
    OpKind.READ_BLOCK_INPUT: Work.DISK,
    OpKind.WRITE_BLOCK_INPUT: Work.DISK,
}


@dataclass(frozen=True)
class Cost:
    """What some units cost a step, in seconds of the simulated step."""

    busy: Mapping[Work, float]
    """Seconds that lanes spend on each work. They run beside each other and beside computing, so a
    step does not take that much longer.
    """
    waited: Mapping[Work, float]
    """Seconds for which COMPUTE waits for each work. A step would be shorter by them."""

    @property
    def waited_seconds(self) -> float:
        return sum(self.waited.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that tools use."""
        busy = {work.value: seconds for work, seconds in self.busy.items() if seconds}
        return {"busy": busy, "waited": self.waited_seconds}


@dataclass(frozen=True)
class Costs:
    """The `Costs` of a job's plan are those of each of the pool's units, in their order."""

    step_seconds: float
    by_units: tuple[tuple[Units, Cost], ...]

    def of(self, some: Sequence[Units]) -> Cost:
        """Returns the cost of some of the units together."""
        found = [cost for units, cost in self.by_units if units in some]
        return Cost(_added(cost.busy for cost in found), _added(cost.waited for cost in found))

    def to_dict(self) -> list[dict[str, Any]]:
        """Returns plain data, in the form that tools use."""
        return [{"units": units.words} | cost.to_dict() for units, cost in self.by_units]


def costs_of(
    chosen: Chosen,
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    facts: SessionFacts = NOTHING_MORE,
) -> Costs | None:
    """Returns what it costs a step that units live where `chosen` has them. Returns None without
    rates, and on the CPU, where all lanes are one.
    """
    shape = shape.with_optimizer(config.train.optimizer)
    facts = replace(facts, rates=facts.rates or rates_of(config, machine))
    requirements = Requirements(config, machine, shape, chosen, facts)
    if facts.rates is None or requirements.device != "cuda":
        return None
    rates = with_disk(facts.rates, config)
    # Of a pass that goes before the step, nothing is told.
    micro_batch = replace(requirements.micro_batch, has_pass=False)
    plan, timing = predicted_step(shape, chosen.choices, rates, micro_batch, requirements.device)
    spans = zip(plan.ops, timing.starts, timing.ends)
    busy = _by_unit((op, end - start) for op, start, end in spans)
    waited = _by_unit(_waits(plan, timing))
    names = [unit.name for unit in shape.units]
    found = []
    for units in units_by_place(len(names), chosen.choices):
        some = [names[number] for number in units.numbers]
        cost = Cost(_added(busy[name] for name in some), _added(waited[name] for name in some))
        found.append((units, cost))
    return Costs(timing.seconds, tuple(found))


Seconds = Mapping[Work, float]


def _by_unit(times: Iterable[tuple[Op, float]]) -> Mapping[str, Seconds]:
    """Returns the seconds of each work by the names of units, from those of ops."""
    found: defaultdict[str, dict[Work, float]] = defaultdict(lambda: dict.fromkeys(Work, 0.0))
    for op, seconds in times:
        if op.kind in _WORK:
            found[op.unit][_WORK[op.kind]] += seconds
    return found


def _added(times: Iterable[Seconds]) -> Seconds:
    """Returns the sums of seconds by kind of work."""
    found = dict.fromkeys(Work, 0.0)
    for each in times:
        for work in Work:
            found[work] += each[work]
    return found


def _waits(plan: StepPlan, timing: Simulated) -> Iterator[tuple[Op, float]]:
    """Yields the ops that COMPUTE waited for, with the seconds. An op that is waited for may itself
    have waited for another: then each has the seconds in which it ran.
    """
    lanes = _Lanes(plan, timing)
    free = lanes.ended_before
    for op in plan.ops:
        if op.lane != Lane.COMPUTE:
            continue
        end, current, steps = timing.starts[op.index], op, 0
        while end > free:
            current, steps = lanes.limiting(current, steps)
            if lanes.end(current.index, steps) <= free:
                break
            begin = max(free, timing.starts[current.index] - steps * timing.seconds)
            if begin < end:
                yield current, end - begin
                end = begin
        free = max(free, timing.ends[op.index])


class _Lanes:
    """Finds what an op of a simulated step had to wait for. All steps are alike, so the times of
    the step before are those of this one, less the seconds of a step.
    """

    def __init__(self, plan: StepPlan, timing: Simulated):
        self._ops = plan.ops
        self._timing = timing
        last: dict[Lane, int] = {}
        self._before: list[int | None] = []
        for op in plan.ops:
            self._before.append(last.get(op.lane))
            last[op.lane] = op.index
        self._last = last

    @property
    def ended_before(self) -> float:
        """When COMPUTE ended its last op of the step before."""
        return self._timing.ends[self._last[Lane.COMPUTE]] - self._timing.seconds

    def limiting(self, op: Op, steps: int) -> tuple[Op, int]:
        """Returns the op that ended last of those that `op` waited for, and by how many steps it is
        before the step that is looked at. steps: number of steps by which `op` itself is before.
        """
        before = self._before[op.index]
        found = [(index, steps) for index in op.waits]
        found += [(index, steps + 1) for index in op.waits_previous]
        found.append((self._last[op.lane], steps + 1) if before is None else (before, steps))
        index, back = max(found, key=lambda each: self.end(*each))
        return self._ops[index], back

    def end(self, index: int, steps: int) -> float:
        """Returns when an op ended, `steps` steps before."""
        return self._timing.ends[index] - steps * self._timing.seconds


def cost_text(cost: Cost, step_seconds: float) -> str:
    """Returns what a cost consists of, as in "bus 0.42 s, optimizer on the host 0.31 s, 0.12 s
    of it
    waited for"; an empty text where it is hardly anything.
    """
    words = [
        f"{name} {roughly(seconds)}"
        for name, seconds in _works(cost)
        if seconds > LEAST_SHARE * step_seconds
    ]
    if not words:
        return ""
    waited = cost.waited_seconds
    if waited > LEAST_SHARE * step_seconds:
        words.append(f"{roughly(waited)} of it waited for")
    return ", ".join(words)


def roughly(seconds: float) -> str:
    """Returns a predicted time with two digits, such as "0.034 s", "1.3 s" or "130 s"."""
    digits = f"{seconds:.2g}"
    return f"{float(digits):,.0f} s" if seconds >= 10 else f"{digits} s"


def _works(cost: Cost) -> list[tuple[str, float]]:
    busy = cost.busy
    return [
        ("bus", busy[Work.TO_GPU] + busy[Work.TO_HOST]),
        ("optimizer on the host", busy[Work.HOST_OPTIMIZER]),
        ("optimizer on the GPU", busy[Work.GPU_OPTIMIZER]),
        ("block inputs", busy[Work.BLOCK_INPUTS]),
        ("exchange between GPUs", busy[Work.COLLECTIVE]),
        ("disk reads and writes", busy[Work.DISK]),
    ]

"""Timelines as a run on a GPU records them: a plan's ops, simulated, each a little longer or
shorter than predicted.
"""

from __future__ import annotations

import random

from engine.planning.schedule.buffers import Buffer, BufferKind
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import (
    DeviceUpdate,
    FetchStates,
    Lane,
    MainGrad,
    Offload,
    OffloadStates,
    Op,
    Prefetch,
    Summary,
    Update,
)
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.schedule.schedule import Span, StepPlan
from engine.planning.schedule.simulate import Simulated, simulate
from engine.planning.schedule.stalls import as_records, first_start, waits_as_records, waits_of
from engine.runs.record.events import PlanSimulated, StepTimeline


def plan_of(blocks: int = 12, micro_batches: int = 4, rounds: int = 1) -> StepPlan:
    choices = PlanChoices().changed(
        micro_batches=micro_batches,
        rounds=rounds,
        main_grad=MainGrad.VERTICAL if rounds == 1 else MainGrad.DEVICE,
    )
    names = [f"block {k}" for k in range(blocks)]
    sizes = PlaneSizes(numel=dict.fromkeys(["embed", *names, "head"], 1_000_000))
    return build_step_plan(names, False, choices, sizes)


def seconds_of(op: Op) -> float:
    """A block takes 2 ms forward and 5 ms backward, and its transfer 3 ms."""
    if op.lane == Lane.COMPUTE:
        return {"forward": 0.002, "backward": 0.005, "loss": 0.004, "reduce": 0.0006}.get(
            op.kind, 0.0005
        )
    return {Lane.H2D: 0.003, Lane.D2H: 0.003}.get(op.lane, 0.004 if op.kind == "update" else 0.0)


def simulated(plan: StepPlan) -> PlanSimulated:
    found = simulate(plan, seconds_of)
    return PlanSimulated(found.seconds, as_records(_spans(plan, found)))


def measured(plan: StepPlan, step: int) -> StepTimeline:
    """Step `step`; each step has lengths of its own, the same ones each time."""
    rng = random.Random(step)
    lengths = {op.index: seconds_of(op) * rng.uniform(0.9, 1.25) for op in plan.ops}
    found = simulate(plan, lambda op: lengths[op.index])
    spans = _spans(plan, found)
    before = [Span(span.op, span.start - found.seconds, span.end - found.seconds) for span in spans]
    return StepTimeline(
        step,
        as_records(spans),
        waits_as_records(waits_of(spans, before, inline=False), first_start(spans)),
    )


def _spans(plan: StepPlan, found: Simulated) -> list[Span]:
    return [Span(op, start, end) for op, start, end in zip(plan.ops, found.starts, found.ends)]


def op_on(lane: Lane, index: int = 0, unit: str = "block 0", **waits: tuple[int, ...]) -> Op:
    """Some op of a lane, for what looks at lanes, times and waits alone."""
    fields = {
        Lane.H2D: (Prefetch, {"slot": slot_of(unit)}),
        Lane.COMPUTE: (Summary, {}),
        Lane.HOST: (Update, {}),
        Lane.D2H: (Offload, {"staging": Buffer(BufferKind.STAGING, number=0)}),
    }
    of_piece = {"chunk": (0, 1), "buffer": Buffer(BufferKind.UPDATE, number=0)}
    fields |= {
        Lane.STATES_IN: (FetchStates, of_piece),
        Lane.UPDATE: (DeviceUpdate, of_piece),
        Lane.STATES_OUT: (OffloadStates, of_piece),
    }
    type_, own = fields[lane]
    return type_(index, unit, **waits, **own)

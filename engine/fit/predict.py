"""To predict how long a step will take, the plan of given choices is simulated with the rates of a
machine. No torch.
"""

from __future__ import annotations

import functools

from engine.fit.buffer_sizes import ring_numel, update_buffer
from engine.fit.cost import MicroBatch, op_seconds
from engine.machine.rates import Rates
from engine.model.shape import ModelShape
from engine.plan.build_step import build_step_plan
from engine.plan.choices import PlanChoices, PlaneSizes
from engine.plan.simulate import Simulated, simulate
from engine.plan.step_plan import StepPlan
from engine.planes.spilled import SPILL_NUMEL


@functools.lru_cache(maxsize=256)
def predicted_seconds(
    shape: ModelShape, choices: PlanChoices, rates: Rates, micro_batch: MicroBatch, device: str
) -> float:
    """Returns the predicted seconds of a step, from one applied step to the next."""
    return predicted_step(shape, choices, rates, micro_batch, device)[1].seconds


def predicted_step(
    shape: ModelShape, choices: PlanChoices, rates: Rates, micro_batch: MicroBatch, device: str
) -> tuple[StepPlan, Simulated]:
    """Returns the plan of these choices, and when each of its ops would run. Of several ranks, it
    is that of the first, whose shards are the largest.
    """
    buffer = update_buffer(shape, choices)
    numel = {unit.name: unit.numel for unit in shape.units}
    sizes = PlaneSizes(
        numel,
        buffer.numel,
        ring_numel(shape, choices.ranks),
        buffer.bytes,
        shape.embed_piece,
        shape.item_bytes,
        spill_numel=SPILL_NUMEL,
        frozen=shape.frozen_units,
    )
    blocks = [unit.name for unit in shape.blocks]
    plan = build_step_plan(blocks, shape.tied, choices, sizes)
    seconds_of = op_seconds(plan, shape, rates, micro_batch)
    return plan, simulate(plan, seconds_of, inline=device == "cpu")

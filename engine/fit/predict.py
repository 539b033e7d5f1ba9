"""How long a step will take: the plan of the choices, simulated with the rates of a machine. No
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from engine.fit.cost import op_seconds
from engine.machine.rates import Rates
from engine.model.layout import PLANE_ITEM_BYTES
from engine.model.shape import ModelShape
from engine.plan.build_step import build_step_plan
from engine.plan.choices import PlanChoices, PlaneSizes
from engine.plan.ops import Op, StepPlan
from engine.plan.simulate import Simulated, simulate


@functools.lru_cache(maxsize=256)
def predicted_seconds(
    shape: ModelShape,
    choices: PlanChoices,
    rates: Rates,
    rows: int,
    row_length: int,
    device: str,
    packed: bool = False,
) -> float:
    """Of a step whose micro-batches have `rows` full rows, from one applied to the next. packed:
    several documents may share a row.
    """
    return predicted_step(shape, choices, rates, rows, row_length, device, packed)[1].seconds


def predicted_step(
    shape: ModelShape,
    choices: PlanChoices,
    rates: Rates,
    rows: int,
    row_length: int,
    device: str,
    packed: bool = False,
) -> tuple[StepPlan, Simulated]:
    """The plan of these choices, and when each of its ops would run; as for `predicted_seconds`."""
    plan = build_step_plan(
        [unit.name for unit in shape.blocks],
        shape.tied,
        choices,
        PlaneSizes(
            {unit.name: unit.numel for unit in shape.units},
            sum(PLANE_ITEM_BYTES[shape.dtype].values()),
        ),
    )
    seconds_of: Callable[[Op], float] = op_seconds(
        plan, shape, rates, rows, row_length, shape.varlen(packed, device)
    )
    return plan, simulate(plan, seconds_of, inline=device == "cpu")

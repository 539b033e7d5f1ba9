"""How long a step will take: the plan of the choices, simulated with the rates of a machine. No torch."""

from __future__ import annotations

import functools

from engine.cost import Rates, op_seconds
from engine.layout import PLANE_ITEM_BYTES
from engine.planner import PlanChoices, build_step_plan
from engine.shape import ModelShape
from engine.simulate import simulate


@functools.lru_cache(maxsize=256)
def predicted_seconds(shape: ModelShape, choices: PlanChoices, rates: Rates, rows: int, row_length: int,
                      device: str, packed: bool = False) -> float:
    """Of a step whose micro-batches have `rows` full rows, from home to home. packed: several documents may share a row."""
    plan = build_step_plan([unit.name for unit in shape.blocks], shape.tied, choices,
                           {unit.name: unit.numel for unit in shape.units}, sum(PLANE_ITEM_BYTES[shape.dtype].values()))
    return simulate(plan, op_seconds(plan, shape, rates, rows, row_length, shape.varlen(packed, device)), inline=device == "cpu").seconds

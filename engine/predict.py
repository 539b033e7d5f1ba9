"""How long a step will take: the plan of the choices, simulated with the rates of the machine. No torch."""

from __future__ import annotations

from engine.choose import Chosen
from engine.cost import Rates, op_seconds
from engine.layout import PLANE_ITEM_BYTES
from engine.planner import build_step_plan
from engine.shape import ModelShape
from engine.simulate import simulate


def predicted_seconds(shape: ModelShape, chosen: Chosen, rates: Rates, row_length: int, device: str) -> float:
    """Of a step of full rows, from home to home."""
    plan = build_step_plan([unit.name for unit in shape.blocks], shape.tied, chosen.choices,
                           {unit.name: unit.numel for unit in shape.units}, sum(PLANE_ITEM_BYTES[shape.dtype].values()))
    seconds = op_seconds(plan, shape, rates, chosen.micro_batch_size, row_length)
    return simulate(plan, seconds, inline=device == "cpu").seconds

"""The FLOPs of a step are counted here, in the ways in which the bench reports them. No torch."""

from __future__ import annotations

from engine.fit.cost import parameter_flops
from engine.model.shape import ModelShape


def step_flops(shape: ModelShape, rows: int, row_length: int, recomputed: int) -> dict[str, float]:
    """Returns the FLOPs of a step of `rows` full rows, counted in three ways.

    - `parameters` counts as `parameter_flops` does.
    - `model` counts matrix products and causal attention, without the embedding's look-up.
    - `hardware` also counts the second forward of `recomputed` blocks.
    """
    tokens = rows * row_length
    outside = 0 if shape.tied else shape.embed.parameter_count
    matrices = 6 * (shape.active_parameters - outside) * tokens
    attention = 3 * shape.attention_flops(rows, row_length)
    again = sum(
        2 * unit.parameter_count * shape.block_share * tokens + attention / 3
        for unit in shape.blocks[:recomputed]
    )
    model = matrices + attention * len(shape.blocks)
    return {
        "parameters": float(parameter_flops(shape.active_parameters, tokens)),
        "model": model,
        "hardware": model + again,
    }

"""The FLOPs of a step are counted here, in the ways in which the bench reports them. No torch."""

from __future__ import annotations

from engine.model.shape import ModelShape
from engine.planes.active_parameters import parameter_flops


def step_flops(
    shape: ModelShape, rows: int, row_length: int, recomputed: int, without_attention: int = 0
) -> dict[str, float]:
    """Returns the FLOPs of a step of `rows` full rows, counted in three ways.

    - `parameters` counts as `parameter_flops` does.
    - `model` counts matrix products and causal attention, without the embedding's look-up.
    - `hardware` also counts the second forward of `recomputed` blocks. In `without_attention` of
      them, attention does not run again.
    """
    tokens = rows * row_length
    embed = shape.embed
    passes = 1 if embed.is_frozen else 2
    outside = (passes * embed.parameter_count + embed.trained_count) // 3
    matrices = 6 * (shape.counted_parameters - (0 if shape.tied else outside)) * tokens
    attention = 3 * shape.attention_flops(rows, row_length)
    first = shape.forward_blocks
    again = sum(
        2 * unit.parameter_count * shape.block_share * tokens + attention / 3
        for unit in shape.blocks[first : first + recomputed]
    )
    model = matrices + attention * len(shape.blocks) - 2 / 3 * attention * first
    return {
        "parameters": float(parameter_flops(shape.counted_parameters, tokens)),
        "model": model,
        "hardware": model + again - without_attention * attention / 3,
    }

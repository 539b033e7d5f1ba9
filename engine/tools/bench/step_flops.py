"""The FLOPs of a step, in the ways in which the bench reports them. No torch."""

from __future__ import annotations

from engine.planning.fit.cost_model import MicroBatch
from engine.planning.shape.active_parameters import parameter_flops
from engine.planning.shape.model_shape import ModelShape


def step_flops(
    shape: ModelShape,
    rows: int,
    row_length: int,
    recomputed: int,
    learned: MicroBatch | None = None,
) -> dict[str, float]:
    """Returns the FLOPs of a step of `rows` full rows, counted in three ways. learned: the
    micro-batches of a step that compares answers, of which each sequence is counted as a row.

    - `parameters` counts as `parameter_flops` does: where parts or adapters are trained, without
      the gradients of what is frozen.
    - `model` counts matrix products and causal attention, without the embedding's look-up.
    - `hardware` also counts the second forward of `recomputed` blocks, that of the head and the
      pass before the step where answers are compared, and the gradients of stacked experts that
      have adapters.
    """
    tokens = rows * row_length
    embed = shape.embed
    passes = 1 if embed.is_frozen else 2
    table = shape.table_count
    trained = embed.trained_count - embed.shared_count
    outside = 0 if shape.tied else (passes * table + trained) // 3
    matrices = 6 * (shape.counted_parameters - outside) * tokens
    attention = 3 * shape.attention.flops(rows, row_length)
    first = shape.forward_blocks
    again = sum(
        2 * unit.called_count * shape.block_share * tokens + attention / 3
        for unit in shape.blocks[first : first + recomputed]
    )
    again += sum(2 * unit.adapted_numel * shape.block_share * tokens for unit in shape.blocks)
    if learned is not None:
        again += _of_comparing(shape, tokens, attention / 3, learned)
    model = matrices + attention * len(shape.blocks) - 2 / 3 * attention * first
    return {
        "parameters": float(parameter_flops(shape.counted_parameters, tokens)),
        "model": model,
        "hardware": model + again,
    }


def _of_comparing(shape: ModelShape, tokens: int, attention: float, learned: MicroBatch) -> float:
    """Returns the FLOPs that comparing answers takes in a step, beside its forward and backward.
    attention: those of a block in forward.
    """
    found, embed = 0.0, shape.table_count
    if learned.head_again:
        found += 2 * (shape.head.parameter_count + (embed if shape.tied else 0)) * tokens
    if learned.has_pass:
        passed = shape.active_parameters - (0 if shape.tied else embed)
        found += 2 * passed * tokens + attention * len(shape.blocks)
    return found

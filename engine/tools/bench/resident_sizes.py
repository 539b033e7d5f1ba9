"""Micro-batch sizes for a training with all states on the device."""

from __future__ import annotations

from engine.config.settings import TrainConfig
from engine.planning.shape.model_shape import ModelShape

RESIDENT_TOKENS = 65_536
"""Tokens of a micro-batch at most when all states are on the device; more tokens would not be
faster.
"""


def resident_sizes(
    config: TrainConfig, shape: ModelShape, left: float, recompute: bool, compiled: bool
) -> list[int]:
    """Returns the micro-batch sizes to try, in rows, largest first.

    Their activations must not take more than `left` bytes, the memory that the states leave free.
    """
    rows, length = config.train.batch_size, config.data.max_seq_len
    sizes = []
    for size in _micro_batch_sizes(rows):
        block = _block_bytes(shape, size, length, compiled)
        # With recompute, a block keeps only its input while other blocks are computed.
        other = block
        if recompute:
            other = size * length * shape.hidden_width * shape.item_bytes
        kept = block + (len(shape.blocks) - 1) * other
        if size * length <= RESIDENT_TOKENS and kept <= left:
            sizes.append(size)
    return sizes or [1]


def _micro_batch_sizes(rows: int) -> list[int]:
    """Returns the sizes that split a step's rows into equal micro-batches, largest first."""
    return sorted({-(-rows // count) for count in range(1, rows + 1)}, reverse=True)


def _block_bytes(shape: ModelShape, size: int, length: int, compiled: bool) -> float:
    """Returns the bytes of the largest block's activations."""
    if compiled:
        activations = [unit.compiled_activations for unit in shape.blocks]
    else:
        activations = [unit.activations for unit in shape.blocks]
    return max(each.of(size, length) for each in activations)

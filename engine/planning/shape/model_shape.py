"""A `ModelShape` holds everything that the planner and the fit report need to know about a model.

It is plain data, exact to the byte, and needs no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace

from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.planning.layout.embed_chunks import chunk_of_table
from engine.planning.layout.layout import (
    PLANE_ITEM_BYTES,
)
from engine.planning.layout.update_buffers import UpdateBuffer
from engine.planning.schedule.rounds import TrainedUnits
from engine.planning.schedule.shards import Shards, largest_updated
from engine.planning.shape.attention_shape import AttentionShape
from engine.planning.shape.block_sizes import BlockSizes
from engine.planning.shape.quantized_weights import Method
from engine.planning.shape.read_ahead import read_ahead_numel
from engine.planning.shape.state_sizes import StateSizes
from engine.planning.shape.unit_shape import UnitShape

FP32_LOGIT_BYTES = 12
"""Bytes that the loss holds for each logit at its peak: three fp32 numbers, whatever the model's
dtype.
"""

MOSTLY_FROZEN = 4
"""Ratio of elements that are not trained to those that are from which on a unit is mostly
frozen.
"""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """An instance is a model as the planner sees it. Sizes are elements unless called bytes."""

    model_type: str
    source: str
    dtype: str
    attention: AttentionShape
    units: tuple[UnitShape, ...]
    """Units in forward order: embed, blocks, head."""
    tied: bool
    packs: bool
    """Whether several documents may share a row."""
    hidden_size: int
    vocab_size: int
    active_parameters: int
    """Number of parameters that a token goes through."""
    work_parameters: int | None = None
    """Parameters per token of a model that is trained whole and needs as many FLOPs for a step;
    None where this one is trained whole.
    """
    max_position_embeddings: int | None = None
    learned_positions: bool = False
    """Whether positions come from a table, so that rows cannot be longer than the table."""
    logit_bytes: int = 16
    """Device bytes that the loss takes for each logit at its peak."""
    argument_numel: int = 0
    """Elements per token that blocks receive in addition to the hidden state, such as rotary
    embeddings. Rows that are not packed share them.
    """
    handed_numel: int = 0
    """Elements per token of each row that blocks pass to later blocks, gradients included."""
    optimizer: Optimizer = ADAMW
    """Optimizer whose states the host keeps."""
    residual_streams: int = 1
    """Number of hidden states per token that a block's input is as large as."""
    untouched_numel: int = 0
    """Elements of the parts that text does not reach. They are copied into an export."""
    cache_numel: int = 0
    """Elements that keys and values of a token take in the cache of answers; 0 where the model has
    no cache that all rows share (`engine.runtime.sampling.rows_cache`).
    """
    stored_as: Method | None = None
    """How the checkpoint's weights are quantized."""
    non_linear_matrix: str = ""
    """Full name of a trained parameter of a block that has two dimensions and is not the weight of
    one linear layer, so that its update must not be orthogonalized; "" where there is none.
    """

    @property
    def compiled_logit_bytes(self) -> int:
        """Bytes that a compiled loss takes for each logit: for the logit and its gradient, both in
        the model's dtype.
        """
        return self.logit_bytes - FP32_LOGIT_BYTES + self.item_bytes

    @property
    def hidden_width(self) -> int:
        """Number of elements of a block's input per token."""
        return self.hidden_size * self.residual_streams

    @property
    def embed(self) -> UnitShape:
        return self.units[0]

    @property
    def head(self) -> UnitShape:
        return self.units[-1]

    @property
    def table_count(self) -> int:
        """Number of parameters of embed that are its own: a tied head computes with them, and no
        block.
        """
        return self.embed.parameter_count - self.embed.shared_count

    @property
    def holds_embed(self) -> bool:
        """Whether the weights of embed are used throughout a pass, by the head or by blocks, and
        its gradient is accumulated all the time.
        """
        return self.tied or self.embed.shared_count > 0

    @functools.cached_property
    def blocks(self) -> tuple[UnitShape, ...]:
        return self.units[1:-1]

    @functools.cached_property
    def block_sizes(self) -> BlockSizes:
        """What the first and the last blocks take together."""
        blocks = self.blocks
        return BlockSizes(
            [each.gradient_numel for each in blocks],
            [each.weight_numel for each in blocks],
            [each.fp32_numel for each in blocks],
            self.item_bytes,
        )

    @functools.cached_property
    def states(self) -> StateSizes:
        """The bytes of weights, states of the optimizer and gradients."""
        return StateSizes(self.units, self.dtype, self.optimizer)

    @functools.cached_property
    def item_bytes(self) -> int:
        """Bytes that an element takes on the device."""
        return PLANE_ITEM_BYTES[self.dtype]["weight_high"]

    @functools.cached_property
    def parameter_count(self) -> int:
        return sum(unit.parameter_count for unit in self.units)

    @property
    def trained_count(self) -> int:
        """Number of the parameters that are trained."""
        return sum(unit.trained_count for unit in self.units)

    @property
    def counted_parameters(self) -> int:
        """Number of parameters by which the FLOPs of a step are counted."""
        return self.active_parameters if self.work_parameters is None else self.work_parameters

    @functools.cached_property
    def frozen_units(self) -> tuple[str, ...]:
        """Units without a parameter that is trained, in forward order."""
        return tuple(unit.name for unit in self.units if unit.is_frozen)

    @functools.cached_property
    def forward_blocks(self) -> int:
        """Number of blocks, the first ones, that have no backward: nothing is trained up to
        there.
        """
        names = [unit.name for unit in self.blocks]
        return len(names) - len(TrainedUnits(names, self.frozen_units).blocks_back)

    @functools.cached_property
    def gradient_numel(self) -> int:
        """Number of elements of the gradients of all units together."""
        return self.first_gradients[-1]

    @functools.cached_property
    def has_fp32_weights(self) -> bool:
        """Whether any weights stay in fp32 in a bf16 model."""
        return any(unit.fp32_numel for unit in self.units)

    @functools.cached_property
    def has_alike_frozen_blocks(self) -> bool:
        """Whether all blocks have the same sizes, and by far the most of them is not trained. Then
        it makes no difference to memory which of them live on the device.
        """
        sizes = {(u.numel, u.frozen_numel, u.fp32_numel, u.runs) for u in self.blocks}
        numel, frozen, *_ = next(iter(sizes), (0, 0))
        return len(sizes) == 1 and MOSTLY_FROZEN * numel <= frozen

    @functools.cached_property
    def first_gradients(self) -> list[int]:
        """Number of elements of the gradients of the first n units, for every n."""
        return list(itertools.accumulate((unit.gradient_numel for unit in self.units), initial=0))

    @functools.cached_property
    def first_weights(self) -> list[int]:
        """Number of elements of the weights of the first n units, for every n."""
        return list(itertools.accumulate((unit.weight_numel for unit in self.units), initial=0))

    @functools.cached_property
    def largest_block(self) -> int:
        """The number of elements of the largest block, by which chunks are measured."""
        embed_and_head = (self.embed.numel, self.head.numel)
        return largest_updated([unit.numel for unit in self.blocks], embed_and_head)

    @functools.cached_property
    def block_share(self) -> float:
        """The share of the blocks' parameters that a token passes through. It is less than 1 in a
        mixture of experts.
        """
        blocks = sum(unit.called_count for unit in self.blocks)
        if not blocks:
            return 0.0
        outside = self.head.parameter_count + self.table_count
        return min(1.0, max(0.0, (self.active_parameters - outside) / blocks))

    @functools.cached_property
    def embed_chunk(self) -> int:
        """The number of elements for which the gradient of embed can be accumulated at a time; 0
        where it is accumulated as a whole (`engine.planning.layout.embed_chunks`).
        """
        is_one_table = self.embed.parameter_count == self.vocab_size * self.hidden_size
        if self.holds_embed or not is_one_table or self.embed.fp32_numel:
            return 0
        largest = max(unit.weight_numel for unit in self.blocks)
        return chunk_of_table(self.vocab_size, self.hidden_size, largest)

    @functools.cached_property
    def orthogonalized(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Shapes of the matrices whose updates the optimizer orthogonalizes, by unit, for the units
        that have any.
        """
        if not OPTIMIZERS[self.optimizer].orthogonalizes:
            return {}
        found = {unit.name: unit.state_counts.matrices for unit in self.units}
        return {unit: matrices for unit, matrices in found.items() if matrices}

    @functools.cached_property
    def orthogonalized_sides(self) -> set[tuple[int, int]]:
        """The smaller and the larger side of each of these matrices."""
        matrices = itertools.chain.from_iterable(self.orthogonalized.values())
        return {(min(sides), max(sides)) for sides in matrices}

    def device_only(self, device: str) -> Collection[str]:
        """Returns the units that only the device may update. Products of matrices are rounded in
        another order on a GPU than on the host, so a plan must not choose between the two: a run
        that is resumed with another plan would not continue bit for bit.
        """
        return self.orthogonalized.keys() if device == "cuda" else ()

    def update_buffer(self, chunks: int, ranks: int = 1) -> UpdateBuffer:
        """Returns the sizes of a buffer in which the device updates a chunk of a unit. chunks:
        number of them in the largest block, or in what one of several ranks owns of it.
        """
        if (chunks, ranks) not in self._update_buffers:
            units = [unit.state_counts for unit in self.units]
            largest = Shards(ranks).numel(self.largest_block)
            self._update_buffers[chunks, ranks] = UpdateBuffer.of(
                self.dtype, self.optimizer, units, largest, chunks
            )
        return self._update_buffers[chunks, ranks]

    @functools.cached_property
    def _update_buffers(self) -> dict[tuple[int, int], UpdateBuffer]:
        return {}

    def padded(self, ranks: int) -> ModelShape:
        """Returns the shape whose units have the elements of their slots and accumulators on the
        device of one of several ranks: those of all shards together
        (`engine.planning.schedule.shards`).
        """
        if ranks == 1:
            return self
        if ranks not in self._padded:
            units = tuple(unit.padded(Shards(ranks)) for unit in self.units)
            self._padded[ranks] = replace(self, units=units)
        return self._padded[ranks]

    @functools.cached_property
    def _padded(self) -> dict[int, ModelShape]:
        return {}

    @property
    def read_ahead_numel(self) -> int:
        """Most parameters that are in memory beside their planes while a checkpoint is read."""
        counts = [unit.parameter_count for unit in self.units]
        return read_ahead_numel(counts, self.active_parameters < self.parameter_count)

    def export_bytes(self, dtype: str) -> int:
        """Returns the bytes of weights in an exported folder whose weights are in `dtype`. Weights
        that stay in fp32 take the rest of their four bytes.
        """
        item = PLANE_ITEM_BYTES[dtype]["weight_high"]
        keep_in_fp32 = sum(unit.fp32_numel for unit in self.units) if dtype == "bfloat16" else 0
        untouched = self.untouched_numel * self.item_bytes
        return self.parameter_count * item + keep_in_fp32 * (4 - item) + untouched

    def with_optimizer(self, optimizer: Optimizer) -> ModelShape:
        """Returns the shape of the same model with the states of another optimizer."""
        return self if optimizer == self.optimizer else replace(self, optimizer=optimizer)

    def in_dtype(self, dtype: str) -> ModelShape:
        """Returns the shape of the same model in another dtype. Its planes are exact; its
        activations keep the sizes of this dtype.
        """
        item = PLANE_ITEM_BYTES[dtype]["weight_high"]
        logits = (self.logit_bytes - FP32_LOGIT_BYTES) // self.item_bytes
        units = self.units
        if dtype == "float32":  # there all weights are in fp32
            units = tuple(replace(unit, fp32_numel=0) for unit in units)
        logit_bytes = FP32_LOGIT_BYTES + logits * item
        return replace(self, dtype=dtype, logit_bytes=logit_bytes, units=units)

    def varlen(self, packed: bool, device: str) -> bool:
        """Returns whether attention uses the GPU's variable-length kernel, document by document."""
        return packed and self.packs and self.attention.has_varlen_kernel(self.dtype, device)

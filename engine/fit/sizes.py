"""What choices of a plan take on the device, item by item. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import add
from typing import Any

from engine.config.settings import TrainConfig
from engine.fit.memory_items import Item, MemoryItem
from engine.model.layout import PLANE_ITEM_BYTES, Activations
from engine.model.shape import ModelShape, UnitShape
from engine.plan.choices import PlanChoices
from engine.plan.ops import GradientSum
from engine.words import GIB, MIB

COMFORTABLE = {"cuda": 0.95, "cpu": 0.88}
"""Share of a limit that automatic choices fill: what is on the device is ours and counted, RAM is
shared with others.
"""
CUDA_CONTEXT_BYTES = round(0.6 * GIB)
ALLOCATOR_SLACK, LIBRARY_BYTES = 0.015, {"cuda": 192 * MIB, "cpu": 0}
"""Of all that is allocated, and whatever the model: cuBLAS keeps 32 MiB to work in for each thread
that calls it, and the allocator asks the driver for 20 MiB at a time, on each stream.
"""
LOGITS_BYTES = {"cuda": round(2.5 * GIB), "small": 512 << 20, "cpu": 256 << 20}
COMPILER_BYTES = 64 * MIB
"""While kernels are compiled, variants are timed with a buffer of the size of the GPU's cache (60
MiB on an H200).
"""
SMALL_GPU_BYTES = 20 * GIB
"""Two sizes of logits chunk, not a share of what is free: another chunk rounds differently, and a
resumed run must not.
"""
LOSS_CHUNKS = (128, 8192)
STEP_TOKEN_BYTES = 32
"""Token id, position, loss index and label of a token, int64 each."""


# ---------------------------------------------------------------------- arithmetic of buffers


def buffers_in_words(buffers: int, spare: int) -> str:
    """How many pieces of states are on the device at once."""
    return f"{buffers - spare} at a time" + (
        f" and {spare} more in the place of activations" if spare else ""
    )


def fixed_items(shape: ModelShape, choices: PlanChoices, boundary_numel: int) -> tuple[Item, ...]:
    """Buffers that live all run long: what DeviceState allocates, to the byte.

    boundary_numel: elements of the largest micro-batch's hidden state.
    """
    c, item, blocks = choices, shape.item_bytes, shape.blocks
    streamed, resident = (
        blocks[: len(blocks) - c.resident_blocks],
        blocks[len(blocks) - c.resident_blocks :],
    )
    largest = max(unit.numel for unit in blocks)
    outer = (shape.embed.numel, shape.head.numel)
    slots = min(c.slots, len(streamed))
    streamed_slot = max((unit.numel for unit in streamed), default=0)
    if c.gradient_sum == GradientSum.DEVICE:
        sums, sums_note = (
            sum(outer) + sum(unit.numel for unit in blocks),
            "every unit, summed over the rounds",
        )
    elif shape.tied:
        sums, sums_note = sum(outer) + largest, "embed, head and the largest block"
    else:
        sums, sums_note = max(outer) + largest, "embed or head, and the largest block"
    own = c.update_buffers - c.spare_buffers if c.device_homes else 0
    pieces = own * largest * sum(PLANE_ITEM_BYTES[shape.dtype].values())
    if c.gradient_sum == GradientSum.DEVICE:  # they share the memory of the blocks' sums
        pieces = max(0, pieces - 4 * sum(unit.numel for unit in blocks))
    rings = 2 * c.boundary_rings if c.host_boundaries else 0
    return (
        Item(
            MemoryItem.BLOCK_SLOTS,
            slots * streamed_slot * item,
            f"{slots} for the blocks that are streamed",
        ),
        Item(MemoryItem.OUTER_SLOTS, sum(outer) * item),
        Item(
            MemoryItem.RESIDENT_BLOCKS,
            sum(unit.numel for unit in resident) * item,
            f"the last {len(resident)} blocks",
        ),
        Item(MemoryItem.GRADIENT_SUMS, 4 * (sums + len(shape.units) + 3), f"fp32: {sums_note}"),
        Item(
            MemoryItem.GRADIENT_STAGING,
            (2 * largest + max(outer)) * item,
            "rounded gradients on their way to the host",
        ),
        Item(
            MemoryItem.OPTIMIZER_STATES,
            pieces,
            f"pieces of {len(c.device_homes)} units that are updated on the device, "
            f"{buffers_in_words(c.update_buffers, c.spare_buffers)}",
        ),
        Item(
            MemoryItem.BOUNDARY_RINGS,
            rings * boundary_numel * item,
            f"{rings} buffers for boundaries on the host",
        ),
    )


def host_boundary_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Boundaries on the host: one for each micro-batch and block that does not keep its
    activations. tokens: of the largest micro-batch.
    """
    if not choices.host_boundaries:
        return 0
    stored = len(shape.blocks) - choices.kept_blocks
    return stored * choices.micro_batches * tokens * shape.hidden_size * shape.item_bytes


class Sizer:
    """Device bytes of any choices for one model, configuration and limit."""

    def __init__(
        self,
        shape: ModelShape,
        config: TrainConfig,
        device: str,
        limit: int,
        keeping: float,
        row_length: int,
        compiled: bool,
        rounding: Mapping[str, Any],
    ):
        self.compiled = compiled
        self.shape, self.config, self.device, self.rounding = shape, config, device, rounding
        self.comfortable, self.keeping, self.row_length = (
            COMFORTABLE[device] * limit,
            keeping,
            row_length,
        )
        self._by_size: dict[int, tuple[list[int], list[int]]] = {}
        self.packed = config.data.packing and shape.packs
        self.dense_mask = shape.dense_mask(self.packed, row_length)
        self.masked_blocks = shape.masked_blocks(self.packed, row_length, device)
        self._position_bytes = shape.vocab_size * (
            shape.compiled_logit_bytes if compiled else shape.logit_bytes
        )
        low, high = LOSS_CHUNKS
        budget = LOGITS_BYTES["small" if device == "cuda" and limit < SMALL_GPU_BYTES else device]
        chunk = max(low, min(high, budget // self._position_bytes // low * low))
        self.loss_chunk = rounding.get("loss_chunk") or min(
            chunk, shape.max_position_embeddings or chunk
        )

    def items(self, size: int, choices: PlanChoices) -> tuple[Item, ...]:
        """`size`: rows of a micro-batch."""
        shape, c, item = self.shape, choices, self.shape.item_bytes
        tokens = size * self.row_length
        together = c.micro_batches // c.rounds
        hidden = tokens * shape.hidden_size * item
        bounded = 0 if c.host_boundaries else len(shape.blocks) - c.kept_blocks
        activations, _ = self._blocks(size)
        kept = together * sum(activations[len(activations) - c.kept_blocks :])
        # What spare buffers take of the kept activations' memory is not free for a recompute.
        working, what = self._working_set(
            size, hidden, max(0, kept - c.spare_buffers * self._piece_bytes), c
        )
        pairs, masks = together * size * self.row_length**2 * shape.mask_kinds, 0
        if self.dense_mask:
            masks = pairs * (item if shape.attention == "eager" else 1)
        elif shape.masked_at_once(self.packed, size, self.row_length, self.device):
            masks = pairs * item
        items = [
            *fixed_items(shape, c, tokens * shape.hidden_size),
            Item(
                MemoryItem.BOUNDARIES,
                together * bounded * hidden,
                f"inputs of {bounded} blocks, {together * tokens:,} tokens",
            ),
            Item(
                MemoryItem.HIDDEN_STATES,
                together * hidden,
                f"{together} micro-batch{'es' if together > 1 else ''} of {tokens:,} tokens",
            ),
            Item(
                MemoryItem.ROTARY_EMBEDDINGS,
                together
                * (size if self.packed else 1)
                * self.row_length
                * shape.argument_numel
                * item,
                "made once for all blocks",
            ),
            Item(
                MemoryItem.KEPT_ACTIVATIONS, kept, f"{c.kept_blocks} blocks that are not recomputed"
            ),
            Item(MemoryItem.WORKING_SET, working, what),
            Item(
                MemoryItem.TOKENS_AND_MASKS,
                together * tokens * STEP_TOKEN_BYTES + masks,
                "a dense attention mask for every row" if masks else "",
            ),
        ]
        if self.device == "cuda":
            items.append(Item(MemoryItem.CUDA_CONTEXT, CUDA_CONTEXT_BYTES))
        libraries = LIBRARY_BYTES[self.device] + (
            COMPILER_BYTES if self.compiled and self.device == "cuda" else 0
        )
        slack = round(ALLOCATOR_SLACK * sum(i.bytes for i in items)) + libraries
        items.append(
            Item(MemoryItem.ALLOCATOR_SLACK, slack, "for gaps, and for libraries to work in")
        )
        return tuple(i for i in items if i.bytes)

    def _blocks(self, size: int) -> tuple[list[int], list[int]]:
        """For every block and one micro-batch: what autograd keeps, and what its backward needs
        besides.
        """
        if size not in self._by_size:
            tokens, item = size * self.row_length, self.shape.item_bytes
            # Compiled, a gate's product, its gradient and the gradients of both its factors are
            # there at once.
            wide = 4 if self.compiled else 2
            self._by_size[size] = (
                [self._activations(u).of(size, self.row_length) for u in self.shape.blocks],
                [
                    (wide * u.widest * tokens + u.numel + 2 * tokens * self.shape.hidden_size)
                    * item
                    for u in self.shape.blocks
                ],
            )
        return self._by_size[size]

    def _activations(self, unit: UnitShape) -> Activations:
        if self.masked_blocks:
            return unit.masked_activations
        return unit.compiled_activations if self.compiled else unit.activations

    def _working_set(self, size: int, hidden: int, freed: int, c: PlanChoices) -> tuple[int, str]:
        """The most that any one op needs on top of what is kept. Blocks that are recomputed come
        after those that are kept have let go of theirs, `freed` bytes.
        """
        shape, item = self.shape, self.shape.item_bytes
        tokens = size * self.row_length
        activations, backward = self._blocks(size)
        recomputed = len(backward) - c.kept_blocks
        recompute = max(map(add, activations[:recomputed], backward), default=0)
        block = max(recompute - freed, max(backward[recomputed:], default=0))
        tail = shape.head.numel + (shape.embed.numel if shape.tied else 0)
        chunk = min(self.loss_chunk, tokens) * self._position_bytes
        loss = chunk + tail * item + (3 if self.compiled else 2) * hidden
        embed = shape.embed.numel * item + 2 * hidden
        if block >= max(loss, embed):
            return block, f"backward of one block on {tokens:,} tokens"
        return max(
            loss, embed
        ), f"logits of {min(self.loss_chunk, tokens):,} positions and the head's gradient"

    def buffers_over_sums(self) -> int:
        """Pieces of states that the fp32 sums of the blocks have space for."""
        return 4 * sum(unit.numel for unit in self.shape.blocks) // self._piece_bytes

    @property
    def _piece_bytes(self) -> int:
        return max(unit.numel for unit in self.shape.blocks) * sum(
            PLANE_ITEM_BYTES[self.shape.dtype].values()
        )

    def spare_blocks(self, size: int, choices: PlanChoices, buffers: int) -> int | None:
        """Of so many of the last blocks, activations make space for `buffers` pieces of states, and
        one more for gaps. None where too few keep them.
        """
        needed = buffers * self._piece_bytes
        activations, together = self._blocks(size)[0], choices.micro_batches // choices.rounds
        for count in range(1, choices.kept_blocks):
            needed -= together * activations[-count]
            if needed <= 0:
                return count + 1
        return None

    def total(self, size: int, choices: PlanChoices) -> int:
        return sum(item.bytes for item in self.items(size, choices))

    def fits(self, size: int, choices: PlanChoices, limit: float | None = None) -> bool:
        return self.total(size, choices) <= (self.comfortable if limit is None else limit)

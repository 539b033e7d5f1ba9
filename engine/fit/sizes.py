"""A `Sizer` computes the memory that the choices of a plan take on the device, item by item. Pure
arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from engine.fit.job import Job
from engine.fit.memory_items import Item, MemoryItem
from engine.model.activation_sizes import Activations
from engine.model.shape import ModelShape, UnitShape
from engine.plan.buffers import EMBED, HEAD
from engine.plan.choices import PlanChoices
from engine.plan.ops import GradientSum
from engine.planes.layout import EXACT_ITEM_BYTES
from engine.words import GIB, MIB

COMFORTABLE = {"cuda": 0.95, "cpu": 0.88}
"""Automatic choices fill this share of a limit. The share of RAM is smaller because other programs
use RAM too, while everything on the device is ours and is counted.
"""
CUDA_CONTEXT_BYTES = round(0.6 * GIB)
ALLOCATOR_SLACK = 0.015
"""The allocator leaves gaps, which are this share of all allocated memory."""
LIBRARY_BYTES = {"cuda": 192 * MIB, "cpu": 0}
"""Libraries take this much for themselves, whatever the model is: cuBLAS keeps a workspace of 32
MiB for each thread that calls it, and the allocator asks the driver for 20 MiB at a time, on each
stream.
"""
COMPILER_BYTES = 64 * MIB
"""While kernels are compiled, variants are timed with a buffer of the size of the GPU's cache (60
MiB on an H200).
"""
LOGITS_BYTES = {"cuda": round(2.5 * GIB), "small": 768 << 20, "cpu": 256 << 20}
"""At most this many bytes are taken by the logits of one chunk of the loss."""
SMALL_GPU_BYTES = 26 * GIB
"""A GPU is small if it has less memory than this. The chunk of logits has one of two sizes on GPUs
and is not a share of the free memory, because another size rounds differently, which must not
happen in a resumed run.
"""
LOSS_CHUNKS = (128, 8192)
"""A chunk of the loss has at least and at most this many positions."""
STEP_TOKEN_BYTES = 32
"""This many bytes are the inputs of one token: its id, its position, its loss index and its label,
int64 each.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """A `DeviceMemory` is the memory that blocks compute in: that of a GPU, or RAM on the CPU."""

    device: str
    """It is `cpu` or `cuda`."""
    limit: int
    """This process may take this many bytes of it."""
    keeping: float
    """Blocks stay resident and keep their activations only while all items together take at most
    this many bytes.
    """

    @property
    def comfortable(self) -> float:
        """Returns the bytes that automatic choices may fill."""
        return COMFORTABLE[self.device] * self.limit


# ---------------------------------------------------------------------- arithmetic of buffers


def buffers_in_words(buffers: int, spare: int) -> str:
    """Returns the number of pieces of states that are on the device at once, in words."""
    words = f"{buffers - spare} at a time"
    if spare:
        words += f" and {spare} more in the place of activations"
    return words


def fixed_items(shape: ModelShape, choices: PlanChoices, boundary_numel: int) -> tuple[Item, ...]:
    """Returns the buffers that are kept throughout the run: what DeviceState allocates, to the
    byte.

    boundary_numel: the number of elements in the hidden state of the largest micro-batch.
    """
    item, blocks = shape.item_bytes, shape.blocks
    first_resident = len(blocks) - choices.resident_blocks
    streamed, resident = blocks[:first_resident], blocks[first_resident:]
    slots = min(choices.slots, len(streamed))
    streamed_slot = _slot_bytes(streamed, item)
    sums, sums_note = _gradient_sums(shape, choices)
    rings = 2 * choices.boundary_rings if choices.host_boundaries else 0
    return (
        Item(
            MemoryItem.BLOCK_SLOTS,
            slots * streamed_slot,
            f"{slots} for the blocks that are streamed",
        ),
        Item(
            MemoryItem.OUTER_SLOTS,
            _slot_bytes([shape.embed, shape.head], item)
            if choices.shared_outer_slot
            else _slot_bytes([shape.embed], item) + _slot_bytes([shape.head], item),
        ),
        Item(
            MemoryItem.RESIDENT_BLOCKS,
            sum(_slot_bytes([unit], item) for unit in resident),
            f"the last {len(resident)} blocks",
        ),
        Item(MemoryItem.GRADIENT_SUMS, 4 * (sums + len(shape.units) + 3), f"fp32: {sums_note}"),
        _staging(shape, choices),
        Item(
            MemoryItem.OPTIMIZER_STATES,
            _update_buffer_bytes(shape, choices),
            f"pieces of {len(choices.device_homes)} units that are updated on the device, "
            f"{buffers_in_words(choices.update_buffers, choices.spare_buffers)}",
        ),
        Item(
            MemoryItem.BOUNDARY_RINGS,
            rings * boundary_numel * item,
            f"{rings} buffers for boundaries on the host",
        ),
    )


def _staging(shape: ModelShape, choices: PlanChoices) -> Item:
    """Returns the item of rounded gradients."""
    if choices.parked_gradients:
        words = "the rounded gradients of all units, until the clip factor is known"
        return Item(MemoryItem.PARKED_GRADIENTS, shape.plane_numel * shape.item_bytes, words)
    numel = 2 * max(unit.numel for unit in shape.blocks) + max(shape.embed.numel, shape.head.numel)
    words = "rounded gradients on their way to the host"
    return Item(MemoryItem.GRADIENT_STAGING, numel * shape.item_bytes, words)


def _slot_bytes(units: Sequence[UnitShape], item: int) -> int:
    """Returns the bytes of a slot that can hold each of `units`, of `item` bytes an element. The
    weights that stay in fp32 are kept beside the others.
    """
    numel = max((unit.numel for unit in units), default=0)
    exact = max((unit.exact_numel for unit in units), default=0)
    return numel * item + exact * EXACT_ITEM_BYTES


def _gradient_sums(shape: ModelShape, choices: PlanChoices) -> tuple[int, str]:
    """Returns the number of elements of all fp32 sums, and a description of them."""
    largest = max(unit.numel for unit in shape.blocks)
    outer = (shape.embed.numel, shape.head.numel)
    if choices.gradient_sum == GradientSum.DEVICE:
        blocks = sum(unit.numel for unit in shape.blocks)
        return sum(outer) + blocks, "every unit, summed over the rounds"
    if shape.tied:
        return sum(outer) + largest, "embed, head and the largest block"
    return max(*outer, largest), "one unit at a time"


def _update_buffer_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of update buffers beyond the memory that they share with other buffers."""
    if not choices.device_homes:
        return 0
    own = choices.update_buffers - choices.spare_buffers
    needed = own * shape.update_buffer.bytes
    if choices.gradient_sum == GradientSum.DEVICE:  # they share the memory of the blocks' sums
        return max(0, needed - 4 * sum(unit.numel for unit in shape.blocks))
    return needed


def gradient_ring_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the host buffers that parked gradients pass through: two for the blocks
    and one for embed and head, as far as their optimizers run on the host.
    """
    if not choices.parked_gradients:
        return 0
    on_host = [unit for unit in shape.units if unit.name not in choices.device_homes]
    blocks = [unit.numel for unit in on_host if unit.name not in (EMBED, HEAD)]
    outer = [unit.numel for unit in on_host if unit.name in (EMBED, HEAD)]
    numel = 2 * max(blocks, default=0) + max(outer, default=0)
    return numel * shape.item_bytes


def state_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes that planes and parked gradients take on the host."""
    planes = shape.plane_bytes()
    if choices.parked_gradients:
        del planes["grad"]
    return sum(planes.values()) + gradient_ring_bytes(shape, choices)


def host_boundary_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes of boundaries on the host: one for each micro-batch and each block that
    does not keep its activations. tokens: the number of tokens in the largest micro-batch.
    """
    if not choices.host_boundaries:
        return 0
    stored = len(shape.blocks) - choices.kept_blocks
    return stored * choices.micro_batches * tokens * shape.hidden_size * shape.item_bytes


class Sizer:
    """A `Sizer` computes the device bytes of any choices, for one job and one device's memory.
    `size` is always the rows of a micro-batch.
    """

    def __init__(self, job: Job, memory: DeviceMemory, compiled: bool):
        shape = job.shape
        self.job = job
        self.memory = memory
        self.compiled = compiled
        self.shape = shape
        self.row_length = job.row_length
        self.packed = job.config.data.packing and shape.packs
        self._dense_mask = shape.dense_mask(self.packed, job.row_length)
        self._masked_blocks = shape.masked_blocks(self.packed, job.row_length, memory.device)
        self._piece_bytes = shape.update_buffer.bytes
        logit_bytes = shape.compiled_logit_bytes if compiled else shape.logit_bytes
        self._position_bytes = shape.vocab_size * logit_bytes
        self.loss_chunk: int = job.rounding.get("loss_chunk") or self._new_loss_chunk()
        """The loss is computed for this many positions at a time."""
        self._by_size: dict[int, tuple[list[int], list[int]]] = {}

    @property
    def device(self) -> str:
        return self.memory.device

    def fits(self, size: int, choices: PlanChoices, limit: float | None = None) -> bool:
        """Tells whether the choices take no more than `limit` bytes, by default those that
        automatic choices may fill.
        """
        if limit is None:
            limit = self.memory.comfortable
        return self.total(size, choices) <= limit

    def total(self, size: int, choices: PlanChoices) -> int:
        """Returns the bytes of all items."""
        return sum(item.bytes for item in self.items(size, choices))

    def items(self, size: int, choices: PlanChoices) -> tuple[Item, ...]:
        """Returns the items that take memory, with their bytes."""
        tokens = size * self.row_length
        items = [
            *fixed_items(self.shape, choices, tokens * self.shape.hidden_size),
            *self._step_items(size, choices),
        ]
        if self.device == "cuda":
            items.append(Item(MemoryItem.CUDA_CONTEXT, CUDA_CONTEXT_BYTES))
        slack = round(ALLOCATOR_SLACK * sum(item.bytes for item in items))
        slack += LIBRARY_BYTES[self.device]
        if self.compiled and self.device == "cuda":
            slack += COMPILER_BYTES
        items.append(
            Item(MemoryItem.ALLOCATOR_SLACK, slack, "for gaps, and for libraries to work in")
        )
        return tuple(item for item in items if item.bytes)

    def buffers_over_sums(self) -> int:
        """Returns the number of pieces of states that fit in the memory of the blocks' fp32
        sums.
        """
        return 4 * sum(unit.numel for unit in self.shape.blocks) // self._piece_bytes

    def spare_blocks(self, size: int, choices: PlanChoices, buffers: int) -> int | None:
        """Returns how many of the last blocks must lend the memory of their activations to make
        space for `buffers` pieces of states, plus one block to allow for gaps. Returns None where
        too few blocks keep their activations.
        """
        needed = buffers * self._piece_bytes
        activations = self._blocks(size)[0]
        together = choices.micro_batches // choices.rounds
        for count in range(1, choices.kept_blocks):
            needed -= together * activations[-count]
            if needed <= 0:
                return count + 1
        return None

    def _new_loss_chunk(self) -> int:
        """Returns the positions of a chunk for a run that does not continue another."""
        is_small = self.device == "cuda" and self.memory.limit < SMALL_GPU_BYTES
        budget = LOGITS_BYTES["small" if is_small else self.device]
        least, most = LOSS_CHUNKS
        chunk = max(least, min(most, budget // self._position_bytes // least * least))
        return min(chunk, self.shape.max_position_embeddings or chunk)

    # ------------------------------------------------------------------ within a step

    def _step_items(self, size: int, choices: PlanChoices) -> tuple[Item, ...]:
        shape, item = self.shape, self.shape.item_bytes
        tokens = size * self.row_length
        together = choices.micro_batches // choices.rounds  # micro-batches that exist at once
        hidden = tokens * shape.hidden_size * item
        bounded = 0 if choices.host_boundaries else len(shape.blocks) - choices.kept_blocks
        activations, _ = self._blocks(size)
        kept = together * sum(activations[len(activations) - choices.kept_blocks :])
        # The part of the kept activations' memory that spare buffers take is not available to a
        # recompute.
        freed = max(0, kept - choices.spare_buffers * self._piece_bytes)
        working, working_note = self._working_set(size, freed, choices.kept_blocks)
        masks = self._mask_bytes(size, together)
        rotary_rows = size if self.packed else 1  # packed rows each have their own positions
        rotary = rotary_rows * self.row_length * shape.argument_numel * item
        return (
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
            Item(MemoryItem.ROTARY_EMBEDDINGS, together * rotary, "made once for all blocks"),
            Item(
                MemoryItem.KEPT_ACTIVATIONS,
                kept,
                f"{choices.kept_blocks} blocks that are not recomputed",
            ),
            Item(MemoryItem.WORKING_SET, working, working_note),
            Item(
                MemoryItem.TOKENS_AND_MASKS,
                together * tokens * STEP_TOKEN_BYTES + masks,
                "a dense attention mask for every row" if masks else "",
            ),
        )

    def _mask_bytes(self, size: int, together: int) -> int:
        """Returns the bytes of attention masks that are held through a step."""
        shape, item = self.shape, self.shape.item_bytes
        pairs = together * size * self.row_length**2 * shape.mask_kinds
        if self._dense_mask:
            return pairs * (item if shape.attention == "eager" else 1)
        if shape.masked_at_once(self.packed, size, self.row_length, self.device):
            return pairs * item
        return 0

    def _working_set(self, size: int, freed: int, kept_blocks: int) -> tuple[int, str]:
        """Returns the most bytes that any one op needs in addition to the kept tensors, and which
        op that is.

        When blocks are recomputed, the blocks with kept activations have already freed them,
        `freed` bytes.
        """
        shape, item = self.shape, self.shape.item_bytes
        tokens = size * self.row_length
        hidden = tokens * shape.hidden_size * item
        activations, backward = self._blocks(size)
        recomputed = len(backward) - kept_blocks
        recompute = max(map(add, activations[:recomputed], backward), default=0)
        block = max(recompute - freed, max(backward[recomputed:], default=0))
        tail = shape.head.numel + (shape.embed.numel if shape.tied else 0)
        chunk = min(self.loss_chunk, tokens)
        states = 3 if self.compiled else 2
        loss = chunk * self._position_bytes + tail * item + states * hidden
        embed = shape.embed.numel * item + 2 * hidden
        if block >= max(loss, embed):
            return block, f"backward of one block on {tokens:,} tokens"
        return max(loss, embed), f"logits of {chunk:,} positions and the head's gradient"

    def _blocks(self, size: int) -> tuple[list[int], list[int]]:
        """Returns, for every block and one micro-batch, the bytes that autograd keeps and the bytes
        that the block's backward needs in addition.
        """
        if size not in self._by_size:
            tokens, item = size * self.row_length, self.shape.item_bytes
            # In a compiled block, a gate's product, its gradient and the gradients of both factors
            # exist at once.
            wide = 4 if self.compiled else 2
            kept, needed = [], []
            for unit in self.shape.blocks:
                kept.append(self._activations(unit).of(size, self.row_length))
                numel = wide * unit.widest * tokens + unit.numel
                needed.append((numel + 2 * tokens * self.shape.hidden_size) * item)
            self._by_size[size] = (kept, needed)
        return self._by_size[size]

    def _activations(self, unit: UnitShape) -> Activations:
        if self._masked_blocks:
            return unit.masked_activations
        return unit.compiled_activations if self.compiled else unit.activations

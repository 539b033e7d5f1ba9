"""A `Sizer` computes the memory that the choices of a plan take on the device, item by item. Pure
arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.fit.job import Job
from engine.fit.memory_items import Item, MemoryItem
from engine.model.activation_sizes import Activations
from engine.model.shape import ModelShape, UnitShape
from engine.plan.arena import Arena, lay_out_arena
from engine.plan.choices import PlanChoices, seconds_of_pairs
from engine.plan.ops import GradientSum
from engine.plan.step_buffers import GRADIENT_RINGS
from engine.planes.block_sizes import BlockBytes
from engine.planes.layout import EXACT_ITEM_BYTES
from engine.planes.moments import FP32_MOMENTS
from engine.planes.update_buffers import UpdateBuffer, small_pieces
from engine.words import GIB, MIB

COMFORTABLE = {"cuda": 0.95, "small": 0.97, "cpu": 0.88}
"""Automatic choices fill this share of a limit: of the memory of a GPU, of a small one, of RAM. The
share of RAM is smaller because other programs use RAM too, while everything on the device is ours
and is counted. A small GPU is filled further, or it would have no room to update units.
"""
CUDA_CONTEXT_BYTES = round(0.6 * GIB)
ALLOCATOR_SLACK = 0.02
"""The allocator leaves gaps, which are this share of all allocated memory."""
LIBRARY_BYTES = {"cuda": 320 * MIB, "cpu": 0}
"""Libraries take this much for themselves, whatever the model is: cuBLAS keeps a workspace of 32
MiB for each thread that calls it, and the allocator asks the driver for 20 MiB at a time, on each
stream.
"""
ROUNDING_BYTES = 8
"""While the device updates a piece, its moments in bf16 or in 8 bits are also there in fp32."""
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
    comfortable: float
    """Automatic choices may fill this many bytes."""
    keeping: float
    """Blocks stay resident and keep their activations only while all items together take at most
    this many bytes.
    """


def size_of_device(device: str, limit: int) -> str:
    """Returns `small` for a GPU with little memory, else `device`."""
    return "small" if device == "cuda" and limit < SMALL_GPU_BYTES else device


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
    sizes, resident = shape.block_sizes, choices.resident_blocks
    streamed = len(shape.blocks) - resident
    slots = min(choices.slots, streamed)
    sums, sums_note = _gradient_sums(shape, choices)
    rings = 2 * choices.boundary_rings if choices.host_boundaries else 0
    return (
        Item(
            MemoryItem.BLOCK_SLOTS,
            slots * sizes.slot_bytes(streamed),
            f"{slots} for the blocks that are streamed",
        ),
        Item(
            MemoryItem.OUTER_SLOTS,
            _outer_slot_bytes(shape, choices),
            "beyond the parked gradient of embed" if choices.outer_in_parked else "",
        ),
        Item(
            MemoryItem.RESIDENT_BLOCKS,
            sizes.resident_bytes(resident),
            f"the last {resident} blocks",
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
            rings * boundary_numel * shape.item_bytes,
            f"{rings} buffers for boundaries on the host",
        ),
    )


def _staging(shape: ModelShape, choices: PlanChoices) -> Item:
    """Returns the item of rounded gradients."""
    if choices.gradients_in_sums:
        return Item(MemoryItem.PARKED_GRADIENTS, 0, "in the memory of their sums")
    if choices.parked_gradients:
        words = "the rounded gradients of all units, until the clip factor is known"
        return Item(MemoryItem.PARKED_GRADIENTS, shape.plane_numel * shape.item_bytes, words)
    numel = 2 * shape.largest_block + max(shape.embed.numel, shape.head.numel)
    words = "rounded gradients on their way to the host"
    return Item(MemoryItem.GRADIENT_STAGING, numel * shape.item_bytes, words)


def _outer_slot_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the slots of embed and head, beyond those of a parked gradient."""
    embed, head, item = shape.embed, shape.head, shape.item_bytes
    if not choices.shared_outer_slot:
        return _slot_bytes([embed], item) + _slot_bytes([head], item)
    both = _slot_bytes([embed, head], item)
    return both - embed.numel * item if choices.outer_in_parked else both


def _slot_bytes(units: Sequence[UnitShape], item: int) -> int:
    """Returns the bytes of a slot that can hold each of `units`, of `item` bytes an element. The
    weights that stay in fp32 are kept beside the others.
    """
    numel = max((unit.numel for unit in units), default=0)
    exact = max((unit.exact_numel for unit in units), default=0)
    return numel * item + exact * EXACT_ITEM_BYTES


def _gradient_sums(shape: ModelShape, choices: PlanChoices) -> tuple[int, str]:
    """Returns the number of elements of all fp32 sums, and a description of them."""
    outer = (shape.embed.numel, shape.head.numel)
    if choices.gradient_sum == GradientSum.DEVICE:
        return sum(outer) + shape.block_sizes.numel, "every unit, summed over the rounds"
    more, largest = shape.block_sizes.largest_sums(seconds_of_pairs(len(shape.blocks), choices))
    words = "the largest block" + (", twice" if more else "")
    if shape.tied:
        return sum(outer) + largest + more, f"embed, head and {words}"
    words = "one unit at a time" + (", two blocks together" if more else "")
    if choices.outer_in_parked:
        return largest + more, f"{words}; embed in pieces, the head among parked gradients"
    return max(*outer, largest) + more, words


def _update_buffer_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of update buffers beyond the memory that they share with other buffers."""
    if not choices.device_homes:
        return 0
    return arena_of(shape, choices).bytes - sum(shared_sum_bytes(shape, choices))


def arena_of(shape: ModelShape, choices: PlanChoices) -> Arena:
    """Returns where the plan's sums and update buffers are in the memory that they share."""
    own = choices.update_buffers - choices.spare_buffers
    size = update_buffer(shape, choices).bytes
    return lay_out_arena(shared_sum_bytes(shape, choices), size, own, choices)


def shared_sum_bytes(shape: ModelShape, choices: PlanChoices) -> Sequence[int]:
    """Returns the bytes of the fp32 sums that share their memory with update buffers: those of the
    blocks, the last one first, where the sums of all rounds stay on the device, and else all of
    them together.
    """
    if choices.gradient_sum == GradientSum.DEVICE:
        return shape.block_sizes.sum_bytes
    return [4 * _gradient_sums(shape, choices)[0]]


def gradient_ring_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the host buffers that pieces of parked gradients pass through. There are
    none where all optimizers run on the device.
    """
    if not choices.parked_gradients or len(choices.device_homes) == len(shape.units):
        return 0
    return GRADIENT_RINGS * ring_numel(shape) * shape.item_bytes


def ring_numel(shape: ModelShape) -> int:
    """Returns the number of elements of a ring buffer of gradients: a small piece."""
    return shape.update_buffer(small_pieces(shape.largest_block)).numel


def update_buffer(shape: ModelShape, choices: PlanChoices) -> UpdateBuffer:
    """Returns the buffer for a piece of the states of a unit that the device updates."""
    buffer = shape.update_buffer(choices.update_pieces)
    return buffer.without_gradients if choices.parked_gradients else buffer


def state_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes that planes and parked gradients take on the host."""
    planes = shape.plane_bytes()
    if choices.parked_gradients:
        del planes["grad"]
    return sum(planes.values()) + gradient_ring_bytes(shape, choices)


def boundary_count(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of blocks that keep a boundary for each micro-batch."""
    blocks = len(shape.blocks)
    return blocks - choices.kept_blocks - len(seconds_of_pairs(blocks, choices))


def host_boundary_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes of boundaries on the host: one for each micro-batch and each block that
    keeps one. tokens: the number of tokens in the largest micro-batch.
    """
    if not choices.host_boundaries:
        return 0
    stored = boundary_count(shape, choices)
    return stored * choices.micro_batches * tokens * shape.hidden_width * shape.item_bytes


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
        logit_bytes = shape.compiled_logit_bytes if compiled else shape.logit_bytes
        self._position_bytes = shape.vocab_size * logit_bytes
        self.loss_chunk: int = job.rounding.get("loss_chunk") or self._new_loss_chunk()
        """The loss is computed for this many positions at a time."""
        self._by_size: dict[int, BlockBytes] = {}

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
            *fixed_items(self.shape, choices, tokens * self.shape.hidden_width),
            *self._step_items(size, choices),
        ]
        if self.device == "cuda":
            items.append(Item(MemoryItem.CUDA_CONTEXT, CUDA_CONTEXT_BYTES))
        slack = round(ALLOCATOR_SLACK * sum(item.bytes for item in items))
        if choices.device_homes and self.shape.optimizer != FP32_MOMENTS:
            slack += ROUNDING_BYTES * update_buffer(self.shape, choices).numel
        slack += LIBRARY_BYTES[self.device]
        if self.compiled and self.device == "cuda":
            slack += COMPILER_BYTES
        items.append(
            Item(MemoryItem.ALLOCATOR_SLACK, slack, "for gaps, and for libraries to work in")
        )
        return tuple(item for item in items if item.bytes)

    def buffers_over_sums(self, choices: PlanChoices) -> int:
        """Returns the number of pieces of states that fit in the memory of the fp32 sums."""
        sums, size = shared_sum_bytes(self.shape, choices), self._piece_bytes(choices)
        if choices.gradients_in_sums:
            return sum(each // 2 // size for each in sums)
        return sum(sums) // size

    def spare_blocks(self, size: int, choices: PlanChoices, buffers: int) -> int | None:
        """Returns how many of the last blocks must lend the memory of their activations to make
        space for `buffers` pieces of states, plus one block to allow for gaps. Returns None where
        too few blocks keep their activations.
        """
        needed = buffers * self._piece_bytes(choices)
        activations = self._blocks(size).activations
        together = choices.micro_batches // choices.rounds
        for count in range(1, choices.kept_blocks):
            needed -= together * activations[-count]
            if needed <= 0:
                return count + 1
        return None

    def _piece_bytes(self, choices: PlanChoices) -> int:
        """Returns the bytes of an update buffer."""
        return update_buffer(self.shape, choices).bytes

    def _new_loss_chunk(self) -> int:
        """Returns the positions of a chunk for a run that does not continue another."""
        budget = LOGITS_BYTES[size_of_device(self.device, self.memory.limit)]
        least, most = LOSS_CHUNKS
        chunk = max(least, min(most, budget // self._position_bytes // least * least))
        return min(chunk, self.shape.max_position_embeddings or chunk)

    # ------------------------------------------------------------------ within a step

    def _step_items(self, size: int, choices: PlanChoices) -> tuple[Item, ...]:
        shape, item = self.shape, self.shape.item_bytes
        tokens = size * self.row_length
        together = choices.micro_batches // choices.rounds  # micro-batches that exist at once
        hidden = tokens * shape.hidden_width * item
        bounded = 0 if choices.host_boundaries else boundary_count(shape, choices)
        kept = together * self._blocks(size).kept_by_last[choices.kept_blocks]
        # The part of the kept activations' memory that spare buffers take is not available to a
        # recompute.
        freed = max(0, kept - choices.spare_buffers * self._piece_bytes(choices))
        working, working_note = self._working_set(size, freed, choices)
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

    def _working_set(self, size: int, freed: int, choices: PlanChoices) -> tuple[int, str]:
        """Returns the most bytes that any one op needs in addition to the kept tensors, and which
        op that is.

        When blocks are recomputed, the blocks with kept activations have already freed them,
        `freed` bytes.
        """
        shape, item = self.shape, self.shape.item_bytes
        tokens = size * self.row_length
        hidden = tokens * shape.hidden_width * item
        blocks = self._blocks(size)
        recomputed = len(shape.blocks) - choices.kept_blocks
        pairs = seconds_of_pairs(len(shape.blocks), choices)
        recompute = max(blocks.by_recompute[recomputed], blocks.by_pairs[len(pairs)])
        block = max(recompute - freed, blocks.by_backward[choices.kept_blocks])
        tail = shape.head.numel + (shape.embed.numel if shape.tied else 0)
        chunk = min(self.loss_chunk, tokens)
        states = 3 if self.compiled else 2
        loss = chunk * self._position_bytes + tail * item + states * hidden
        rows = shape.embed_piece if choices.outer_in_parked else shape.embed.numel
        embed = rows * item + 2 * hidden
        if block >= max(loss, embed):
            return block, f"backward of one block on {tokens:,} tokens"
        return max(loss, embed), f"logits of {chunk:,} positions and the head's gradient"

    def _blocks(self, size: int) -> BlockBytes:
        """Returns what the blocks need for one micro-batch."""
        if size not in self._by_size:
            tokens, item = size * self.row_length, self.shape.item_bytes
            # In a compiled block, a gate's product, its gradient and the gradients of both factors
            # exist at once.
            wide = 4 if self.compiled else 2
            kept, needed = [], []
            for unit in self.shape.blocks:
                kept.append(self._activations(unit).of(size, self.row_length))
                numel = wide * unit.widest * tokens + unit.numel
                needed.append((numel + 2 * tokens * self.shape.hidden_width) * item)
            self._by_size[size] = BlockBytes.of(kept, needed)
        return self._by_size[size]

    def _activations(self, unit: UnitShape) -> Activations:
        if self._masked_blocks:
            return unit.masked_activations
        return unit.compiled_activations if self.compiled else unit.activations

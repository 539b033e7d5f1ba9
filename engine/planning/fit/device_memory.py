"""A `Sizer` computes the memory that the choices of a plan take on the device, item by item. Pure
arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from engine.config.optimizers import OPTIMIZERS
from engine.planning.fit.buffer_sizes import (
    block_slot_bytes,
    device_matrix_bytes,
    fixed_bytes,
    fixed_items,
    offloaded_input_bytes,
    saved_input_count,
    shared_main_grad_bytes,
    update_buffer,
)
from engine.planning.fit.job import Job
from engine.planning.fit.memory_items import Item, MemoryItem
from engine.planning.schedule.choices import GROUP_OF, PlanChoices
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.block_sizes import BlockBytes
from engine.planning.shape.unit_shape import UnitShape
from engine.text import GIB, MIB

COMFORTABLE = {"cuda": 0.95, "small": 0.97, "cpu": 0.88}
"""Fraction of a limit that automatic choices fill: of the memory of a GPU, of a small one, of RAM.
That of RAM is smaller because other programs use RAM too, while everything on the device is ours
and is counted. A small GPU is filled further, or it would have no room to update units.
"""
CUDA_CONTEXT_BYTES = round(0.6 * GIB)
COLLECTIVE_BYTES = round(0.6 * GIB)
"""Memory of each of several GPUs that NCCL takes for its buffers. It is assumed and has not been
measured.
"""
RUNTIME_BYTES = {"cuda": round(2.2 * GIB), "cpu": 480 * MIB}
"""RAM of the program and its libraries (measured: docs/performance.md). Kernels are compiled in the
same process.
"""
WORKER_BYTES = {"cuda": round(2.2 * GIB), "cpu": 350 * MIB}
"""RAM of each further rank, which is a process. It has no data set and no page, and shares the
files of libraries (measured on a CPU: 325 MiB; assumed for CUDA).
"""
ALLOCATOR_SLACK = 0.02
"""Fraction of all allocated memory that the allocator leaves as gaps."""
KERNEL_GAPS = 0.15
"""Gaps as a fraction of the memory that a step allocates and frees on the CPU in bf16: kernels for
rows of another length are made while activations are in memory, and stay among them (measured over
200 steps: 0.16).
"""
LIBRARY_BYTES = {"cuda": 320 * MIB, "cpu": 0}
"""Memory that libraries take whatever the model is: cuBLAS keeps a workspace of 32 MiB for each
thread that calls it, and the allocator asks the driver for 20 MiB at a time, on each stream.
"""
UPDATING_BYTES = 80 * MIB
"""Further memory for the streams of lanes and for kernels where the device updates chunks of states
(measured: 70 MiB on a limit of 23 GiB).
"""
COMPILER_BYTES = 64 * MIB
"""Bytes of the buffer with which variants of kernels are timed while they are compiled: the size of
the GPU's cache (60 MiB on an H200).
"""
GRAPH_BYTES = 1 * MIB
"""Approximate bytes of a CUDA graph of one pass over a block."""
LOGITS_BYTES = {"cuda": round(2.5 * GIB), "small": 768 << 20, "cpu": 256 << 20}
"""Most bytes of the logits of one chunk of the loss."""
SMALL_GPU_BYTES = 26 * GIB
"""Memory below which a GPU counts as small. The chunk of logits has one of two sizes on GPUs and is
no fraction of the free memory, because another size rounds differently, which must not happen in a
resumed run.
"""
LOSS_CHUNKS = (128, 8192)
"""Fewest and most positions of a chunk of the loss."""
STEP_TOKEN_BYTES = 32
"""Bytes of the inputs of one token: its id, its position, its loss index and its label, int64
each.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that blocks compute in: that of a GPU, or RAM on the CPU."""

    device: str
    """`cpu` or `cuda`."""
    limit: int
    """Bytes of it that this process may take."""
    to_fill: float
    """Bytes that automatic choices may fill."""
    keeping: float
    """Most bytes of all items together with which blocks stay in their slots and keep their
    activations.
    """


def size_of_device(device: str, limit: int) -> str:
    """Returns `small` for a GPU with little memory, else `device`."""
    return "small" if device == "cuda" and limit < SMALL_GPU_BYTES else device


NOT_FIXED = (
    "micro_batches",
    "rounds",
    "slots",
    "unsharded_reads",
    "prefetch_depth",
    "blocks_kept_in_slots",
    "disk_offloaded_units",
    "disk_offloaded_block_inputs",
    "blocks_without_recompute",
    "compiled",
    "tile_tokens",
    "graphs",
    "moments_after_weights",
    "device_updated_units",
)
"""Choices that do not change the bytes of what is kept throughout a run, but for the slots of
blocks, which accumulators are apart, and whether the device updates any unit.
"""
NOT_IN_STEP = (
    "slots",
    "unsharded_reads",
    "prefetch_depth",
    "blocks_kept_in_slots",
    "gpu_resident_units",
    "disk_offloaded_units",
    "disk_offloaded_block_inputs",
    "gradients_on_gpu",
    "block_input_rings",
    "main_grad",
    "compiled",
    "tile_tokens",
    "attention_blocks",
    "attention_bytes",
    "moments_after_weights",
    "device_updated_units",
    "update_buffers",
    "update_chunks",
)
"""Choices that do not change the bytes of what is allocated within a step."""
_CUDA_CONTEXT = Item(MemoryItem.CUDA_CONTEXT, CUDA_CONTEXT_BYTES)


def _values_but(names: Collection[str]) -> Callable[[PlanChoices], tuple[Any, ...]]:
    """Returns a function that returns the values of all choices but these."""
    kept = [name for name in GROUP_OF if name not in names]
    return attrgetter(*(f"{GROUP_OF[name]}.{name}" for name in kept))


class Sizer:
    """Computes the device bytes of any choices, for one job and one device's memory. The `size` of
    its public methods is the rows of a micro-batch.
    """

    def __init__(self, job: Job, memory: DeviceMemory, compiled: bool, tile_tokens: int = 0):
        shape = job.shape
        self.job = job
        self.memory = memory
        self.compiled = compiled
        self.tile_tokens = tile_tokens
        """Tokens of a sequence chunk in which parts of the blocks run; 0 where they run on whole
        rows.
        """
        self.shape = shape
        self.row_length = job.row_length
        self.packed = job.config.packs and shape.packs
        self._dense_mask = shape.attention.dense_mask(self.packed, job.row_length)
        self._masked_blocks = shape.attention.masked_blocks(
            self.packed, job.row_length, shape.dtype, memory.device
        )
        logit_bytes = shape.compiled_logit_bytes if compiled else shape.logit_bytes
        self._position_bytes = shape.vocab_size * logit_bytes
        self.loss_chunk: int = job.rounding.get("loss_chunk") or self._new_loss_chunk()
        """Number of positions for which the loss is computed at a time."""
        self._by_size: dict[int, BlockBytes] = {}
        self._fixed_by, self._step_by = _values_but(NOT_FIXED), _values_but(NOT_IN_STEP)
        self._fixed_totals: dict[tuple[Any, ...], int] = {}
        self._step_totals: dict[tuple[Any, ...], int] = {}

    @property
    def device(self) -> str:
        return self.memory.device

    @property
    def most_without_recompute(self) -> int:
        """Number of blocks with a backward, which may keep their activations for it."""
        return len(self.shape.blocks) - self.shape.forward_blocks

    def block_input_bytes(self, size: int, choices: PlanChoices) -> int:
        """Returns the bytes that block inputs take of RAM, those of all ranks of a node."""
        tokens = size * self.row_length
        return choices.sharding.ranks_per_node * offloaded_input_bytes(self.shape, choices, tokens)

    def fits(self, size: int, choices: PlanChoices, limit: float | None = None) -> bool:
        """Returns whether the choices take no more than `limit` bytes, by default those that
        automatic choices may fill.
        """
        if limit is None:
            limit = self.memory.to_fill
        return self.total(size, choices) <= limit

    def total(self, size: int, choices: PlanChoices) -> int:
        """Returns the bytes of all items."""
        taken = self._fixed_bytes(size, choices) + self._step_bytes(size, choices)
        return taken + self._slack(taken, choices) + self._gaps_of_kernels(size, choices)

    def items(self, size: int, choices: PlanChoices) -> tuple[Item, ...]:
        """Returns the items that take memory, with their bytes."""
        items = [
            *fixed_items(self.shape, choices, self._block_input_numel(size)),
            *self._step_items(size, choices),
            *self._program_items(choices),
        ]
        slack = self._slack(sum(item.bytes for item in items), choices)
        slack += self._gaps_of_kernels(size, choices)
        items.append(
            Item(MemoryItem.ALLOCATOR_SLACK, slack, "for gaps, and for libraries to work in")
        )
        return tuple(item for item in items if item.bytes)

    def _fixed_bytes(self, size: int, choices: PlanChoices) -> int:
        """Returns the bytes of what is kept throughout the run, and of what the program takes. But
        for the blocks' slots, they are computed once for all choices that differ only in what they
        do not depend on.
        """
        # The number of rows matters only for the rings of block inputs, and that of blocks which
        # keep their activations only for which accumulators are apart.
        rows = size if choices.activations.offloaded_block_inputs else 0
        apart = choices.blocks_with_second_main_grad(len(self.shape.blocks))
        key = (rows, apart, not choices.updates.device_updated_units, self._fixed_by(choices))
        slots = sum(block_slot_bytes(self.shape, choices))
        if key not in self._fixed_totals:
            found = fixed_bytes(self.shape, choices, self._block_input_numel(size))
            program = sum(item.bytes for item in self._program_items(choices))
            self._fixed_totals[key] = sum(found.values()) - slots + program
        return self._fixed_totals[key] + slots

    def _step_bytes(self, size: int, choices: PlanChoices) -> int:
        """Returns the sum of `_step_items`, which is computed as seldom."""
        key = (size, self._step_by(choices))
        if key not in self._step_totals:
            found = self._step_items(size, choices)
            self._step_totals[key] = sum(item.bytes for item in found)
        return self._step_totals[key]

    def _slack(self, taken: int, choices: PlanChoices) -> int:
        """Returns the bytes of gaps where all items take so much, and those of libraries."""
        streamed = choices.updates.device_updated_units
        updates_there = streamed or choices.placement.gpu_resident_units
        slack = round(ALLOCATOR_SLACK * taken)
        if updates_there:
            slack += OPTIMIZERS[self.shape.optimizer].device_bytes
            slack += device_matrix_bytes(self.shape)
        slack += LIBRARY_BYTES[self.device] + (UPDATING_BYTES if streamed else 0)
        if self.compiled and self.device == "cuda":
            slack += COMPILER_BYTES
        return slack + GRAPH_BYTES * choices.recorded_passes(len(self.shape.blocks))

    def _gaps_of_kernels(self, size: int, choices: PlanChoices) -> int:
        """Returns the bytes of the gaps that kernels of oneDNN leave among activations."""
        if self.device != "cpu" or self.shape.dtype != "bfloat16":
            return 0
        return round(KERNEL_GAPS * self._step_bytes(size, choices))

    def _block_input_numel(self, size: int) -> int:
        """Returns the elements of the input of a block."""
        return size * self.row_length * self.shape.hidden_width

    def _program_items(self, choices: PlanChoices) -> tuple[Item, ...]:
        """Returns the items of what the program takes whatever it trains."""
        found = (_CUDA_CONTEXT,) if self.device == "cuda" else ()
        return (*found, self._exchange(choices)) if choices.sharding.world_size > 1 else found

    def _exchange(self, choices: PlanChoices) -> Item:
        """Returns the item of what one rank exchanges tensors with the others through. On the CPU a
        sum that is added up has a copy there (`engine.runtime.collectives`).
        """
        if self.device == "cuda":
            # Nodes with copies have groups of all ranks, of those of a node, and between nodes.
            groups = 1 if choices.sharding.replicas == 1 else 2 + (choices.sharding.ranks > 1)
            size = groups * COLLECTIVE_BYTES
            return Item(MemoryItem.COLLECTIVE, size, "NCCL; assumed, not measured")
        units = self.shape.padded(choices.sharding.ranks).units
        size = 4 * max(unit.gradient_numel for unit in units)
        return Item(MemoryItem.COLLECTIVE, size, "the largest gradient, from all processes")

    def buffers_over_main_grads(self, choices: PlanChoices) -> int:
        """Returns the number of chunks of states that fit in the memory of the accumulators."""
        main_grads = shared_main_grad_bytes(self.shape, choices)
        return sum(main_grads) // update_buffer(self.shape, choices).bytes

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
        together = choices.batching.micro_batches_per_round  # micro-batches that exist at once
        hidden = tokens * shape.hidden_width * item
        activations, blocks = choices.activations, self._blocks(size)
        on_host = activations.offloaded_block_inputs
        with_saved_input = 0 if on_host else saved_input_count(shape, choices)
        kept = together * blocks.kept_by_last[activations.blocks_without_recompute]
        working, working_note = self._working_set(size, kept, choices)
        masks = self._mask_bytes(size, together)
        rotary_rows = size if self.packed else 1  # packed rows each have their own positions
        per_token = rotary_rows * shape.argument_numel + size * shape.handed_numel
        rotary = self.row_length * per_token * item
        return (
            Item(
                MemoryItem.BLOCK_INPUTS,
                together * with_saved_input * hidden,
                f"inputs of {with_saved_input} blocks, {together * tokens:,} tokens",
            ),
            Item(
                MemoryItem.HIDDEN_STATES,
                together * hidden,
                f"{together} micro-batch{'es' if together > 1 else ''} of {tokens:,} tokens",
            ),
            Item(
                MemoryItem.ROTARY_EMBEDDINGS,
                together * rotary * (2 if choices.kernels.graphs else 1),  # graphs read copies
                "made once for all blocks, with their other inputs",
            ),
            Item(
                MemoryItem.KEPT_ACTIVATIONS,
                kept,
                f"{choices.activations.blocks_without_recompute} blocks that are not recomputed",
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
        pairs = together * size * self.row_length**2 * shape.attention.mask_kinds
        if self._dense_mask:
            return pairs * (item if shape.attention.implementation == "eager" else 1)
        attention = shape.attention
        if attention.masked_at_once(self.packed, size, self.row_length, shape.dtype, self.device):
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
        kept = choices.activations.blocks_without_recompute
        recomputed = len(shape.blocks) - kept
        pairs = choices.activations.seconds_of_pairs(len(shape.blocks))
        recompute = max(blocks.by_recompute[recomputed], blocks.by_pairs[len(pairs)])
        block = max(recompute - freed, blocks.by_backward[kept])
        # Blocks make the gradients of what they share.
        embed_numel = shape.embed.gradient_numel - shape.embed.shared_count
        tail = shape.head.gradient_numel + (embed_numel if shape.tied else 0)
        chunk = min(self.loss_chunk, tokens)
        states = 3 if self.compiled else 2
        loss = chunk * self._position_bytes + tail * item + states * hidden
        in_kept_gradients = choices.streaming.embed_and_head_in_kept_gradients
        rows = shape.embed_chunk if in_kept_gradients else embed_numel
        embed = rows * item + 2 * hidden
        if choices.kernels.graphs:
            # What graphs need is kept for them, and a buffer is there between blocks and the rest.
            note = f"backward of one block on {tokens:,} tokens, and logits beside CUDA graphs"
            return block + max(loss, embed) + hidden, note
        if block >= max(loss, embed):
            chunks = f", in sequence chunks of {self.tile_tokens:,}" if self.tile_tokens else ""
            return block, f"backward of one block on {tokens:,} tokens{chunks}"
        return max(loss, embed), f"logits of {chunk:,} positions and the head's gradient"

    def _blocks(self, size: int) -> BlockBytes:
        """Returns what the blocks need for one micro-batch."""
        if size not in self._by_size:
            tokens, item = size * self.row_length, self.shape.item_bytes
            # In a compiled block, a gate's product, its gradient and the gradients of both factors
            # exist at once.
            wide = 4 if self.compiled else 2
            kept, needed, inputs = [], [], []
            for place, unit in enumerate(self.shape.blocks):
                goes_back = place >= self.shape.forward_blocks
                if self.tile_tokens and unit.tiled is not None:
                    activations = unit.tiled.kept_bytes(tokens)
                    most = unit.tiled.peak_bytes(tokens, self.tile_tokens)
                    inputs.append(tokens * self.shape.hidden_width * item)
                    kept.append(activations + inputs[-1] if goes_back else 0)
                    needed.append(most - activations)
                    continue
                inputs.append(0)
                activations = self._activations(unit).of(size, self.row_length)
                activations += unit.adapted_numel * item  # what stacked experts run with
                kept.append(activations if goes_back else 0)
                # The gradient of one expert after the other is added to those of all.
                numel = wide * unit.widest * tokens + unit.gradient_numel + 2 * unit.adapted_numel
                numel += unit.shared_count
                needed.append((numel + 2 * tokens * self.shape.hidden_width) * item)
            self._by_size[size] = BlockBytes.of(kept, needed, inputs)
        return self._by_size[size]

    def _activations(self, unit: UnitShape) -> Activations:
        if self._masked_blocks:
            return unit.masked_activations
        return unit.compiled_activations if self.compiled else unit.activations

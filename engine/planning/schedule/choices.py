"""A plan is built from `PlanChoices`, `PlaneSizes` and the names of the units. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.planning.schedule.buffers import EMBED, HEAD
from engine.planning.schedule.ops import MainGrad


@dataclass(frozen=True)
class PlanChoices:
    """How a step is spread over micro-batches and rounds, and how it uses memory."""

    micro_batches: int = 1
    """Number of micro-batches of a step."""
    ranks: int = 1
    """Number of ranks (processes with a device each) that a replica of the planes is sharded over.
    All other choices are those of one rank, which has `micro_batches` of its own.
    """
    replicas: int = 1
    """Number of copies of all planes, on different nodes. Each has `ranks` of its own, and all of
    them compute the step.
    """
    nodes_per_replica: int = 1
    """Number of nodes over which the ranks of a replica are spread. Each node has the shards of its
    own ranks.
    """
    unsharded_reads: bool = False
    """Whether each of several ranks reads whole units from RAM. Otherwise a rank reads its shard,
    and gets the others from the devices of the other ranks.
    """
    rounds: int = 1
    """Number of gradient-accumulation rounds: whole passes over the blocks, each of some of the
    micro-batches. It divides their number.
    """
    slots: int = 2
    """Number of device buffers that are shared by the blocks that are not kept in slots."""
    prefetch_depth: int = 1
    """Number of block uses by which a prefetch may be issued ahead (at most slots - 1 can be in
    flight).
    """
    blocks_kept_in_slots: int = 0
    """Number of blocks, counted from the last, that keep their own slot throughout the step."""
    gpu_resident_units: int = 0
    """Number of units, counted from embed, that live on the device: all their planes stay there
    from step to step. The host has none of them, and nothing of them crosses the bus.
    """
    gpu_resident_apart: bool = False
    """Whether the blocks among these units are spread evenly over those that are not kept in slots,
    where they are otherwise the first ones. Then the bus never has to bring one block after the
    other.
    """
    disk_offloaded_units: int = 0
    """Number of units that keep their moments on the disk. They are counted from the head
    backwards. The moments pass through a few buffers on the host in every step. All other planes of
    theirs are in RAM.
    """
    disk_offloaded_block_inputs: int = 0
    """Number of a step's block inputs that are on the disk from forward to backward, spread evenly
    over those of all blocks and micro-batches, so that the disk has as much to do at all times. The
    others must be on the host.
    """
    blocks_without_recompute: int = 0
    """Number of blocks, counted from the last, that keep their activations from forward to
    backward. They are not recomputed.
    """
    offloaded_block_inputs: bool = False
    """Whether block inputs are kept on the host until backward, not on the device."""
    gradients_on_gpu: bool = False
    """Whether rounded gradients wait on the device until the clip factor of the step is known, so
    that the host has no plane for them.
    """
    gradients_in_main_grads: bool = False
    """Whether a kept gradient takes the second half of the memory of its fp32 accumulator. All
    accumulators must be kept on the device, and gradients must be in bf16.
    """
    shared_embed_and_head_slot: bool = False
    """Whether embed and head share one slot, so that embed is fetched again for its backward. The
    model must not be tied.
    """
    embed_and_head_in_kept_gradients: bool = False
    """Whether the slot of embed and head is in the memory of the kept gradient of embed, and the
    fp32 accumulator of the head in that of the first blocks, whose gradients come last. The
    accumulator of embed is made for some rows of the table at a time. It needs
    `shared_embed_and_head_slot`, one round and kept gradients.
    """
    blocks_per_saved_input: int = 1
    """Number of blocks for each saved block input: 1, or 2, where two blocks are recomputed
    together for each micro-batch, and take two slots and two accumulators.
    """
    block_input_rings: int = 3
    """Number of device buffers each way through which block inputs pass to the host and back."""
    main_grad: MainGrad = MainGrad.VERTICAL
    """Where gradients are accumulated over the rounds; `VERTICAL` exactly where there is one
    round.
    """
    compiled: bool = False
    """Whether the kernels of the blocks and of the loss are compiled by torch."""
    tile_tokens: int = 0
    """Tokens of a sequence chunk on which the position-wise parts of a block run at a time, and
    again in backward; 0 where they run on whole rows. Blocks with sequence tiling are not compiled.
    """
    attention_blocks: int = 0
    """Number of the recomputed blocks, counted from the last, that keep what attention returned on
    the host, beside their input: its kernel runs once in forward and not again in the recompute. It
    needs sequence tiling, and block inputs on the host.
    """
    attention_bytes: int = 0
    """Number of bytes that these blocks keep for each token of what attention returned."""
    graphs: bool = False
    """Whether the kernels of a block are launched together, as a CUDA graph. All blocks must live
    on the device, and block inputs must stay there.
    """
    moments_after_weights: bool = False
    """Whether the host updates the weights of all its units first, and then their moments: the next
    forward pass waits for weights alone. Moments must be in fp32, and gradients in planes of the
    host.
    """
    device_updated_units: tuple[str, ...] = ()
    """Units whose optimizers run on the device, on states that are streamed there. All other units'
    optimizers run on the host.
    """
    update_buffers: int = 0
    """Number of chunks of states that are on the device at once; it is 0 where all optimizers run
    on the host.
    """
    update_chunks: int = 1
    """Number of chunks in which the largest block is updated on the device. Small chunks take
    little memory, but each is launched by itself.
    """
    spare_buffers: int = 0
    """Number of update buffers, never all of them, that use the memory of activations while no
    activations are kept.
    """
    spare_blocks: int = 0
    """Number of blocks, counted from the last, from whose activations the spare buffers take their
    memory. All of them must keep their activations.
    """

    @property
    def compiles_blocks(self) -> bool:
        """Whether the kernels of the blocks are compiled."""
        return self.compiled and not self.tile_tokens

    @property
    def world_size(self) -> int:
        """Number of ranks that compute the step, on all nodes."""
        return self.replicas * self.ranks

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.ranks // self.nodes_per_replica

    @property
    def node_count(self) -> int:
        """Number of nodes that compute the step."""
        return self.replicas * self.nodes_per_replica

    def changed(self, **values: Any) -> PlanChoices:
        """Returns the choices with some others, as `dataclasses.replace` does. It takes a tenth of
        the time, and the planner asks a hundred thousand times. Raises TypeError for a name that is
        not one of a choice.
        """
        if not values.keys() <= vars(self).keys():
            raise TypeError(f"not all of these are choices: {', '.join(values)}")
        found = object.__new__(PlanChoices)
        vars(found).update(vars(self), **values)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the choices as plain data, in the form used in run records."""
        return asdict(self) | {"main_grad": self.main_grad.value}


def gpu_resident_of(blocks: Sequence[str], choices: PlanChoices) -> tuple[str, ...]:
    """Returns the units that live on the device, in forward order."""
    some = [blocks[at] for at in gpu_resident_places(len(blocks), choices)]
    return (EMBED, *some, HEAD)[: choices.gpu_resident_units]


def disk_offloaded_of(blocks: Sequence[str], choices: PlanChoices) -> tuple[str, ...]:
    """Returns the units whose moments are on the disk, in forward order."""
    units = (EMBED, *blocks, HEAD)
    return units[len(units) - choices.disk_offloaded_units :]


def gpu_resident_blocks(blocks: int, choices: PlanChoices) -> int:
    """Returns how many of the blocks live on the device."""
    return min(max(0, choices.gpu_resident_units - 1), blocks)


def gpu_resident_places(blocks: int, choices: PlanChoices) -> Sequence[int]:
    """Returns which of the `blocks` blocks, counted from 0, live on the device, in forward
    order.
    """
    count = gpu_resident_blocks(blocks, choices)
    if not choices.gpu_resident_apart:
        return range(count)
    turns = evenly(count, blocks - choices.blocks_kept_in_slots)
    return [at for at, (now, then) in enumerate(itertools.pairwise(turns)) if then > now]


def evenly(some: int, of: int) -> list[int]:
    """Returns how many of `some` things are among the first 0, 1, 2 and so on of `of` things, if
    there are as many others between any two of them.
    """
    return [at * some // max(1, of) for at in range(of + 1)]


def recorded_passes(blocks: int, choices: PlanChoices) -> int:
    """Returns how many passes over `blocks` blocks are recorded as CUDA graphs: forward, backward
    and a recompute at most, for each micro-batch that exists at once. Rounds after the first have
    their own.
    """
    if not choices.graphs:
        return 0
    together = choices.micro_batches // choices.rounds
    return 3 * blocks * together * min(2, choices.rounds)


def seconds_of_pairs(blocks: int, choices: PlanChoices) -> range:
    """Returns which of the `blocks` blocks, counted from 0, keep no input. They are recomputed from
    the block before them.
    """
    recomputed = blocks - choices.blocks_without_recompute
    return range(1, recomputed, 2) if choices.blocks_per_saved_input == 2 else range(0)


def blocks_with_saved_input(blocks: int, choices: PlanChoices) -> list[int]:
    """Returns which of the `blocks` blocks, counted from 0, keep their input for each
    micro-batch.
    """
    seconds = seconds_of_pairs(blocks, choices)
    return [
        block for block in range(blocks - choices.blocks_without_recompute) if block not in seconds
    ]


def blocks_with_attention(back: Sequence[str], choices: PlanChoices) -> tuple[str, ...]:
    """Returns the blocks that keep what attention returned. back: the blocks with a backward, in
    forward order.
    """
    recomputed = back[: len(back) - choices.blocks_without_recompute]
    return tuple(recomputed[len(recomputed) - choices.attention_blocks :])


def block_inputs_on_disk(blocks: int, choices: PlanChoices) -> set[tuple[int, int]]:
    """Returns the block inputs that are on the disk, by block and micro-batch, both counted from 0.
    In forward order, there are as many others between any two of them.
    """
    together, disk_offloaded = (
        choices.micro_batches // choices.rounds,
        choices.disk_offloaded_block_inputs,
    )
    with_saved_input = blocks_with_saved_input(blocks, choices)
    in_order = [
        (block, number * together + place)
        for number in range(choices.rounds)
        for block in with_saved_input
        for place in range(together)
    ]
    turns = evenly(disk_offloaded, len(in_order))
    return {key for key, (now, then) in zip(in_order, itertools.pairwise(turns)) if then > now}


def has_one_term(choices: PlanChoices) -> bool:
    """Returns whether the accumulators of blocks have one term when several ranks of a node add
    them up: the gradient of one micro-batch, as autograd returns it.

    Among the ranks of several nodes, accumulators would be the fewer bytes: what ranks of a node
    have added up passes over the network once.
    """
    is_accumulated_later = choices.main_grad == MainGrad.DEVICE
    is_one = choices.micro_batches == choices.rounds and not is_accumulated_later
    return is_one and choices.ranks > 1 and choices.nodes_per_replica == 1


def blocks_with_second_main_grad(blocks: int, choices: PlanChoices) -> range:
    """Returns which of the `blocks` blocks, counted from 0, have their fp32 accumulators in a
    second buffer: with several ranks every second one, counted from the last; else the seconds of
    pairs.
    """
    if choices.world_size > 1:
        return range((blocks + 1) % 2, blocks, 2)
    return seconds_of_pairs(blocks, choices)


@dataclass(frozen=True)
class PlaneSizes:
    """Sizes of the units' planes. A plan needs them where an optimizer runs on the device."""

    numel: Mapping[str, int]
    """Number of elements of each plane of a unit."""
    chunk_numel: int = 0
    """Elements of the chunk in an update buffer; 0 stands for the largest block."""
    ring_numel: int = 0
    """Elements of a ring buffer of gradients; 0 stands for the largest block."""
    buffer_bytes: int = 0
    """Bytes of an update buffer; 0 stands for 14 an element, as with bfloat16 weights and moments
    in fp32.
    """
    embed_chunk: int = 0
    """Number of elements for which the gradient of embed is accumulated at a time where
    `embed_and_head_in_kept_gradients` says so (`engine.planning.layout.embed_chunks`); 0 where that
    is not possible.
    """
    item_bytes: int = 2
    """Bytes that a weight takes on the device."""
    disk_chunk_numel: int = 0
    """Number of elements of a chunk of the moments on the disk; 0 stands for the largest unit of
    those.
    """
    frozen: tuple[str, ...] = ()
    """Units of which no parameter is trained."""
    has_fp32_weights: bool = False
    """Whether some weights stay in fp32 in a bf16 model, and so do their gradients."""
    rank: int = 0
    """Number on its node of the rank that the plan is for."""


def forward_choices(choices: PlanChoices) -> PlanChoices:
    """Returns what the plans of passes without gradients take over from those of training."""
    return PlanChoices(
        slots=choices.slots,
        prefetch_depth=choices.prefetch_depth,
        blocks_kept_in_slots=choices.blocks_kept_in_slots,
        gpu_resident_units=choices.gpu_resident_units,
        gpu_resident_apart=choices.gpu_resident_apart,
        shared_embed_and_head_slot=choices.shared_embed_and_head_slot,
        tile_tokens=choices.tile_tokens,
        ranks=choices.ranks if choices.nodes_per_replica > 1 else 1,
        nodes_per_replica=choices.nodes_per_replica,
    )

"""A plan is built from `PlanChoices`, `PlaneSizes` and the names of the units. No torch.

Choices are grouped by the question that they answer. `check` refuses those that contradict each
other whatever the units are: a group its own, `PlanChoices` those of several groups.
`engine.planning.schedule.build` calls it, and refuses what the units do not allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.planning.schedule.buffers import EMBED, HEAD, Word
from engine.planning.schedule.ops import MainGrad


class EmbedAndHead(Word):
    """The memory on the device of the weights of embed and head."""

    OWN_SLOTS = "own_slots"
    """Each has a slot of its own."""
    SHARED_SLOT = "shared_slot"
    """They share one slot, so that embed is fetched again for its backward. The model must not be
    tied.
    """
    IN_KEPT_GRADIENTS = "in_kept_gradients"
    """Their shared slot is in the memory of the kept gradient of embed, and the fp32 accumulator of
    the head in that of the first blocks, whose gradients come last. The accumulator of embed is
    made for some rows of the table at a time. It needs one round and kept gradients.
    """


@dataclass(frozen=True)
class Batching:
    """How the rows of a step are split."""

    micro_batches: int = 1
    """Number of micro-batches of a step."""
    rounds: int = 1
    """Number of gradient-accumulation rounds: whole passes over the blocks, each of some of the
    micro-batches. It divides their number.
    """

    @property
    def micro_batches_per_round(self) -> int:
        """Number of micro-batches that exist at once."""
        return self.micro_batches // self.rounds

    def check(self) -> None:
        """Raises ValueError for rounds that would have unequal numbers of micro-batches."""
        if self.micro_batches % self.rounds:
            raise ValueError(
                f"{self.rounds} rounds do not divide {self.micro_batches} micro-batches"
            )


@dataclass(frozen=True)
class Sharding:
    """How the planes are spread over ranks and nodes."""

    ranks: int = 1
    """Number of ranks (processes with a device each) that a replica of the planes is sharded over.
    All choices of other groups are those of one rank, which has `micro_batches` of its own.
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

    def check(self) -> None:
        """Raises ValueError for nodes with unequal numbers of ranks, and for reads of whole units
        where no rank or node has others to read.
        """
        if self.ranks == 1 and self.unsharded_reads:
            raise ValueError("one rank of a node reads whole units anyway")
        if self.ranks % self.nodes_per_replica:
            raise ValueError(
                f"{self.nodes_per_replica} nodes have unequal shares of {self.ranks} ranks"
            )
        if self.nodes_per_replica > 1 and self.unsharded_reads:
            raise ValueError("no node has whole units where planes are divided among nodes")


@dataclass(frozen=True)
class Placement:
    """Where units live from step to step. All other planes are in RAM."""

    gpu_resident_units: int = 0
    """Number of units, counted from embed, that live on the device: all their planes stay there
    from step to step. The host has none of them, and nothing of them crosses the bus.
    """
    gpu_resident_apart: bool = False
    """Whether the blocks among these units are spread evenly over those that are not kept in slots,
    where they are otherwise the first ones. Then the bus never has to bring one block after the
    other.
    """
    blocks_kept_in_slots: int = 0
    """Number of blocks, counted from the last, whose weights keep their own slot throughout the
    step.
    """
    disk_offloaded_units: int = 0
    """Number of units that keep their moments on the disk. They are counted from the head
    backwards. The moments pass through a few buffers on the host in every step. All other planes of
    theirs are in RAM.
    """

    def check(self) -> None:
        """Raises ValueError for moments on the disk of units that may live on the device."""
        if self.disk_offloaded_units and self.gpu_resident_apart:
            raise ValueError(
                "moments on the disk are the last ones, and some of these may live apart"
            )

    def gpu_resident(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """Returns the units that live on the device, in forward order."""
        some = [blocks[at] for at in self.gpu_resident_places(len(blocks))]
        return (EMBED, *some, HEAD)[: self.gpu_resident_units]

    def gpu_resident_blocks(self, blocks: int) -> int:
        """Returns how many of the `blocks` blocks live on the device."""
        return min(max(0, self.gpu_resident_units - 1), blocks)

    def gpu_resident_places(self, blocks: int) -> Sequence[int]:
        """Returns which of the `blocks` blocks, counted from 0, live on the device, in forward
        order.
        """
        count = self.gpu_resident_blocks(blocks)
        if not self.gpu_resident_apart:
            return range(count)
        turns = _evenly(count, blocks - self.blocks_kept_in_slots)
        return [at for at, (now, then) in enumerate(itertools.pairwise(turns)) if then > now]

    def disk_offloaded(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """Returns the units whose moments are on the disk, in forward order."""
        units = (EMBED, *blocks, HEAD)
        return units[len(units) - self.disk_offloaded_units :]


@dataclass(frozen=True)
class Streaming:
    """What weights pass through on the device where they do not stay there."""

    slots: int = 2
    """Number of device buffers that are shared by the blocks that are not kept in slots."""
    prefetch_depth: int = 1
    """Number of block uses by which a prefetch may be issued ahead (at most slots - 1 can be in
    flight).
    """
    embed_and_head: EmbedAndHead = EmbedAndHead.OWN_SLOTS
    """The slots of embed and head."""

    @property
    def shared_embed_and_head_slot(self) -> bool:
        """Whether embed and head share one slot."""
        return self.embed_and_head != EmbedAndHead.OWN_SLOTS

    @property
    def embed_and_head_in_kept_gradients(self) -> bool:
        """Whether the shared slot of embed and head is in the memory of kept gradients."""
        return self.embed_and_head == EmbedAndHead.IN_KEPT_GRADIENTS


@dataclass(frozen=True)
class KeptActivations:
    """What is kept of each block from forward to backward, and where."""

    blocks_without_recompute: int = 0
    """Number of blocks, counted from the last, that keep their activations from forward to
    backward. They are not recomputed.
    """
    blocks_per_saved_input: int = 1
    """Number of blocks for each saved block input: 1, or 2, where two blocks are recomputed
    together for each micro-batch, and take two slots and two accumulators.
    """
    offloaded_block_inputs: bool = False
    """Whether block inputs are kept on the host until backward, not on the device."""
    block_input_rings: int = 3
    """Number of device buffers each way through which block inputs pass to the host and back."""
    disk_offloaded_block_inputs: int = 0
    """Number of a step's block inputs that are on the disk from forward to backward, spread evenly
    over those of all blocks and micro-batches, so that the disk has as much to do at all times. The
    others must be on the host.
    """
    attention_blocks: int = 0
    """Number of the recomputed blocks, counted from the last, that keep what attention returned on
    the host, beside their input: its kernel runs once in forward and not again in the recompute. It
    needs sequence tiling, and block inputs on the host.
    """
    attention_bytes: int = 0
    """Number of bytes that these blocks keep for each token of what attention returned."""

    def check(self) -> None:
        """Raises ValueError for block inputs that go to the disk from the device, and for attention
        that is kept of blocks without a block input in RAM of their own.
        """
        if self.blocks_per_saved_input not in (1, 2):
            raise ValueError(f"no input is kept for {self.blocks_per_saved_input} blocks together")
        if self.disk_offloaded_block_inputs and not self.offloaded_block_inputs:
            raise ValueError(
                "block inputs go to the disk from the host, and they are on the device"
            )
        if not self.attention_blocks:
            return
        waits_in_ram = self.offloaded_block_inputs and not self.disk_offloaded_block_inputs
        if not (waits_in_ram and self.attention_bytes > 0):
            raise ValueError("attention is kept beside block inputs in RAM")
        if self.blocks_per_saved_input > 1:
            raise ValueError("attention is kept of blocks that each keep their input, not of pairs")

    def seconds_of_pairs(self, blocks: int) -> range:
        """Returns which of the `blocks` blocks, counted from 0, keep no input. They are recomputed
        from the block before them.
        """
        recomputed = blocks - self.blocks_without_recompute
        return range(1, recomputed, 2) if self.blocks_per_saved_input == 2 else range(0)

    def blocks_with_saved_input(self, blocks: int) -> list[int]:
        """Returns which of the `blocks` blocks, counted from 0, keep their input for each
        micro-batch.
        """
        seconds = self.seconds_of_pairs(blocks)
        return [
            block for block in range(blocks - self.blocks_without_recompute) if block not in seconds
        ]

    def blocks_with_attention(self, back: Sequence[str]) -> tuple[str, ...]:
        """Returns the blocks that keep what attention returned. back: the blocks with a backward,
        in forward order.
        """
        recomputed = back[: len(back) - self.blocks_without_recompute]
        return tuple(recomputed[len(recomputed) - self.attention_blocks :])


@dataclass(frozen=True)
class Gradients:
    """Where gradients are accumulated, and where they wait for the clip factor."""

    main_grad: MainGrad = MainGrad.VERTICAL
    """Where gradients are accumulated over the rounds; `VERTICAL` exactly where there is one
    round.
    """
    gradients_on_gpu: bool = False
    """Whether rounded gradients wait on the device until the clip factor of the step is known, so
    that the host has no plane for them.
    """

    def check(self) -> None:
        """Raises ValueError for kept gradients that have no place on the device."""
        if self.gradients_on_gpu and self.main_grad == MainGrad.HOST:
            raise ValueError("kept gradients cannot be accumulated on the host")


@dataclass(frozen=True)
class Updates:
    """Where and when the optimizers of units run."""

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
    moments_after_weights: bool = False
    """Whether the host updates the weights of all its units first, and then their moments: the next
    forward pass waits for weights alone. Moments must be in fp32, and gradients in planes of the
    host.
    """

    def check(self) -> None:
        """Raises ValueError for units that the device has no buffer to update in."""
        if self.device_updated_units and self.update_buffers < 1:
            raise ValueError(
                f"{self.update_buffers} buffers for the optimizers of {self.device_updated_units}"
            )


@dataclass(frozen=True)
class Kernels:
    """How the kernels of blocks run."""

    compiled: bool = False
    """Whether the kernels of the blocks and of the loss are compiled by torch."""
    tile_tokens: int = 0
    """Tokens of a sequence chunk on which the position-wise parts of a block run at a time, and
    again in backward; 0 where they run on whole rows. Blocks with sequence tiling are not compiled.
    """
    graphs: bool = False
    """Whether the kernels of a block are launched together, as a CUDA graph. All blocks must live
    on the device, and block inputs must stay there.
    """

    @property
    def compiles_blocks(self) -> bool:
        """Whether the kernels of the blocks are compiled."""
        return self.compiled and not self.tile_tokens


@dataclass(frozen=True)
class PlanChoices:
    """How a step is spread over micro-batches and rounds, and how it uses memory."""

    batching: Batching = Batching()
    sharding: Sharding = Sharding()
    placement: Placement = Placement()
    streaming: Streaming = Streaming()
    activations: KeptActivations = KeptActivations()
    gradients: Gradients = Gradients()
    updates: Updates = Updates()
    kernels: Kernels = Kernels()

    def changed(self, **values: Any) -> PlanChoices:
        """Returns the choices with some others, each by its name, whichever group has it. It takes
        a fraction of the time of `dataclasses.replace`, and the planner asks a hundred thousand
        times. Raises TypeError for a name that is not one of a choice.
        """
        groups = {**vars(self)}
        for name, value in values.items():
            group = GROUP_OF.get(name)
            if group is None:
                raise TypeError(f"not all of these are choices: {', '.join(values)}")
            before = groups[group]
            after = groups[group] = object.__new__(type(before))
            object.__setattr__(after, "__dict__", {**vars(before), name: value})
        found = object.__new__(PlanChoices)
        object.__setattr__(found, "__dict__", groups)
        return found

    def value(self, name: str) -> Any:
        """Returns the choice of this name, whichever group has it."""
        return getattr(getattr(self, GROUP_OF[name]), name)

    def to_dict(self) -> dict[str, Any]:
        """Returns all choices by name, as plain data, in the form used in run records."""
        found = {name: self.value(name) for name in GROUP_OF}
        main_grad, embed_and_head = self.gradients.main_grad, self.streaming.embed_and_head
        return found | {"main_grad": main_grad.value, "embed_and_head": embed_and_head.value}

    def check(self) -> None:
        """Raises ValueError for choices that contradict each other."""
        self.batching.check()
        self.sharding.check()
        self.placement.check()
        self.activations.check()
        self.gradients.check()
        self.updates.check()
        self._check_accumulation()
        self._check_memory()
        self._check_updates()
        if self.sharding.world_size > 1:
            self._check_several_ranks()

    def _check_accumulation(self) -> None:
        main_grad = self.gradients.main_grad
        if (main_grad == MainGrad.VERTICAL) != (self.batching.rounds == 1):
            raise ValueError("main_grad is 'vertical' exactly when there is one round")
        if main_grad == MainGrad.SHARDS and self.sharding.world_size == 1:
            raise ValueError("only several ranks keep shards of gradient accumulators")
        is_kept = self.gradients.gradients_on_gpu and main_grad == MainGrad.VERTICAL
        if self.streaming.embed_and_head_in_kept_gradients and not is_kept:
            raise ValueError(
                "embed and head use the memory of gradients that are kept in one round"
            )

    def _check_memory(self) -> None:
        activations, kernels = self.activations, self.kernels
        if activations.blocks_per_saved_input == 2 and self.streaming.slots < 2:
            raise ValueError("two blocks that are recomputed together need two slots")
        if activations.attention_blocks and not kernels.tile_tokens:
            raise ValueError("attention is kept of blocks with sequence tiling")
        if kernels.graphs and activations.offloaded_block_inputs:
            raise ValueError(
                "blocks are recorded only where all of them live on the device, and their inputs"
            )
        is_resident = self.placement.gpu_resident_units > 0
        is_on_host = self.gradients.main_grad == MainGrad.HOST
        if is_resident and (self.streaming.shared_embed_and_head_slot or is_on_host):
            raise ValueError(
                "units cannot live on the device where embed and head share a slot or gradients "
                "are accumulated on the host"
            )

    def _check_updates(self) -> None:
        updates, on_disk = self.updates, self.placement.disk_offloaded_units
        if updates.moments_after_weights and (self.gradients.gradients_on_gpu or on_disk):
            raise ValueError(
                "moments are updated after all weights only where they and the gradients are in RAM"
            )
        if on_disk and updates.device_updated_units:
            raise ValueError("moments on the disk cannot be streamed to the device")

    def _check_several_ranks(self) -> None:
        for name in ONE_RANK_ONLY:
            if self.value(name):
                raise ValueError(f"{name} is for one rank, not for {self.sharding.world_size}")
        if self.streaming.embed_and_head_in_kept_gradients:
            raise ValueError("embed and head among kept gradients are for one rank")
        is_on_host = self.gradients.main_grad == MainGrad.HOST
        if is_on_host or self.activations.blocks_per_saved_input > 1:
            raise ValueError("accumulators on the host and pairs of blocks are for one rank")

    # ------------------------------------------------------------------ what several groups say

    def recorded_passes(self, blocks: int) -> int:
        """Returns how many passes over `blocks` blocks are recorded as CUDA graphs: forward,
        backward and a recompute at most, for each micro-batch that exists at once. Rounds after the
        first have their own.
        """
        if not self.kernels.graphs:
            return 0
        return 3 * blocks * self.batching.micro_batches_per_round * min(2, self.batching.rounds)

    def block_inputs_on_disk(self, blocks: int) -> set[tuple[int, int]]:
        """Returns the block inputs that are on the disk, by block and micro-batch, both counted
        from 0. In forward order, there are as many others between any two of them.
        """
        together = self.batching.micro_batches_per_round
        with_saved_input = self.activations.blocks_with_saved_input(blocks)
        in_order = [
            (block, number * together + place)
            for number in range(self.batching.rounds)
            for block in with_saved_input
            for place in range(together)
        ]
        turns = _evenly(self.activations.disk_offloaded_block_inputs, len(in_order))
        return {key for key, (now, then) in zip(in_order, itertools.pairwise(turns)) if then > now}

    @property
    def has_one_term(self) -> bool:
        """Whether the accumulators of blocks have one term when several ranks of a node add them
        up: the gradient of one micro-batch, as autograd returns it.

        Among the ranks of several nodes, accumulators would be the fewer bytes: what ranks of a
        node have added up passes over the network once.
        """
        batching, sharding = self.batching, self.sharding
        is_accumulated_later = self.gradients.main_grad == MainGrad.DEVICE
        is_one = batching.micro_batches == batching.rounds and not is_accumulated_later
        return is_one and sharding.ranks > 1 and sharding.nodes_per_replica == 1

    def blocks_with_second_main_grad(self, blocks: int) -> range:
        """Returns which of the `blocks` blocks, counted from 0, have their fp32 accumulators in a
        second buffer: with several ranks every second one, counted from the last; else the seconds
        of pairs.
        """
        if self.sharding.world_size > 1:
            return range((blocks + 1) % 2, blocks, 2)
        return self.activations.seconds_of_pairs(blocks)

    def of_forward_passes(self) -> PlanChoices:
        """Returns what the plans of passes without gradients take over from those of training."""
        nodes, placement = self.sharding.nodes_per_replica, self.placement
        embed_and_head = EmbedAndHead.OWN_SLOTS
        if self.streaming.shared_embed_and_head_slot:
            embed_and_head = EmbedAndHead.SHARED_SLOT
        return PlanChoices(
            sharding=Sharding(
                ranks=self.sharding.ranks if nodes > 1 else 1, nodes_per_replica=nodes
            ),
            placement=replace(placement, disk_offloaded_units=0),
            streaming=replace(self.streaming, embed_and_head=embed_and_head),
            kernels=Kernels(tile_tokens=self.kernels.tile_tokens),
        )


ONE_RANK_ONLY = ("disk_offloaded_units", "disk_offloaded_block_inputs", "graphs")
"""Choices that plans for several ranks refuse."""

GROUP_OF: Mapping[str, str] = {
    name: group for group, choices in PlanChoices().__dict__.items() for name in choices.__dict__
}
"""Group of each choice, by the choice's name, which no other group has."""


def _evenly(some: int, of: int) -> list[int]:
    """Returns how many of `some` things are among the first 0, 1, 2 and so on of `of` things, if
    there are as many others between any two of them.
    """
    return [at * some // max(1, of) for at in range(of + 1)]


@dataclass(frozen=True, kw_only=True)
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
    """Number of elements for which the gradient of embed is accumulated at a time where embed and
    head are in kept gradients (`engine.planning.layout.embed_chunks`); 0 where that is not
    possible.
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

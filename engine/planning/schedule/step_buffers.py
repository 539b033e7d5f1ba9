"""`StepBuffers` determines which buffers the ops of a step use. Rings and staging buffers are used
in turn. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from engine.planning.schedule.buffers import EMBED, HEAD, Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.prefetch_slots import block_slots, slot_of
from engine.planning.schedule.rounds import TrainedUnits

LOSS, SUMMARY, CLIP = Buffer(BufferKind.LOSS), Buffer(BufferKind.SUMMARY), Buffer(BufferKind.CLIP)
UNIT_MAIN_GRAD = Buffer(BufferKind.MAIN_GRAD, number=0)
"""Accumulator of one unit at a time. Units are accumulated one after the other, on one lane, so no
op waits for another unit's accumulator.
"""
SECOND_MAIN_GRAD = Buffer(BufferKind.MAIN_GRAD, number=1)
"""Accumulator of the second of two blocks that are recomputed together. With several ranks, that of
every second block, so that a backward need not wait until the accumulator before is added up over
the ranks.
"""
TOTALS = Buffer(BufferKind.TOTALS)
BLOCK_STAGINGS = Buffer(BufferKind.STAGING, number=0), Buffer(BufferKind.STAGING, number=1)
EMBED_AND_HEAD_STAGING = Buffer(BufferKind.STAGING, number=2)
GRADIENT_RINGS = 3
"""Number of buffers on the host through which kept gradients pass: one is filled while the
optimizer reads another, and one more lets either be late.
"""


class StepBuffers:
    """Which unit uses which slot, accumulator and staging buffer in one step.

    blocks: unit names in forward order. tied: the head or blocks also use the embed unit's weights.
    sizes: needed where the memory of kept gradients serves embed and head.
    """

    def __init__(self, blocks: list[str], tied: bool, choices: PlanChoices, sizes: PlaneSizes):
        self._blocks = blocks
        self.trained = TrainedUnits(blocks, sizes.frozen)
        self._tied = tied
        self._choices = choices
        self.gpu_resident = choices.placement.gpu_resident(blocks)
        """Units that live on the device."""
        resident = {
            *self.gpu_resident,
            *blocks[len(blocks) - choices.placement.blocks_kept_in_slots :],
        }
        self._streamed = [block for block in blocks if block not in resident]
        self._resident = [block for block in blocks if block in resident]
        self.kept = frozenset(blocks[len(blocks) - choices.activations.blocks_without_recompute :])
        """Blocks that keep their activations."""
        seconds = choices.activations.seconds_of_pairs(len(blocks))
        self.second_of_pair = {blocks[at]: blocks[at - 1] for at in seconds}
        """Blocks that keep no input. Each is recomputed together with the block before it, which it
        is mapped to.
        """
        self._in_second_main_grad = {
            blocks[at] for at in choices.blocks_with_second_main_grad(len(blocks))
        }
        self.slots = block_slots(self._streamed, self._resident, choices.streaming.slots)
        """Slot from which each block computes."""
        # Gradients in fp32 do not fit into half of their accumulators.
        are_small = sizes.item_bytes == 2 and choices.gradients.main_grad == MainGrad.DEVICE
        # Several ranks round an accumulator elsewhere, of which they may own a shard alone.
        are_small = are_small and choices.sharding.world_size == 1
        self.rounded_in_main_grads = (
            tuple(self.trained.only(self.gpu_resident)) if are_small else ()
        )
        """Units whose rounded gradients are in the memory of their accumulators."""
        self.under_head: tuple[str, ...] = ()
        """Blocks in the memory of whose kept gradients the accumulator of the head is."""
        if choices.streaming.embed_and_head_in_kept_gradients:
            self.under_head = _first_blocks(blocks, sizes)
        self._ring_turn = {BufferKind.OFFLOAD_RING: 0, BufferKind.FETCH_RING: 0}
        self._staging_turn = 0
        self._gradient_rings = itertools.cycle(self.gradient_rings())

    def lasting_slots(self) -> dict[str, Buffer]:
        """Returns the blocks that are still in their slot when a step ends, with the slot.

        Backward ends with the first of the streamed blocks, and no other unit is fetched to their
        slots before the next step. Blocks without a backward are no longer there, but no optimizer
        looks for them.
        """
        lasting = [*self._resident, *self._streamed[: self._choices.streaming.slots]]
        return {block: self.slots[block] for block in lasting}

    def gpu_resident_slots(self) -> tuple[tuple[str, Buffer], ...]:
        """Returns the units that live on the device, each with its slot."""
        return tuple((unit, slot_of(unit)) for unit in self.gpu_resident)

    def own_slots(self) -> tuple[tuple[str, Buffer], ...]:
        """Returns the units that share their slot with no other, each with its slot."""
        units = self.slot_units().items()
        return tuple((names[0], slot) for slot, names in units if len(names) == 1)

    def embed_or_head_slot(self, unit: str) -> Buffer:
        """Returns the slot of embed or head."""
        return slot_of(EMBED if self._choices.streaming.shared_embed_and_head_slot else unit)

    def slot_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every slot with the units that it must be able to hold."""
        units: dict[Buffer, tuple[str, ...]] = {slot_of(EMBED): (EMBED,), slot_of(HEAD): (HEAD,)}
        if self._choices.streaming.shared_embed_and_head_slot:
            units = {slot_of(EMBED): (EMBED, HEAD)}
        for number in range(min(self._choices.streaming.slots, len(self._streamed))):
            units[Buffer(BufferKind.SLOT, number=number)] = tuple(self._streamed)
        for unit in self._resident:
            units[slot_of(unit)] = (unit,)
        return units

    def grad(self, unit: str) -> Buffer:
        """Returns the buffer in which the unit's gradient is accumulated.

        An accumulator that is kept throughout the step has its own buffer. This is the case if the
        accumulators of all rounds stay on the device, and for embed and head of a tied model, which
        get gradients at both ends of a pass.
        """
        embed_and_head = unit in (EMBED, HEAD)
        lasts_all_step = self._choices.gradients.main_grad == MainGrad.DEVICE or (
            embed_and_head and self._tied
        )
        if lasts_all_step or (
            unit == HEAD and self._choices.streaming.embed_and_head_in_kept_gradients
        ):
            return Buffer(BufferKind.MAIN_GRAD, unit)
        return SECOND_MAIN_GRAD if unit in self._in_second_main_grad else UNIT_MAIN_GRAD

    def backward_groups(self) -> list[tuple[str, ...]]:
        """Returns the blocks in the order of backward. Two that are recomputed together are one
        group.
        """
        groups: list[tuple[str, ...]] = []
        firsts = set(self.second_of_pair.values())
        for block in reversed(self.trained.blocks_back):
            if block in self.second_of_pair:
                groups.append((block, self.second_of_pair[block]))
            elif block not in firsts:
                groups.append((block,))
        return groups

    def grad_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every buffer of an accumulator with the units that it must be able to hold. Where
        embed is accumulated in chunks, which are no larger than a block, the units are blocks; the
        sum of the head is then in other memory.
        """
        if self._choices.streaming.embed_and_head_in_kept_gradients:
            return self._main_grads_of(self._blocks)
        units = self.trained.only([EMBED, *self._blocks, HEAD])
        shards = {
            total: (unit,) for unit in units if (total := self.main_grad_shard(unit)) is not None
        }
        return self._main_grads_of(units) | shards

    def main_grad_shard(self, unit: str) -> Buffer | None:
        """Returns the buffer of this rank's shard of the unit's sum over the rounds; None where
        there is none.
        """
        is_kept = self._choices.gradients.main_grad == MainGrad.SHARDS
        return Buffer(BufferKind.MAIN_GRAD_SHARD, unit) if is_kept else None

    def _main_grads_of(self, names: Iterable[str]) -> dict[Buffer, tuple[str, ...]]:
        """Returns the buffers of these units' accumulators, each with its units."""
        units: dict[Buffer, tuple[str, ...]] = {}
        for unit in names:
            grad = self.grad(unit)
            units[grad] = (*units.get(grad, ()), unit)
        return units

    def shared_main_grads(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns the accumulators that may share their memory with update buffers, in the order in
        which they follow each other there. If the accumulators of all rounds stay on the device,
        they are those of the blocks, in the order in which backward completes them. The gradients
        of blocks that live on the device may wait there, so the memory of their accumulators is not
        shared.
        """
        if self._choices.gradients.main_grad == MainGrad.DEVICE:
            trained = self.trained.only(self._blocks)
            shared = [block for block in trained if block not in self.gpu_resident]
            return {self.grad(block): (block,) for block in reversed(shared)}
        if self._choices.streaming.embed_and_head_in_kept_gradients:
            return self._main_grads_of([*self._blocks, EMBED])
        return self._main_grads_of(self.trained.only([EMBED, *self._blocks, HEAD]))

    def staging_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every staging buffer with the units that it must be able to hold."""
        everything = self.trained.only([EMBED, *self._blocks, HEAD])
        waiting = self.trained.only(self.gpu_resident)
        if self._choices.gradients.gradients_on_gpu:
            waiting = everything
        units: dict[Buffer, tuple[str, ...]] = {
            Buffer(BufferKind.STAGING, unit): (unit,)
            for unit in waiting
            if unit not in self.rounded_in_main_grads
        }
        if self._choices.gradients.gradients_on_gpu:
            return units
        elsewhere = [unit for unit in everything if unit not in self.gpu_resident]
        blocks = tuple(unit for unit in elsewhere if unit not in (EMBED, HEAD))
        embed_and_head = tuple(unit for unit in elsewhere if unit in (EMBED, HEAD))
        if blocks:
            units |= dict.fromkeys(BLOCK_STAGINGS, blocks)
        if embed_and_head:
            units[EMBED_AND_HEAD_STAGING] = embed_and_head
        return units

    def rings(self) -> tuple[Buffer, ...]:
        """Returns the ring buffers of both directions. The result is empty where block inputs stay
        on the device.
        """
        if not self._choices.activations.offloaded_block_inputs:
            return ()
        numbers = range(self._choices.activations.block_input_rings)
        offload = [Buffer(BufferKind.OFFLOAD_RING, number=number) for number in numbers]
        fetch = [Buffer(BufferKind.FETCH_RING, number=number) for number in numbers]
        return (*offload, *fetch)

    def next_ring(self, kind: BufferKind) -> Buffer:
        """Returns the next ring buffer in turn, for a copy to the host or back."""
        turn = self._ring_turn[kind]
        self._ring_turn[kind] = (turn + 1) % self._choices.activations.block_input_rings
        return Buffer(kind, number=turn)

    def next_staging(self, unit: str) -> Buffer:
        """Returns the staging buffer for the unit's next gradient; blocks use two in turn. A unit
        whose gradient waits on the device has its own.
        """
        if self._choices.gradients.gradients_on_gpu or unit in self.gpu_resident:
            return Buffer(BufferKind.STAGING, unit)
        if unit in (EMBED, HEAD):
            return EMBED_AND_HEAD_STAGING
        self._staging_turn = 1 - self._staging_turn
        return BLOCK_STAGINGS[self._staging_turn]

    def begun_main_grad(self, unit: str) -> dict[Buffer, Content]:
        """Returns what a new accumulator of the unit overwrites beside the accumulator itself: kept
        gradients of the step before, where both share their memory.
        """
        content = Content(ContentKind.EARLIER_MAIN_GRAD, unit)
        if unit in self.rounded_in_main_grads:
            return {Buffer(BufferKind.STAGING, unit): content}
        if unit == HEAD:
            return {Buffer(BufferKind.STAGING, block): content for block in self.under_head}
        return {}

    def fetched_over(self, unit: str) -> dict[Buffer, Content]:
        """Returns what the weights of a unit overwrite beside their slot: the kept gradient of
        embed, where both share their memory.
        """
        if not (self._choices.streaming.embed_and_head_in_kept_gradients and unit in (EMBED, HEAD)):
            return {}
        return {Buffer(BufferKind.STAGING, EMBED): Content(ContentKind.WEIGHTS, unit)}

    def kept_gradient_over(self, unit: str) -> dict[Buffer, Content]:
        """Returns what the kept gradient of a unit overwrites beside its own buffer."""
        content = Content(ContentKind.MAIN_GRAD, unit)
        if unit in self.under_head:
            return {self.grad(HEAD): content}
        if unit == EMBED and self._choices.streaming.embed_and_head_in_kept_gradients:
            return {self.embed_or_head_slot(EMBED): content}
        return {}

    def gradient_rings(self) -> tuple[Buffer, ...]:
        """Returns the ring buffers of gradients. There are none where no gradient is kept on the
        GPU for an optimizer on the host.
        """
        elsewhere = {*self._choices.updates.device_updated_units, *self.gpu_resident}
        trained = self.trained.only([EMBED, *self._blocks, HEAD])
        on_host = [unit for unit in trained if unit not in elsewhere]
        if not (self._choices.gradients.gradients_on_gpu and on_host):
            return ()
        numbers = range(GRADIENT_RINGS)
        return tuple(Buffer(BufferKind.GRADIENT_RING, number=number) for number in numbers)

    def next_gradient_ring(self) -> Buffer:
        """Returns the next ring buffer in turn, for a chunk of a kept gradient."""
        return next(self._gradient_rings)


def _first_blocks(blocks: list[str], sizes: PlaneSizes) -> tuple[str, ...]:
    """Returns the first blocks whose kept gradients take the memory of the head's fp32 accumulator.
    Raises ValueError where all of them take less.
    """
    needed = 4 * sizes.numel[HEAD]
    for count, block in enumerate(blocks, 1):
        needed -= sizes.item_bytes * sizes.numel[block]
        if needed <= 0:
            return tuple(blocks[:count])
    raise ValueError("the accumulator of the head is larger than the kept gradients of all blocks")


def hidden(micro_batch: int) -> Buffer:
    """Returns the buffer that holds a micro-batch's hidden state and, in backward, the gradient of
    that state.
    """
    return Buffer(BufferKind.HIDDEN, number=micro_batch)


def host_gradient(unit: str, round_: int) -> dict[Buffer, Content]:
    """Returns the plane of a unit's gradient with the sum over all rounds up to `round_`."""
    return {Buffer(BufferKind.GRADIENT, unit): Content(ContentKind.MAIN_GRAD, number=round_)}

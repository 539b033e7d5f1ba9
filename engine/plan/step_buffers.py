"""`StepBuffers` determines which buffers the ops of a step use. Rings and staging buffers are used
in turn. No torch.
"""

from __future__ import annotations

from engine.plan.assign_slots import block_slots, slot_of
from engine.plan.buffers import EMBED, HEAD, Buffer, BufferKind, Content, ContentKind
from engine.plan.choices import PlanChoices
from engine.plan.ops import GradientSum

LOSS, SUMMARY, CLIP = Buffer(BufferKind.LOSS), Buffer(BufferKind.SUMMARY), Buffer(BufferKind.CLIP)
UNIT_SUM = Buffer(BufferKind.SUM, number=0)
"""This buffer holds the sum of one unit at a time. Units are summed one after the other, on one
lane, so no op waits for another unit's sum.
"""
BLOCK_STAGINGS = Buffer(BufferKind.STAGING, number=0), Buffer(BufferKind.STAGING, number=1)
OUTER_STAGING = Buffer(BufferKind.STAGING, number=2)
BLOCK_GRADIENTS = (
    Buffer(BufferKind.GRADIENT_RING, number=0),
    Buffer(BufferKind.GRADIENT_RING, number=1),
)
OUTER_GRADIENT = Buffer(BufferKind.GRADIENT_RING, number=2)


class StepBuffers:
    """A `StepBuffers` says which unit uses which slot, sum and staging buffer in one step.

    blocks: unit names in forward order. tied: the head also uses the embed unit's weights.
    """

    def __init__(self, blocks: list[str], tied: bool, choices: PlanChoices):
        self._blocks = blocks
        self._tied = tied
        self._choices = choices
        first_resident = len(blocks) - choices.resident_blocks
        self._streamed = blocks[:first_resident]
        self._resident = blocks[first_resident:]
        self.kept = frozenset(blocks[len(blocks) - choices.kept_blocks :])
        """These blocks keep their activations."""
        self.slots = block_slots(self._streamed, self._resident, choices.slots)
        """Each block computes from this slot."""
        self._ring_turn = {BufferKind.STORE_RING: 0, BufferKind.FETCH_RING: 0}
        self._staging_turn = self._gradient_turn = 0

    def lasting_slots(self) -> dict[str, Buffer]:
        """Returns the blocks that are still in their slot when a step ends, with the slot.

        Backward ends with the first blocks, and no other unit is fetched to their slots before the
        next step.
        """
        lasting = [*self._resident, *self._streamed[: self._choices.slots]]
        return {block: self.slots[block] for block in lasting}

    def own_slots(self) -> tuple[tuple[str, Buffer], ...]:
        """Returns the units that share their slot with no other, each with its slot."""
        units = self.slot_units().items()
        return tuple((names[0], slot) for slot, names in units if len(names) == 1)

    def outer_slot(self, unit: str) -> Buffer:
        """Returns the slot of embed or head."""
        return slot_of(EMBED if self._choices.shared_outer_slot else unit)

    def slot_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every slot with the units that it must be able to hold."""
        units: dict[Buffer, tuple[str, ...]] = {slot_of(EMBED): (EMBED,), slot_of(HEAD): (HEAD,)}
        if self._choices.shared_outer_slot:
            units = {slot_of(EMBED): (EMBED, HEAD)}
        for number in range(min(self._choices.slots, len(self._streamed))):
            units[Buffer(BufferKind.SLOT, number=number)] = tuple(self._streamed)
        for unit in self._resident:
            units[slot_of(unit)] = (unit,)
        return units

    def grad(self, unit: str) -> Buffer:
        """Returns the buffer in which the unit's gradient is summed.

        A sum that is kept throughout the step has its own buffer. This is the case if the sums of
        all rounds stay on the device, and for the outer units of a tied model, which get gradients
        at both ends of a pass.
        """
        outer = unit in (EMBED, HEAD)
        lasts_all_step = self._choices.gradient_sum == GradientSum.DEVICE or (outer and self._tied)
        if lasts_all_step:
            return Buffer(BufferKind.SUM, unit)
        return UNIT_SUM

    def grad_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every buffer of a sum with the units that it must be able to hold."""
        units: dict[Buffer, tuple[str, ...]] = {}
        for unit in [EMBED, *self._blocks, HEAD]:
            grad = self.grad(unit)
            units[grad] = (*units.get(grad, ()), unit)
        return units

    def staging_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every staging buffer with the units that it must be able to hold."""
        if self._choices.parked_gradients:
            everything = (EMBED, *self._blocks, HEAD)
            return {Buffer(BufferKind.STAGING, unit): (unit,) for unit in everything}
        units: dict[Buffer, tuple[str, ...]] = dict.fromkeys(BLOCK_STAGINGS, tuple(self._blocks))
        units[OUTER_STAGING] = (EMBED, HEAD)
        return units

    def rings(self) -> tuple[Buffer, ...]:
        """Returns the ring buffers of both directions. The result is empty where boundaries stay on
        the device.
        """
        if not self._choices.host_boundaries:
            return ()
        numbers = range(self._choices.boundary_rings)
        store = [Buffer(BufferKind.STORE_RING, number=number) for number in numbers]
        fetch = [Buffer(BufferKind.FETCH_RING, number=number) for number in numbers]
        return (*store, *fetch)

    def next_ring(self, way: BufferKind) -> Buffer:
        """Returns the next ring buffer in turn, for a copy to the host or back."""
        turn = self._ring_turn[way]
        self._ring_turn[way] = (turn + 1) % self._choices.boundary_rings
        return Buffer(way, number=turn)

    def next_staging(self, unit: str) -> Buffer:
        """Returns the staging buffer for the unit's next gradient; blocks use two in turn. Where
        gradients are parked, each unit has its own.
        """
        if self._choices.parked_gradients:
            return Buffer(BufferKind.STAGING, unit)
        if unit in (EMBED, HEAD):
            return OUTER_STAGING
        self._staging_turn = 1 - self._staging_turn
        return BLOCK_STAGINGS[self._staging_turn]

    def gradient_ring_units(self) -> dict[Buffer, tuple[str, ...]]:
        """Returns every ring buffer of gradients with the units that it must be able to hold. The
        result is empty where gradients are not parked.
        """
        if not self._choices.parked_gradients:
            return {}
        homes = self._choices.device_homes
        blocks = tuple(block for block in self._blocks if block not in homes)
        outer = tuple(unit for unit in (EMBED, HEAD) if unit not in homes)
        units = dict.fromkeys(BLOCK_GRADIENTS, blocks) | {OUTER_GRADIENT: outer}
        return {buffer: names for buffer, names in units.items() if names}

    def next_gradient_ring(self, unit: str) -> Buffer:
        """Returns the ring buffer for the unit's parked gradient; blocks use two in turn."""
        if unit in (EMBED, HEAD):
            return OUTER_GRADIENT
        self._gradient_turn = 1 - self._gradient_turn
        return BLOCK_GRADIENTS[self._gradient_turn]


def hidden(micro_batch: int) -> Buffer:
    """Returns the buffer that holds a micro-batch's hidden state and, in backward, the gradient of
    that state.
    """
    return Buffer(BufferKind.HIDDEN, number=micro_batch)


def host_gradient(unit: str, round_: int) -> dict[Buffer, Content]:
    """Returns the plane of a unit's gradient with the sum over all rounds up to `round_`."""
    return {Buffer(BufferKind.GRADIENT, unit): Content(ContentKind.SUM, number=round_)}

"""The first of a plan's three passes: which slot holds a block at each of its uses, and which uses
need a prefetch that fills the slot. No torch.

- A block kept in its slot, and one that lives on the device, has its own slot throughout the step.
- The other blocks are streamed: they use a few shared slots in turn.
- A use fetches the block's weights unless its slot still holds them from an earlier use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.planning.schedule.buffers import Buffer, BufferKind


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A sequence of COMPUTE ops that need the weights of one block."""

    unit: str
    slot: Buffer
    fetch: bool
    """Whether the slot holds something else before, so that the weights must be fetched."""


def slot_of(unit: str) -> Buffer:
    """Returns the private slot of a unit that shares none."""
    return Buffer(BufferKind.SLOT, unit)


def block_slots(
    streamed: Sequence[str], resident: Collection[str], slots: int
) -> dict[str, Buffer]:
    """Returns the slot of every block.

    Streamed blocks take the `slots` shared slots in turn. A block has the same slot in forward and
    in backward, because the activations that a block keeps include views into its slot.
    """
    assigned = {
        unit: Buffer(BufferKind.SLOT, number=position % slots)
        for position, unit in enumerate(streamed)
    }
    for unit in resident:
        assigned[unit] = slot_of(unit)
    return assigned


def assign_slots(
    passes: Sequence[str], slots: Mapping[str, Buffer], there: Mapping[Buffer, str]
) -> list[BlockUse]:
    """Returns the uses of all blocks in a step, in order.

    When the pass turns from forward to backward, or back, the slots still hold the blocks that are
    used next. These blocks are not fetched again. No other assignment fetches less.

    passes: the blocks in the order in which they are used, forward and backward, in all rounds.
    slots: the slot of each block. there: for each slot that holds a unit when the step begins, that
    unit, since the optimizer updated it there or it lives there.
    """
    content = dict(there)
    uses = []
    for unit in passes:
        slot = slots[unit]
        uses.append(BlockUse(unit, slot, fetch=content.get(slot) != unit))
        content[slot] = unit
    return uses

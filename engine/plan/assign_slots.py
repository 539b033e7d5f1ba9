"""The first of a plan's three passes: which slot holds a block at each of its uses, and when it
must be fetched. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.plan.buffers import Buffer, BufferKind


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A run of COMPUTE ops that needs one block's weights."""

    unit: str
    slot: Buffer
    fetch: bool
    """The slot holds something else before."""


def slot_of(unit: str) -> Buffer:
    """The slot of a unit that has one of its own."""
    return Buffer(BufferKind.SLOT, unit)


def block_slots(
    streamed: Sequence[str], resident: Collection[str], slots: int
) -> dict[str, Buffer]:
    """Of every block. Streamed blocks take the shared slots in turn, the same one in forward and
    backward: what a kept block saved are views into its slot.
    """
    shared = {unit: Buffer(BufferKind.SLOT, number=k % slots) for k, unit in enumerate(streamed)}
    return shared | {unit: slot_of(unit) for unit in resident}


def assign_slots(
    blocks: Sequence[str],
    slots: Mapping[str, Buffer],
    there: Mapping[Buffer, str],
    rounds: int,
    training: bool,
) -> list[BlockUse]:
    """The uses of all blocks in a step, in order. slots: by block. there: which unit a slot holds,
    as it was updated there, when the step begins.

    At each turn of direction the slots still hold what is used next, which is not fetched again; no
    other assignment fetches less.
    """
    one_round = [*blocks, *reversed(blocks)] if training else [*blocks]
    content, uses = dict(there), []
    for unit in one_round * rounds:
        slot = slots[unit]
        uses.append(BlockUse(unit, slot, content.get(slot) != unit))
        content[slot] = unit
    return uses

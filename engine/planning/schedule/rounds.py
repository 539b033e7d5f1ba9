"""A step has rounds, and what its buffers hold is told by round. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from engine.planning.schedule.buffers import EMBED, HEAD, Buffer, BufferKind, Content, ContentKind

# ---------------------------------------------------------------------- trained units

# Some units of a model may be frozen: none of their parameters is trained. This file says how far
# the backward of a step then goes. No torch.


class TrainedUnits:
    """Which units are trained. blocks: unit names in forward order."""

    def __init__(self, blocks: Sequence[str], frozen: Collection[str]):
        self._frozen = frozenset(frozen)
        units = (EMBED, *blocks, HEAD)
        self.frozen = tuple(unit for unit in units if unit in self._frozen)
        """Units of which no parameter is trained, in forward order."""
        first = next((at for at, unit in enumerate(units) if unit not in self._frozen), len(units))
        self.forward_only = units[:first]
        """Units without a backward, since nothing is trained in them or below."""
        self.blocks_back = [block for block in blocks if block not in self.forward_only]
        """Blocks with a backward, in forward order."""

    def trains(self, unit: str) -> bool:
        """Returns whether a parameter of the unit is trained."""
        return unit not in self._frozen

    def only(self, units: Sequence[str]) -> list[str]:
        """Returns those of the units that are trained, in their order."""
        return [unit for unit in units if unit not in self._frozen]

    @property
    def is_whole(self) -> bool:
        """Whether every unit is trained."""
        return not self._frozen


# ---------------------------------------------------------------------- rounds


Uses = dict[Buffer, Content]


@dataclass(frozen=True)
class Round:
    """A round is one pass of some of the step's micro-batches through the whole model."""

    number: int
    micro_batches: Sequence[int]
    is_last: bool


@dataclass
class OffloadedBlockInputs:
    """How the input of one block comes back from the host for its backward in one round."""

    waiting: Iterator[int]
    """Micro-batches whose block inputs are not fetched yet."""
    rings: dict[int, Buffer] = field(default_factory=dict)
    """Ring buffer to which the block input of each other micro-batch is fetched."""

    def comes_in(self, micro_batch: int, ring: Buffer) -> None:
        self.rings[micro_batch] = ring


def state_after(block: str, round_: Round) -> Content:
    """Returns the content of a hidden state after `block`; before the first block, `block` is
    empty.
    """
    return Content(ContentKind.HIDDEN, block, round_.number)


def gradient_of(unit: str, round_: Round) -> Content:
    """Returns the content that is the gradient of the unit's input."""
    return Content(ContentKind.GRADIENT, unit, round_.number)


def offloaded_block_input(block: str, micro_batch: int, round_: Round) -> Uses:
    """Returns the buffer of a block input on the host, with the block input of this round."""
    buffer = Buffer(BufferKind.HOST_BLOCK_INPUT, block, micro_batch)
    return {buffer: Content(ContentKind.BLOCK_INPUT, number=round_.number)}

"""A step has rounds, and what its buffers hold is told by round. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.plan.buffers import Buffer, BufferKind, Content, ContentKind

Uses = dict[Buffer, Content]


@dataclass(frozen=True)
class Round:
    """A round is one pass of some of the step's micro-batches through the whole model."""

    number: int
    micro_batches: Sequence[int]
    is_last: bool


@dataclass
class HostBoundaries:
    """A `HostBoundaries` says how the boundaries of one block come back from the host for its
    backward in one round.
    """

    waiting: Iterator[int]
    """The boundaries of these micro-batches are not fetched yet."""
    rings: dict[int, Buffer] = field(default_factory=dict)
    """The boundary of every other micro-batch is fetched to this ring buffer."""

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


def host_boundary(block: str, micro_batch: int, round_: Round) -> Uses:
    """Returns the buffer of a boundary on the host, with the boundary of this round."""
    buffer = Buffer(BufferKind.HOST_BOUNDARY, block, micro_batch)
    return {buffer: Content(ContentKind.BOUNDARY, number=round_.number)}

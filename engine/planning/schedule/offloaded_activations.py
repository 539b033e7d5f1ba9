"""`SpilledBoundaries` writes the part of a step that takes boundaries to the disk and back. No
torch.

- Forward sends a boundary to a ring buffer on the host, from which WRITE takes it to the disk.
- In backward, READ brings it to a ring buffer again, from which it is fetched to the device. The
  first boundaries are read as soon as all are written and a ring buffer is free, and each other one
  once a boundary before it has left its buffer. So READ is ahead by as many boundaries as there are
  ring buffers.
- Boundaries go to the disk and come back through the same buffers, since forward is over when
  backward begins.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.planning.schedule.buffers import Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.choices import PlanChoices, boundaries_on_disk
from engine.planning.schedule.derive_waits import Draft
from engine.planning.schedule.ops import Lane, OfMicroBatch, OpKind
from engine.planning.schedule.rounds import Round, Uses

DISK_RINGS = 3
"""Boundaries pass through at most this many buffers on the host: one is filled while another is
emptied, and one more lets either be late.
"""


@dataclass(frozen=True, slots=True)
class WriteBoundary(OfMicroBatch):
    """A `WriteBoundary` writes a boundary from its buffer on the host to the disk."""

    kind, lane = OpKind.WRITE_BOUNDARY, Lane.WRITE
    host: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ReadBoundary(OfMicroBatch):
    """A `ReadBoundary` reads a boundary from the disk to a buffer on the host."""

    kind, lane = OpKind.READ_BOUNDARY, Lane.READ
    host: Buffer = field(kw_only=True)


class SpilledBoundaries:
    """A `SpilledBoundaries` writes the ops between host and disk into `drafts`. blocks: those with
    a backward, in forward order.
    """

    def __init__(self, blocks: Sequence[str], choices: PlanChoices, drafts: list[Draft]):
        self._drafts = drafts
        places = boundaries_on_disk(len(blocks), choices)
        self._spilled = frozenset((blocks[index], micro_batch) for index, micro_batch in places)
        """These boundaries are on the disk, by block and micro-batch."""
        numbers = range(min(DISK_RINGS, choices.spilled_boundaries))
        self.rings = tuple(Buffer(BufferKind.DISK_RING, number=number) for number in numbers)
        """The boundaries pass through these buffers."""
        self._turns = itertools.cycle(self.rings)
        self._waiting: Iterator[tuple[str, int]] = iter(())
        """These boundaries are not read yet in this round, by block and micro-batch."""
        self._read: deque[Buffer] = deque()
        """Boundaries that are read and not fetched yet are in these buffers, in order."""
        self._round: Round | None = None

    def ring_out(self, block: str, micro_batch: int) -> Buffer | None:
        """Returns the ring buffer for a boundary on its way to the disk; None where it stays in
        RAM.
        """
        return next(self._turns) if (block, micro_batch) in self._spilled else None

    def write(self, block: str, micro_batch: int, round_: Round, ring: Buffer) -> None:
        """Writes a boundary from its ring buffer to the disk."""
        on_disk = _on_disk(block, micro_batch, round_)
        self._emit(WriteBoundary, (block, micro_batch), _in(ring, block, micro_batch), on_disk)

    def read_first(self, backward: Sequence[str], round_: Round) -> None:
        """Reads the first boundaries of a round, one into each ring buffer. backward: the blocks
        that keep boundaries, in the order of backward.
        """
        of_round = itertools.product(backward, round_.micro_batches)
        self._waiting = (each for each in of_round if each in self._spilled)
        self._round = round_
        for _ in self.rings:
            self.read_next()

    def ring_in(self, block: str, micro_batch: int) -> Buffer | None:
        """Returns the ring buffer that a boundary was read into; None where it is in RAM."""
        return self._read.popleft() if (block, micro_batch) in self._spilled else None

    def read_next(self) -> None:
        """Reads the next boundary of the round, if there is one, into the next ring buffer."""
        found = next(self._waiting, None)
        if found is None:
            return
        assert self._round is not None  # `read_first` has set both
        ring = next(self._turns)
        self._read.append(ring)
        self._emit(ReadBoundary, found, _on_disk(*found, self._round), _in(ring, *found))

    def _emit(
        self, type_: type[OfMicroBatch], of: tuple[str, int], reads: Uses, writes: Uses
    ) -> None:
        """Writes the next op, of one boundary by block and micro-batch."""
        block, micro_batch = of
        (host,) = (use for use in (*reads, *writes) if use.kind == BufferKind.DISK_RING)
        fields = {"micro_batch": micro_batch, "host": host}
        self._drafts.append(Draft(type_, block, reads, writes, fields))


def _in(ring: Buffer, block: str, micro_batch: int) -> Uses:
    """Returns a ring buffer with a boundary."""
    return {ring: Content(ContentKind.BOUNDARY, block, micro_batch)}


def _on_disk(block: str, micro_batch: int, round_: Round) -> Uses:
    """Returns the place of a boundary on the disk, with the boundary of this round."""
    buffer = Buffer(BufferKind.DISK_BOUNDARY, block, micro_batch)
    return {buffer: Content(ContentKind.BOUNDARY, number=round_.number)}

"""`DiskOffloadedBlockInputs` writes the part of a step that takes block inputs to the disk and
back. No torch.

- Forward sends a block input to a ring buffer on the host, from which WRITE takes it to the disk.
- In backward, READ brings it to a ring buffer again, from which it is fetched to the device. The
  first block inputs are read as soon as all are written and a ring buffer is free, and each other
  one once a block input before it has left its buffer. So READ is ahead by as many block inputs as
  there are ring buffers.
- Block inputs go to the disk and come back through the same buffers, since forward is over when
  backward begins.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.planning.schedule.buffers import Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.derive_waits import Draft
from engine.planning.schedule.ops import Lane, OfMicroBatch, OpKind
from engine.planning.schedule.rounds import Round, Uses

DISK_RINGS = 3
"""Most buffers on the host through which block inputs pass: one is filled while another is emptied,
and one more lets either be late.
"""


@dataclass(frozen=True, slots=True)
class WriteBlockInput(OfMicroBatch):
    """Writes a block input from its buffer on the host to the disk."""

    kind, lane = OpKind.WRITE_BLOCK_INPUT, Lane.WRITE
    host: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ReadBlockInput(OfMicroBatch):
    """Reads a block input from the disk to a buffer on the host."""

    kind, lane = OpKind.READ_BLOCK_INPUT, Lane.READ
    host: Buffer = field(kw_only=True)


class DiskOffloadedBlockInputs:
    """Writes the ops between host and disk into `drafts`. blocks: those with a backward, in forward
    order.
    """

    def __init__(self, blocks: Sequence[str], choices: PlanChoices, drafts: list[Draft]):
        self._drafts = drafts
        places = choices.block_inputs_on_disk(len(blocks))
        self._disk_offloaded = frozenset(
            (blocks[index], micro_batch) for index, micro_batch in places
        )
        """Block inputs on the disk, by block and micro-batch."""
        numbers = range(min(DISK_RINGS, choices.activations.disk_offloaded_block_inputs))
        self.rings = tuple(Buffer(BufferKind.DISK_RING, number=number) for number in numbers)
        """Buffers through which the block inputs pass."""
        self._turns = itertools.cycle(self.rings)
        self._waiting: Iterator[tuple[str, int]] = iter(())
        """Block inputs that are not read yet in this round, by block and micro-batch."""
        self._read: deque[Buffer] = deque()
        """Buffers with block inputs that are read and not fetched yet, in order."""
        self._round: Round | None = None

    def ring_out(self, block: str, micro_batch: int) -> Buffer | None:
        """Returns the ring buffer for a block input on its way to the disk; None where it stays in
        RAM.
        """
        return next(self._turns) if (block, micro_batch) in self._disk_offloaded else None

    def write(self, block: str, micro_batch: int, round_: Round, ring: Buffer) -> None:
        """Writes a block input from its ring buffer to the disk."""
        on_disk = _on_disk(block, micro_batch, round_)
        self._emit(WriteBlockInput, (block, micro_batch), _in(ring, block, micro_batch), on_disk)

    def read_first(self, backward: Sequence[str], round_: Round) -> None:
        """Reads the first block inputs of a round, one into each ring buffer. backward: the blocks
        that keep block inputs, in the order of backward.
        """
        of_round = itertools.product(backward, round_.micro_batches)
        self._waiting = (each for each in of_round if each in self._disk_offloaded)
        self._round = round_
        for _ in self.rings:
            self.read_next()

    def ring_in(self, block: str, micro_batch: int) -> Buffer | None:
        """Returns the ring buffer that a block input was read into; None where it is in RAM."""
        return self._read.popleft() if (block, micro_batch) in self._disk_offloaded else None

    def read_next(self) -> None:
        """Reads the next block input of the round, if there is one, into the next ring buffer."""
        found = next(self._waiting, None)
        if found is None:
            return
        assert self._round is not None  # `read_first` has set both
        ring = next(self._turns)
        self._read.append(ring)
        self._emit(ReadBlockInput, found, _on_disk(*found, self._round), _in(ring, *found))

    def _emit(
        self, type_: type[OfMicroBatch], of: tuple[str, int], reads: Uses, writes: Uses
    ) -> None:
        """Writes the next op, of one block input by block and micro-batch."""
        block, micro_batch = of
        (host,) = (use for use in (*reads, *writes) if use.kind == BufferKind.DISK_RING)
        fields = {"micro_batch": micro_batch, "host": host}
        self._drafts.append(Draft(type_, block, reads, writes, fields))


def _in(ring: Buffer, block: str, micro_batch: int) -> Uses:
    """Returns a ring buffer with a block input."""
    return {ring: Content(ContentKind.BLOCK_INPUT, block, micro_batch)}


def _on_disk(block: str, micro_batch: int, round_: Round) -> Uses:
    """Returns the place of a block input on the disk, with the block input of this round."""
    buffer = Buffer(BufferKind.DISK_BLOCK_INPUT, block, micro_batch)
    return {buffer: Content(ContentKind.BLOCK_INPUT, number=round_.number)}

"""`DiskOffloadedUpdates` writes the part of a step that updates units whose moments are on the
disk. No torch.

- The moments of these units pass through ring buffers on the host in chunks: each chunk is read
  from the disk on READ, updated on HOST and written back on WRITE. A chunk that is read into a ring
  buffer waits for the write that left it. So reads, updates and writes of different chunks run at
  once.
- The first chunks, one for each ring buffer, are read before the clip factor is known.
- These chunks are updated first, so that the disk has work at once. Then the host updates the
  other units, in the order in which the next forward pass needs them, with one chunk after each.
  The disk is the slowest of all, so the other chunks come last. They belong to the last units,
  which the next forward pass needs last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.planning.schedule.buffers import READY, Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.derive_waits import Draft
from engine.planning.schedule.ops import OffloadKeptGradient, Op, ReadStates, Update, WriteStates
from engine.planning.schedule.shards import cut
from engine.planning.schedule.step_buffers import CLIP, SUMMARY, StepBuffers, host_gradient

STATE_RINGS = 8
"""Most buffers on the host through which chunks of moments pass: some are being read, some written,
and the others let the disk and the optimizer each be late.
"""


class _Chunk(NamedTuple):
    """One chunk of the moments of a unit."""

    unit: str
    number: int
    bounds: tuple[int, int]
    """Elements of the unit at which the chunk begins and before which it ends."""
    ring: Buffer


class DiskOffloadedUpdates:
    """Writes the ops of units whose moments are on the disk, into `drafts`.

    blocks: all blocks, in forward order. buffers: those of the step.
    """

    def __init__(
        self,
        blocks: list[str],
        buffers: StepBuffers,
        choices: PlanChoices,
        sizes: PlaneSizes,
        drafts: list[Draft],
    ):
        self._buffers = buffers
        self._choices = choices
        self._drafts = drafts
        self.units = buffers.trained.only(choices.placement.disk_offloaded(blocks))
        """Units whose moments are on the disk and are updated, in forward order."""
        self.numel = 0
        """Most elements of a chunk."""
        self._chunks: list[_Chunk] = []
        self._written = 0
        """Number of chunks whose ops are written, from their update on."""
        if self.units:
            largest = max(sizes.numel[unit] for unit in self.units)
            self.numel = min(sizes.disk_chunk_numel or largest, largest)
        for unit in self.units:
            for number, bounds in enumerate(cut(sizes.numel[unit], self.numel)):
                turn = len(self._chunks) % STATE_RINGS
                ring = Buffer(BufferKind.STATES_RING, number=turn)
                self._chunks.append(_Chunk(unit, number, bounds, ring))

    def rings(self) -> tuple[Buffer, ...]:
        """Returns the ring buffers that the chunks pass through."""
        return tuple(dict.fromkeys(chunk.ring for chunk in self._chunks))

    def states(self) -> dict[Buffer, Content]:
        """Returns the moments on the disk that are ready when all chunks are written back."""
        return {_states(chunk): READY for chunk in self._chunks}

    def read_first(self) -> None:
        """Reads the first chunks, one into each ring buffer."""
        for chunk in self._chunks[:STATE_RINGS]:
            self._read(chunk)

    def write_first(self) -> None:
        """Writes the updates of the chunks that are read before the clip factor is known."""
        for _ in self._chunks[:STATE_RINGS]:
            self.write_next()

    def write_rest(self) -> None:
        """Writes the updates of all chunks that are left."""
        while self._written < len(self._chunks):
            self.write_next()

    def write_next(self) -> None:
        """Writes the update of the next chunk, if there is one. Its ring buffer then takes the
        chunk that is read into it next.
        """
        if self._written == len(self._chunks):
            return
        chunk = self._chunks[self._written]
        self._written += 1
        self._update(chunk)
        updated = {chunk.ring: _content(ContentKind.UPDATED, chunk)}
        self._emit(WriteStates, chunk, updated, {_states(chunk): READY})
        following = self._written - 1 + STATE_RINGS
        if following < len(self._chunks):
            self._read(self._chunks[following])

    def _update(self, chunk: _Chunk) -> None:
        """Writes the update of a chunk, preceded by the copy of its gradient if that is kept on
        the GPU.
        """
        reads = {CLIP: READY, chunk.ring: _content(ContentKind.FETCHED, chunk)}
        ring = None
        if self._choices.gradients.gradients_on_gpu:
            ring = self._buffers.next_gradient_ring()
            staging = self._buffers.next_staging(chunk.unit)
            kept_gradient = {staging: Content(ContentKind.MAIN_GRAD, chunk.unit), SUMMARY: READY}
            gradient = {ring: _content(ContentKind.MAIN_GRAD, chunk)}
            fields = {"chunk": chunk.bounds, "staging": staging, "ring": ring}
            self._drafts.append(
                Draft(OffloadKeptGradient, chunk.unit, kept_gradient, gradient, fields)
            )
            reads |= gradient
        else:
            reads |= host_gradient(chunk.unit, self._choices.batching.rounds - 1)
        writes = {
            chunk.ring: _content(ContentKind.UPDATED, chunk),
            Buffer(BufferKind.WEIGHTS, chunk.unit): READY,
        }
        self._emit(Update, chunk, reads, writes, ring=ring)

    def _read(self, chunk: _Chunk) -> None:
        fetched = {chunk.ring: _content(ContentKind.FETCHED, chunk)}
        self._emit(ReadStates, chunk, {_states(chunk): READY}, fetched)

    def _emit(
        self,
        type_: type[Op],
        chunk: _Chunk,
        reads: dict[Buffer, Content],
        writes: dict[Buffer, Content],
        **fields: Any,
    ) -> None:
        """Writes the next op. fields: the fields specific to the op's kind."""
        own = {"chunk": chunk.bounds, "states": chunk.ring, **fields}
        self._drafts.append(Draft(type_, chunk.unit, reads, writes, own))


def _states(chunk: _Chunk) -> Buffer:
    """Returns the chunk's moments on the disk."""
    return Buffer(BufferKind.STATES, chunk.unit, chunk=chunk.number)


def _content(kind: ContentKind, chunk: _Chunk) -> Content:
    return Content(kind, chunk.unit, chunk=chunk.number)

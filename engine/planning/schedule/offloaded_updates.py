"""`SpilledUpdates` writes the part of a step that updates units whose moments are on the disk. No
torch.

- The moments of these units pass through ring buffers on the host in pieces: each piece is read
  from the disk on READ, updated on HOST and written back on WRITE. A piece that is read into a ring
  buffer waits for the write that left it. So reads, updates and writes of different pieces run at
  once.
- The first pieces, one for each ring buffer, are read before the clip factor is known.
- These pieces are updated first, so that the disk has work at once. Then the host updates the
  other units, in the order in which the next forward pass needs them, with one piece after each.
  The disk is the slowest of all, so the other pieces come last. They belong to the last units,
  which the next forward pass needs last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.planning.schedule.buffers import READY, Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.choices import PlanChoices, PlaneSizes, spilled_of
from engine.planning.schedule.derive_waits import Draft
from engine.planning.schedule.ops import OffloadParked, Op, ReadStates, Update, WriteStates
from engine.planning.schedule.shards import cut
from engine.planning.schedule.step_buffers import CLIP, SUMMARY, StepBuffers, host_gradient

STATE_RINGS = 8
"""Pieces of moments pass through at most this many buffers on the host: some are being read, some
written, and the others let the disk and the optimizer each be late.
"""


class _Piece(NamedTuple):
    """A `_Piece` is one piece of the moments of a unit."""

    unit: str
    number: int
    bounds: tuple[int, int]
    """It begins at the first of these elements of the unit and ends before the second."""
    ring: Buffer


class SpilledUpdates:
    """A `SpilledUpdates` writes the ops of units whose moments are on the disk, into `drafts`.

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
        self.units = buffers.trained.only(spilled_of(blocks, choices))
        """The moments of these units are on the disk and are updated, in forward order."""
        self.numel = 0
        """A piece has at most this many elements."""
        self._pieces: list[_Piece] = []
        self._written = 0
        """The ops of this many pieces are written, from their update on."""
        if self.units:
            largest = max(sizes.numel[unit] for unit in self.units)
            self.numel = min(sizes.spill_numel or largest, largest)
        for unit in self.units:
            for number, bounds in enumerate(cut(sizes.numel[unit], self.numel)):
                turn = len(self._pieces) % STATE_RINGS
                ring = Buffer(BufferKind.STATES_RING, number=turn)
                self._pieces.append(_Piece(unit, number, bounds, ring))

    def rings(self) -> tuple[Buffer, ...]:
        """Returns the ring buffers that the pieces pass through."""
        return tuple(dict.fromkeys(piece.ring for piece in self._pieces))

    def states(self) -> dict[Buffer, Content]:
        """Returns the moments on the disk that are ready when all pieces are written back."""
        return {_states(piece): READY for piece in self._pieces}

    def read_first(self) -> None:
        """Reads the first pieces, one into each ring buffer."""
        for piece in self._pieces[:STATE_RINGS]:
            self._read(piece)

    def write_first(self) -> None:
        """Writes the updates of the pieces that are read before the clip factor is known."""
        for _ in self._pieces[:STATE_RINGS]:
            self.write_next()

    def write_rest(self) -> None:
        """Writes the updates of all pieces that are left."""
        while self._written < len(self._pieces):
            self.write_next()

    def write_next(self) -> None:
        """Writes the update of the next piece, if there is one. Its ring buffer then takes the
        piece that is read into it next.
        """
        if self._written == len(self._pieces):
            return
        piece = self._pieces[self._written]
        self._written += 1
        self._update(piece)
        updated = {piece.ring: _content(ContentKind.UPDATED, piece)}
        self._emit(WriteStates, piece, updated, {_states(piece): READY})
        following = self._written - 1 + STATE_RINGS
        if following < len(self._pieces):
            self._read(self._pieces[following])

    def _update(self, piece: _Piece) -> None:
        """Writes the update of a piece, preceded by the copy of its gradient if that is parked."""
        reads = {CLIP: READY, piece.ring: _content(ContentKind.FETCHED, piece)}
        ring = None
        if self._choices.parked_gradients:
            ring = self._buffers.next_gradient_ring()
            staging = self._buffers.next_staging(piece.unit)
            parked = {staging: Content(ContentKind.SUM, piece.unit), SUMMARY: READY}
            gradient = {ring: _content(ContentKind.SUM, piece)}
            fields = {"piece": piece.bounds, "staging": staging, "ring": ring}
            self._drafts.append(Draft(OffloadParked, piece.unit, parked, gradient, fields))
            reads |= gradient
        else:
            reads |= host_gradient(piece.unit, self._choices.rounds - 1)
        writes = {
            piece.ring: _content(ContentKind.UPDATED, piece),
            Buffer(BufferKind.WEIGHTS, piece.unit): READY,
        }
        self._emit(Update, piece, reads, writes, ring=ring)

    def _read(self, piece: _Piece) -> None:
        fetched = {piece.ring: _content(ContentKind.FETCHED, piece)}
        self._emit(ReadStates, piece, {_states(piece): READY}, fetched)

    def _emit(
        self,
        type_: type[Op],
        piece: _Piece,
        reads: dict[Buffer, Content],
        writes: dict[Buffer, Content],
        **fields: Any,
    ) -> None:
        """Writes the next op. fields: the fields specific to the op's kind."""
        own = {"piece": piece.bounds, "states": piece.ring, **fields}
        self._drafts.append(Draft(type_, piece.unit, reads, writes, own))


def _states(piece: _Piece) -> Buffer:
    """Returns the piece's moments on the disk."""
    return Buffer(BufferKind.STATES, piece.unit, piece=piece.number)


def _content(kind: ContentKind, piece: _Piece) -> Content:
    return Content(kind, piece.unit, piece=piece.number)

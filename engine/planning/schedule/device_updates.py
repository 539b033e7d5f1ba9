"""`DeviceUpdates` writes the part of a step in which optimizers run on the device, on states that
are streamed there and back. No torch.

- A unit's planes travel in pieces: each piece is fetched into an update buffer on STATES IN,
  updated there on UPDATE and sent back on STATES OUT. Each lane takes the pieces in the order in
  which the next forward pass needs the weights.
- The first pieces, one for each buffer, are fetched before the gradients are complete.
- Between two steps most of the device's memory is idle. The buffers therefore reuse the memory of
  fp32 sums, which are not needed between the end of a step and the first backward of the next.
  Spare buffers reuse the memory of activations: the first `choices.spare_buffers` buffers exist
  only while the activations of the last `choices.spare_blocks` blocks do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.planning.schedule.arena import Arena, lay_out_arena
from engine.planning.schedule.assign_slots import slot_of
from engine.planning.schedule.buffers import (
    EMBED,
    HEAD,
    READY,
    Buffer,
    BufferKind,
    Content,
    ContentKind,
)
from engine.planning.schedule.choices import PlanChoices, PlaneSizes, settled_of
from engine.planning.schedule.derive_waits import Draft
from engine.planning.schedule.ops import (
    DeviceUpdate,
    FetchGradient,
    FetchStates,
    Lend,
    OffloadStates,
    OffloadWeights,
    OfPiece,
    Reclaim,
)
from engine.planning.schedule.shards import Shards, cut_between, largest_updated
from engine.planning.schedule.step_buffers import SUMMARY, host_gradient

Piece = tuple[str, int]
"""A piece is named by its unit and its number within the unit."""

LEAD = 2
"""The states of this many pieces are sent from their buffers before the weights of the first piece
that is then fetched into one of these buffers.
"""

_ITEM_BYTES = 14
_STEP = "step"
_LENDABLE = Buffer(BufferKind.LENDABLE)
_ACTIVATIONS, _LENT = Content(ContentKind.ACTIVATIONS), Content(ContentKind.LENT)


@dataclass(frozen=True)
class Places:
    """A `Places` says where weights and sums are on the device when a step ends."""

    slots: dict[str, Buffer]
    """These blocks are still in a slot, which is private or shared."""
    sums: dict[Buffer, tuple[str, ...]]
    """The sums of these units may share their memory with update buffers. The buffers of sums are
    given in the order in which they follow each other in memory.
    """


class DeviceUpdates:
    """A `DeviceUpdates` writes the ops of units whose optimizer runs on the device, into `drafts`.

    blocks: all blocks, in forward order. places: where the blocks are, and their sums.
    """

    def __init__(
        self,
        blocks: list[str],
        places: Places,
        choices: PlanChoices,
        sizes: PlaneSizes,
        drafts: list[Draft],
    ):
        self._choices = choices
        self._drafts = drafts
        self._units = frozenset(choices.device_homes)
        """The optimizers of these units run on the device."""
        outer = {EMBED: slot_of(EMBED), HEAD: slot_of(HEAD)}
        self._slots = places.slots if choices.shared_outer_slot else {**outer, **places.slots}
        self._shards = Shards(choices.ranks, sizes.rank)
        if choices.ranks > 1:
            self._slots = {}  # the other ranks need the updated weights, too
        self._numel = sizes.numel
        self.piece_numel = self.ring_numel = 0
        self.buffers: list[Buffer] = []
        if choices.parked_gradients:
            self.ring_numel = sizes.ring_numel or self._largest_shard(blocks)
        if self._units:
            self.piece_numel = sizes.piece_numel or self._largest_shard(blocks)
            self.buffers = [
                Buffer(BufferKind.UPDATE, number=number) for number in range(choices.update_buffers)
            ]
        self.spare = self.buffers[: choices.spare_buffers]
        self._own = self.buffers[choices.spare_buffers :]
        """The update buffers that exist throughout the run, that is, all but the spare ones."""
        self.lenders = blocks[len(blocks) - choices.spare_blocks :] if self.spare else []
        """The spare buffers reuse the memory of these blocks' activations."""
        self._bounds = {
            unit: cut_between(*self._shards.bounds(sizes.numel[unit]), self.piece_numel)
            for unit in choices.device_homes
        }
        self._slot_parts = {slot: len(self._bounds[unit]) for unit, slot in self.placed_units()}
        """A slot in which a unit is updated has a part for each of its pieces."""
        self._pieces = self._pieces_in_order(blocks)
        self._buffer = dict(zip(self._pieces, self._buffers_in_turn()))
        # The gradients of these units are not overwritten in the staging buffers before the step
        # ends.
        elsewhere = {*settled_of(blocks, choices), *sizes.frozen}
        streamed = [block for block in blocks if block not in elsewhere]
        self._may_stay_staged = frozenset((EMBED, *streamed[:2]))
        if choices.parked_gradients:
            self._may_stay_staged = self._units
        self._staging: dict[str, Buffer] = {}
        """The complete gradients of these units stay in this staging buffer."""
        self._sums_of: dict[Buffer, list[str]] = {}
        """A buffer shares memory with the sums of these units."""
        self.sums = tuple(places.sums) if self._units else ()
        """These sums are in the arena."""
        self.arena = self._lay_over_sums(places.sums, sizes) if self._units else None
        # What was written so far.
        self._fetched: set[Piece] = set()
        self._with_gradient: set[Piece] = set()
        self._lent = False

    def _largest_shard(self, blocks: list[str]) -> int:
        """Returns the elements of the largest shard of any block, or of embed and head where no
        block is trained.
        """
        numel = self._numel
        largest = largest_updated([numel[block] for block in blocks], (numel[EMBED], numel[HEAD]))
        return self._shards.numel(largest)

    def _pieces_in_order(self, blocks: list[str]) -> list[Piece]:
        """Returns the pieces of all units, in the order of the next forward pass."""
        pieces: list[Piece] = []
        for unit in (EMBED, *blocks, HEAD):
            if unit in self._units:
                pieces += [(unit, number) for number in range(len(self._bounds[unit]))]
        return pieces

    def _buffers_in_turn(self) -> Iterator[Buffer]:
        """Yields a buffer for each piece in order: each spare buffer once, then the others in turn
        without end.

        A spare buffer takes only one piece, because its memory is needed for activations again
        before a second piece could be sent back.
        """
        yield from self.spare
        yield from itertools.cycle(self._own)

    def _lay_over_sums(self, sums: Mapping[Buffer, tuple[str, ...]], sizes: PlaneSizes) -> Arena:
        """Returns where sums and buffers are in the memory that they share, and notes which of them
        use the same.
        """
        size = sizes.buffer_bytes or _ITEM_BYTES * self.piece_numel
        numel = dict(sizes.numel)
        if self._choices.outer_in_parked:
            numel[EMBED] = sizes.embed_piece
        largest = [
            self._shards.padded(max(map(numel.__getitem__, units))) for units in sums.values()
        ]
        sum_bytes = [4 * numel for numel in largest]
        arena = lay_out_arena(sum_bytes, size, len(self._own), self._choices)
        users = list(sums.values())
        for number, buffer in enumerate(self._own):
            there = [users[at] for at in arena.sums_under(number)]
            self._sums_of[buffer] = list(itertools.chain.from_iterable(there))
        return arena

    # ------------------------------------------------------------------ what other ops must know

    def parked_pieces(self, unit: str) -> list[tuple[int, int]]:
        """Returns where each piece of the unit's parked gradient begins and ends, in elements."""
        return cut_between(*self._shards.bounds(self._numel[unit]), self.ring_numel)

    def placed(self, unit: str) -> Buffer | None:
        """Returns the slot that the unit is still in when the step ends, and in which it is
        therefore updated. Returns None where the unit is in no slot then, or its optimizer runs on
        the host.
        """
        return self._slots.get(unit) if unit in self._units else None

    def placed_units(self) -> tuple[tuple[str, Buffer], ...]:
        """Returns the units that are updated in a slot, each with its slot."""
        slots = [(unit, self.placed(unit)) for unit in self._choices.device_homes]
        return tuple((unit, slot) for unit, slot in slots if slot is not None)

    def planes(self, unit: str) -> dict[Buffer, Content]:
        """Returns the buffers of the unit's weights on the host: one, or one for each piece where
        the optimizer runs on the device and sends the weights back piece by piece.
        """
        if unit not in self._units:
            return {Buffer(BufferKind.WEIGHTS, unit): READY}
        pieces = range(len(self._bounds[unit]))
        return {Buffer(BufferKind.WEIGHTS, unit, piece=number): READY for number in pieces}

    def weights(self, unit: str, slot: Buffer) -> dict[Buffer, Content]:
        """Returns the weights of a unit in a slot. The slot consists of parts where some unit is
        updated in it piece by piece, and other units of the slot then use all these parts.
        """
        content = Content(ContentKind.WEIGHTS, unit)
        parts = self._slot_parts.get(slot, 1)
        return {_part(slot, number, parts): content for number in range(parts)}

    def arena_of(self, unit: str) -> dict[Buffer, Content]:
        """Returns the parts of the arena that the sum of a unit uses, with sums as their
        content.
        """
        return {
            _arena(buffer): Content(ContentKind.SUM)
            for buffer, units in self._sums_of.items()
            if unit in units
        }

    def activations_of(self, block: str) -> dict[Buffer, Content]:
        """Returns the memory that the block lends to spare buffers, with activations as its
        content. The result is empty for a block that lends nothing.
        """
        return {_LENDABLE: _ACTIVATIONS} if block in self.lenders else {}

    def all_planes(self) -> dict[Buffer, Content]:
        """Returns the planes that are ready when all pieces are applied."""
        planes = {}
        for unit, number in self._pieces:
            planes[Buffer(BufferKind.WEIGHTS, unit, piece=number)] = READY
            planes[Buffer(BufferKind.STATES, unit, piece=number)] = READY
        return planes

    def keep_staged(self, unit: str, staging: Buffer) -> bool:
        """Tells whether the unit's complete gradient stays in the staging buffer. The optimizer
        reads it there, so the gradient need not leave the device.
        """
        if unit in self._units and unit in self._may_stay_staged:
            self._staging[unit] = staging
            return True
        return False

    # ------------------------------------------------------------------ during backward

    def lend(self) -> None:
        """Writes the op from which on spare buffers use the memory of the lenders' activations."""
        self._lent = True
        self._drafts.append(Draft(Lend, _STEP, {}, {_LENDABLE: _LENT}, {}))

    def reclaim(self) -> None:
        """Writes the op that returns the memory of the spare buffers to activations."""
        self._drafts.append(Draft(Reclaim, _STEP, {}, {_LENDABLE: _ACTIVATIONS}, {}))

    def fetch_first(self, finished: Collection[str]) -> None:
        """Fetches pieces into the buffers that are free. finished: blocks whose gradients are
        complete.
        """
        lent, others = self._first()
        for piece in [*(lent if self._lent else ()), *others]:
            if piece not in self._fetched:
                if not set(self._sums_of.get(self._buffer[piece], ())) <= set(finished):
                    return
                self._fetch(piece)
            if piece not in self._with_gradient and piece[0] in finished:
                self._fetch_gradient(piece)

    def _first(self) -> tuple[list[Piece], list[Piece]]:
        """Returns the pieces that are fetched before the gradients are complete: those in spare
        buffers, and those in other buffers.
        """
        spares = len(self.spare)
        return self._pieces[:spares], self._pieces[spares : len(self.buffers)]

    # ------------------------------------------------------------------ after the summary

    def write(self) -> None:
        """Updates all pieces, sends them back, and fetches the pieces that are missing.

        A late piece, one that was not among the first to be fetched, waits for the buffer of an
        earlier piece. So the pieces in those buffers are sent first. The weights of a late piece
        are sent before states that no fetch waits for, but after the states of `LEAD` pieces, which
        are sent while the late piece is being fetched. The pieces in spare buffers, whose memory
        the forward pass needs back, are sent in between. Pieces that nothing waits for are sent
        last.
        """
        lent, others = self._first()
        late = self._pieces[len(self.buffers) :]
        for piece in (*lent, *others):
            self._update(piece)
        for piece in (*lent, *others):
            self._send_weights_if_fetched(piece)
        awaited, unawaited = others[: len(late)], others[len(late) :]
        lead = min(LEAD, len(self._own))
        sent = 0  # pieces sent so far, those in spare buffers not counted
        updated = 0  # late pieces that were fetched and updated
        for piece in (*_alternating(awaited, lent), *unawaited, *late):
            self._send_rest(piece)
            if piece in lent:
                continue
            sent += 1
            free = sent if sent >= len(awaited) else sent - lead + 1
            for following in late[updated : max(updated, free)]:
                self._update(following)
                self._send_weights_if_fetched(following)
                updated += 1

    def _update(self, piece: Piece) -> None:
        """Writes AdamW on a piece, preceded by the fetches of the piece that are still missing."""
        (unit, number), buffer = piece, self._buffer[piece]
        if piece not in self._fetched:
            self._fetch(piece)
        if piece not in self._with_gradient:
            self._fetch_gradient(piece)
        reads = {buffer: Content(ContentKind.FETCHED, unit, piece=number), SUMMARY: READY}
        reads |= self._lent_memory(buffer)
        staging = self._staging.get(unit)
        if staging is not None:
            reads[staging] = Content(ContentKind.SUM, unit)
        else:
            reads[_gradient_in(buffer)] = Content(ContentKind.SUM, unit, piece=number)
        writes = {buffer: Content(ContentKind.UPDATED, unit, piece=number)}
        slot = self.placed(unit)
        if slot is not None:
            part = _part(slot, number, len(self._bounds[unit]))
            writes[part] = Content(ContentKind.WEIGHTS, unit)
        self._emit(DeviceUpdate, piece, reads, writes, staging=staging, slot=slot)

    def _send_weights_if_fetched(self, piece: Piece) -> None:
        """Sends the weights of a piece at once if the next forward pass fetches them from the host.
        No prefetch waits for the weights of a unit that is updated in its slot.
        """
        if self.placed(piece[0]) is None:
            self._send(OffloadWeights, piece, BufferKind.WEIGHTS)

    def _send_rest(self, piece: Piece) -> None:
        """Sends the parts of a piece that have not been sent yet."""
        if self.placed(piece[0]) is not None:
            self._send(OffloadWeights, piece, BufferKind.WEIGHTS)
        self._send(OffloadStates, piece, BufferKind.STATES)

    # ------------------------------------------------------------------ single ops

    def _fetch(self, piece: Piece) -> None:
        (unit, number), buffer = piece, self._buffer[piece]
        self._fetched.add(piece)
        reads = {
            Buffer(BufferKind.WEIGHTS, unit, piece=number): READY,
            Buffer(BufferKind.STATES, unit, piece=number): READY,
        }
        reads |= self._lent_memory(buffer)
        writes = {buffer: Content(ContentKind.FETCHED, unit, piece=number)}
        writes |= self._states_in_arena(buffer)
        self._emit(FetchStates, piece, reads, writes)

    def _fetch_gradient(self, piece: Piece) -> None:
        (unit, number), buffer = piece, self._buffer[piece]
        self._with_gradient.add(piece)
        if unit in self._staging:
            return
        reads = host_gradient(unit, self._choices.rounds - 1)
        writes = {_gradient_in(buffer): Content(ContentKind.SUM, unit, piece=number)}
        self._emit(FetchGradient, piece, reads, writes)

    def _send(self, type_: type[OfPiece], piece: Piece, kind: BufferKind) -> None:
        (unit, number), buffer = piece, self._buffer[piece]
        reads = {buffer: Content(ContentKind.UPDATED, unit, piece=number)}
        reads |= self._states_in_arena(buffer)
        reads |= self._lent_memory(buffer)
        self._emit(type_, piece, reads, {Buffer(kind, unit, piece=number): READY})

    def _states_in_arena(self, buffer: Buffer) -> dict[Buffer, Content]:
        """Returns the buffer's part of the arena, with states as its content."""
        return {_arena(buffer): Content(ContentKind.STATES)} if self._sums_of.get(buffer) else {}

    def _lent_memory(self, buffer: Buffer) -> dict[Buffer, Content]:
        return {_LENDABLE: _LENT} if buffer in self.spare else {}

    def _emit(
        self,
        type_: type[OfPiece],
        piece: Piece,
        reads: dict[Buffer, Content],
        writes: dict[Buffer, Content],
        **fields: Any,
    ) -> None:
        """Writes the next op. fields: the fields specific to the op's kind."""
        unit, number = piece
        fields = {"piece": self._bounds[unit][number], "buffer": self._buffer[piece], **fields}
        self._drafts.append(Draft(type_, unit, reads, writes, fields))


def _alternating(first: Sequence[Piece], second: Sequence[Piece]) -> Iterator[Piece]:
    """Yields a piece of `first`, one of `second`, and so on, and the rest of the longer one."""
    for pair in itertools.zip_longest(first, second):
        yield from (piece for piece in pair if piece is not None)


def _part(slot: Buffer, number: int, pieces: int) -> Buffer:
    """Returns the part of a slot that a piece of its unit is written to."""
    return slot if pieces == 1 else slot.part(number)


def _arena(buffer: Buffer) -> Buffer:
    """Returns the part of the arena that an update buffer occupies."""
    return Buffer(BufferKind.ARENA, number=buffer.number)


def _gradient_in(buffer: Buffer) -> Buffer:
    """Returns the part of an update buffer that a gradient is fetched to."""
    return Buffer(BufferKind.UPDATE_GRADIENT, number=buffer.number)

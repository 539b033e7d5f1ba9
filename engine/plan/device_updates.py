"""The part of a step's plan in which optimizers run on the device, on states that are streamed
there and back.

A unit's planes travel in pieces: fetched into a buffer on STATES IN, updated there on UPDATE, sent
back on STATES OUT, each lane in the order in which the next forward pass needs the weights. As many
pieces as there are buffers are fetched before the gradients are complete. Between two steps most of
the device's memory is of no other use: buffers lie over fp32 sums, and spare ones take the place of
activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.plan.assign_slots import slot_of
from engine.plan.buffers import EMBED, HEAD, READY, Buffer, BufferKind, Content, ContentKind
from engine.plan.choices import PlanChoices
from engine.plan.derive_waits import Draft
from engine.plan.ops import (
    DeviceUpdate,
    FetchGradient,
    FetchStates,
    GradientSum,
    Lend,
    OffloadStates,
    OffloadWeights,
    OfPiece,
    Reclaim,
)

Piece = tuple[str, int]
"""A unit and which of its pieces."""

LEAD = 2
"""Pieces whose states leave their buffers before the weights of the first piece that is fetched
into one of these.
"""

_STEP = "step"
_LENDABLE = Buffer(BufferKind.LENDABLE)
_ACTIVATIONS, _LENT = Content(ContentKind.ACTIVATIONS), Content(ContentKind.LENT)


class DeviceUpdates:
    """Writes the ops of units whose home is on the device, into `drafts`.

    blocks: all, in forward order. slots: of the blocks that are still in one when a step ends,
    their own or not. numel: elements of each unit's planes. state_bytes: of all planes, for an
    element. gradient: the plane that holds a unit's gradient on the host, and what is in it.

    With fp32 sums on the device the update buffers lie over the sums of blocks, which are of no use
    between the end of a step and the first backward of the next. The first `choices.spare_buffers`
    buffers exist only while the activations of the last `choices.spare_blocks` blocks do not.
    """

    def __init__(
        self,
        blocks: list[str],
        slots: Mapping[str, Buffer],
        choices: PlanChoices,
        numel: Mapping[str, int],
        state_bytes: int,
        gradient: Callable[[str], dict[Buffer, Content]],
        drafts: list[Draft],
    ):
        self._homes, self._gradient, self._drafts = (
            frozenset(choices.device_homes),
            gradient,
            drafts,
        )
        self._slots = {EMBED: slot_of(EMBED), HEAD: slot_of(HEAD)} | dict(slots)
        self.piece_numel = max(numel[block] for block in blocks) if self._homes else 0
        self.buffers = [
            Buffer(BufferKind.UPDATE, number=k)
            for k in range(choices.update_buffers if self._homes else 0)
        ]
        self._bounds = {
            unit: [
                (start, min(start + self.piece_numel, numel[unit]))
                for start in range(0, numel[unit], self.piece_numel)
            ]
            for unit in self._homes
        }
        self._pieces = [
            (unit, k)
            for unit in (EMBED, *blocks, HEAD)
            if unit in self._homes
            for k in range(len(self._bounds[unit]))
        ]
        spare = choices.spare_buffers
        self.spare = self.buffers[:spare]
        own = self.buffers[spare:]
        # What is fetched later finds no space in a spare buffer: that would be needed again before
        # it was sent back.
        self._buffer = {
            piece: self.buffers[k] if k < spare else own[(k - spare) % len(own)]
            for k, piece in enumerate(self._pieces)
        }
        self.lenders = blocks[len(blocks) - choices.spare_blocks :] if self.spare else []
        # No other gradient takes their place in the staging buffers before the step ends.
        self._may_stay_staged = {EMBED, *blocks[:2]}
        self.arena: list[str] = []
        self._sums_of: dict[Buffer, list[str]] = {}
        if self._homes and choices.gradient_sum == GradientSum.DEVICE:
            self._share_sums(blocks, numel, self.piece_numel * state_bytes)
        self._fetched: set[Piece] = set()
        self._with_gradient: set[Piece] = set()
        self._staging: dict[str, Buffer] = {}
        self._lent = False

    def _share_sums(self, blocks: list[str], numel: Mapping[str, int], buffer_bytes: int) -> None:
        """The order of the blocks' sums in one stretch of memory, with the buffers at its front:
        that in which backward has done with them.
        """
        self.arena = [*reversed(blocks)]
        spans, end = [], 0
        for block in self.arena:
            spans.append((block, end, end + 4 * numel[block]))
            end = spans[-1][2]
        for k, buffer in enumerate(self.buffers[len(self.spare) :]):
            self._sums_of[buffer] = [
                block
                for block, start, end in spans
                if start < (k + 1) * buffer_bytes and end > k * buffer_bytes
            ]

    # ------------------------------------------------------------------ what the other ops must kno

    def placed(self, unit: str) -> Buffer | None:
        """The slot in which the unit is updated, because it is still there when the step ends."""
        return self._slots.get(unit) if unit in self._homes else None

    def planes(self, unit: str) -> dict[Buffer, Content]:
        """The weights on the host: pieces of a unit arrive one by one."""
        if unit in self._homes:
            return {
                Buffer(BufferKind.WEIGHTS, unit, piece=k): READY
                for k in range(len(self._bounds[unit]))
            }
        return {Buffer(BufferKind.WEIGHTS, unit): READY}

    def weights(self, unit: str, slot: Buffer) -> dict[Buffer, Content]:
        """The weights in a slot."""
        content = Content(ContentKind.WEIGHTS, unit)
        if self.placed(unit) is None:
            return {slot: content}
        pieces = len(self._bounds[unit])
        return {_part(slot, k, pieces): content for k in range(pieces)}

    def arena_of(self, block: str) -> dict[Buffer, Content]:
        """Parts of the arena that the block's sum lies in, while sums are in them."""
        return {
            _arena(buffer): Content(ContentKind.SUM)
            for buffer, blocks in self._sums_of.items()
            if block in blocks
        }

    def activations_of(self, block: str) -> dict[Buffer, Content]:
        """The memory of the block's activations that is lent at other times, while they are there."""
        return {_LENDABLE: _ACTIVATIONS} if block in self.lenders else {}

    def all_planes(self) -> dict[Buffer, Content]:
        """What is ready when all pieces are applied."""
        return {
            Buffer(kind, unit, piece=k): READY
            for unit, k in self._pieces
            for kind in (BufferKind.WEIGHTS, BufferKind.STATES)
        }

    def keep_staged(self, unit: str, staging: Buffer) -> bool:
        """Whether the unit's complete gradient is updated from its staging buffer, and so need not
        leave the device.
        """
        if unit in self._homes and unit in self._may_stay_staged:
            self._staging[unit] = staging
            return True
        return False

    # ------------------------------------------------------------------ ops

    def lend(self) -> None:
        """Activations of the lenders are no longer there."""
        self._lent = True
        self._drafts.append(Draft(Lend, _STEP, {}, {_LENDABLE: _LENT}, {}))

    def reclaim(self) -> None:
        """Their memory is needed for activations again."""
        self._drafts.append(Draft(Reclaim, _STEP, {}, {_LENDABLE: _ACTIVATIONS}, {}))

    def fetch_first(self, finished: Collection[str]) -> None:
        """Fetch what there are free buffers for. finished: blocks whose gradients are complete."""
        lent, others = self._first()
        for piece in [*(lent if self._lent else ()), *others]:
            if piece not in self._fetched:
                if not set(self._sums_of.get(self._buffer[piece], ())) <= set(finished):
                    return
                self._fetch(piece)
            if piece not in self._with_gradient and piece[0] in finished:
                self._fetch_gradient(piece)

    def _first(self) -> tuple[list[Piece], list[Piece]]:
        """What is fetched before the gradients are complete, into spare buffers and into others."""
        return self._pieces[: len(self.spare)], self._pieces[len(self.spare) : len(self.buffers)]

    def write(self) -> None:
        """After the summary: update, send back, fetch what is missing.

        A piece that was not among the first waits for the buffer of an earlier one, so those are
        sent first. Its weights go out before states that no fetch waits for: those of `LEAD` pieces
        go before them, in the time that its own take to arrive. Spare buffers, which the forward
        pass needs back, are sent in between, and what nothing waits for is last.
        """
        lent, others = self._first()
        rest = self._pieces[len(self.buffers) :]
        for piece in (*lent, *others):
            self._update(piece)
        for piece in (*lent, *others):
            if self.placed(piece[0]) is None:
                self._send_weights(piece)
        lead, needed = min(LEAD, len(self.buffers) - len(self.spare)), others[: len(rest)]
        between = [
            piece
            for pair in itertools.zip_longest(needed, lent)
            for piece in pair
            if piece is not None
        ]
        sent = late = 0
        for piece in (*between, *others[len(needed) :], *rest):
            self._send_all(piece)
            if piece in lent:
                continue
            sent += 1
            free = sent if sent >= len(needed) else sent - lead + 1
            for following in rest[late : max(late, free)]:
                self._update(following)
                if self.placed(following[0]) is None:
                    self._send_weights(following)
                late += 1

    def _send_all(self, piece: Piece) -> None:
        """What was not sent yet; of a unit that is placed, no prefetch waits for the weights."""
        if self.placed(piece[0]) is not None:
            self._send_weights(piece)
        self._send(OffloadStates, piece, BufferKind.STATES)

    def _emit(
        self,
        type_: type[OfPiece],
        piece: Piece,
        reads: dict[Buffer, Content],
        writes: dict[Buffer, Content],
        **fields: Any,
    ) -> None:
        unit, k = piece
        self._drafts.append(
            Draft(
                type_,
                unit,
                reads,
                writes,
                {"piece": self._bounds[unit][k], "buffer": self._buffer[piece]} | fields,
            )
        )

    def _states_in_arena(self, buffer: Buffer) -> dict[Buffer, Content]:
        """The buffer's part of the arena, while states are in it."""
        return {_arena(buffer): Content(ContentKind.STATES)} if self._sums_of.get(buffer) else {}

    def _lent_memory(self, buffer: Buffer) -> dict[Buffer, Content]:
        return {_LENDABLE: _LENT} if buffer in self.spare else {}

    def _fetch(self, piece: Piece) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        self._fetched.add(piece)
        planes = {
            Buffer(kind, unit, piece=k): READY for kind in (BufferKind.WEIGHTS, BufferKind.STATES)
        }
        self._emit(
            FetchStates,
            piece,
            planes | self._lent_memory(buffer),
            {buffer: Content(ContentKind.FETCHED, unit, piece=k)} | self._states_in_arena(buffer),
        )

    def _fetch_gradient(self, piece: Piece) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        self._with_gradient.add(piece)
        if unit not in self._staging:
            self._emit(
                FetchGradient,
                piece,
                self._gradient(unit),
                {_gradient_in(buffer): Content(ContentKind.SUM, unit, piece=k)},
            )

    def _update(self, piece: Piece) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        if piece not in self._fetched:
            self._fetch(piece)
        if piece not in self._with_gradient:
            self._fetch_gradient(piece)
        reads = {
            buffer: Content(ContentKind.FETCHED, unit, piece=k),
            Buffer(BufferKind.SUMMARY): READY,
        }
        reads |= self._lent_memory(buffer)
        staging = self._staging.get(unit)
        if staging is not None:
            reads[staging] = Content(ContentKind.SUM, unit)
        else:
            reads[_gradient_in(buffer)] = Content(ContentKind.SUM, unit, piece=k)
        writes, slot = {buffer: Content(ContentKind.UPDATED, unit, piece=k)}, self.placed(unit)
        if slot is not None:
            writes[_part(slot, k, len(self._bounds[unit]))] = Content(ContentKind.WEIGHTS, unit)
        self._emit(DeviceUpdate, piece, reads, writes, staging=staging, slot=slot)

    def _send_weights(self, piece: Piece) -> None:
        self._send(OffloadWeights, piece, BufferKind.WEIGHTS)

    def _send(self, type_: type[OfPiece], piece: Piece, kind: BufferKind) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        updated = {buffer: Content(ContentKind.UPDATED, unit, piece=k)}
        self._emit(
            type_,
            piece,
            updated | self._states_in_arena(buffer) | self._lent_memory(buffer),
            {Buffer(kind, unit, piece=k): READY},
        )


def _part(slot: Buffer, piece: int, pieces: int) -> Buffer:
    """Pieces of one unit are written to its slot one by one."""
    return slot if pieces == 1 else slot.part(piece)


def _arena(buffer: Buffer) -> Buffer:
    """The part of the arena that an update buffer lies over."""
    return Buffer(BufferKind.ARENA, number=buffer.number)


def _gradient_in(buffer: Buffer) -> Buffer:
    """The part of an update buffer that a gradient is fetched to."""
    return Buffer(BufferKind.UPDATE_GRADIENT, number=buffer.number)

"""The part of a step's plan in which optimizers run on the device, on states that are streamed there and back.

A unit's planes travel in pieces: fetched into a buffer on STATES IN, updated there on UPDATE, sent back on STATES OUT, each
lane in the order in which the next forward pass needs the weights. As many pieces as there are buffers are fetched before
the gradients are complete. Between two steps most of the device's memory is of no other use: buffers lie over fp32 sums, and
spare ones take the place of activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

from engine.plan.builder import PlanBuilder
from engine.plan.ops import COMPUTE, EMBED, HEAD, STATES_IN, STATES_OUT, UPDATE

Piece = tuple[str, int]
"""A unit and which of its pieces."""

LEAD = 2
"""Pieces whose states leave their buffers before the weights of the first piece that is fetched into one of these."""


class DeviceUpdates:
    """Writes the ops of `homes`, the units at home on the device, into a plan.

    blocks: all, in forward order. slots: of the blocks that are still in one when a step ends, their own or not. numel:
    elements of each unit's planes. state_bytes: of all planes, for an element. share_sums: the buffers lie over fp32 sums
    of blocks, which are of no use between the end of a step and the first backward of the next. gradient: the resource that
    holds a unit's gradient on the host, and its tag. spare: so many of the buffers, the first, exist only while the
    activations of the last `spare_blocks` blocks do not.
    """

    def __init__(self, builder: PlanBuilder, blocks: list[str], slots: Mapping[str, str], homes: Collection[str],
                 buffers: int, numel: Mapping[str, int], state_bytes: int, share_sums: bool,
                 gradient: Callable[[str], dict[str, str]], spare: int = 0, spare_blocks: int = 0):
        self._builder, self._homes, self._gradient = builder, homes, gradient
        self._slots = {EMBED: EMBED, HEAD: HEAD} | dict(slots)
        self.piece_numel = max(numel[block] for block in blocks) if homes else 0
        self.buffers = [f"states {k}" for k in range(buffers)] if homes else []
        self._bounds = {unit: [(start, min(start + self.piece_numel, numel[unit]))
                               for start in range(0, numel[unit], self.piece_numel)] for unit in homes}
        self._pieces = [(unit, k) for unit in (EMBED, *blocks, HEAD) if unit in homes
                        for k in range(len(self._bounds[unit]))]
        self.spare = self.buffers[:spare]
        own = self.buffers[spare:]
        # What is fetched later finds no room in a spare buffer: that would be needed again before it was sent back.
        self._buffer = {piece: self.buffers[k] if k < spare else own[(k - spare) % len(own)]
                        for k, piece in enumerate(self._pieces)}
        self.lenders = blocks[len(blocks) - spare_blocks:] if self.spare else []
        # No other gradient takes their place in the staging buffers before the step ends.
        self._staged = {EMBED, *blocks[:2]}
        self.arena: list[str] = []
        self._sums_of: dict[str, list[str]] = {}
        if homes and share_sums:
            self._share_sums(blocks, numel, self.piece_numel * state_bytes)
        self.start_step()

    def start_step(self) -> None:
        self._fetched: set[Piece] = set()
        self._with_gradient: set[Piece] = set()
        self._staging: dict[str, str] = {}
        self._lent = False

    def _share_sums(self, blocks: list[str], numel: Mapping[str, int], buffer_bytes: int) -> None:
        """The order of the blocks' sums in one stretch of memory, with the buffers at its front: that in which backward has
        done with them."""
        self.arena = [*reversed(blocks)]
        spans, end = [], 0
        for block in self.arena:
            spans.append((block, end, end + 4 * numel[block]))
            end = spans[-1][2]
        for k, buffer in enumerate(self.buffers[len(self.spare):]):
            self._sums_of[buffer] = [block for block, start, end in spans
                                     if start < (k + 1) * buffer_bytes and end > k * buffer_bytes]

    # ------------------------------------------------------------------ what the other ops must know

    def placed(self, unit: str) -> str | None:
        """The slot in which the unit is updated, because it is still there when the step ends."""
        return self._slots.get(unit) if unit in self._homes else None

    def planes(self, unit: str) -> dict[str, str]:
        """The weights on the host: pieces of a unit come home one by one."""
        if unit in self._homes:
            return {f"plane:weight {unit} {k}": "ready" for k in range(len(self._bounds[unit]))}
        return {f"plane:weight {unit}": "ready"}

    def slot(self, unit: str, slot: str) -> dict[str, str]:
        """The weights in a slot."""
        pieces = len(self._bounds[unit]) if self.placed(unit) else 1
        return {self._slot_part(slot, k, pieces): unit for k in range(pieces)}

    @staticmethod
    def _slot_part(slot: str, piece: int, pieces: int) -> str:
        """The resource: pieces of one unit are written to its slot one by one."""
        return f"slot:{slot}" if pieces == 1 else f"slot:{slot} {piece}"

    def sums_under(self, block: str) -> dict[str, str]:
        """Parts of the arena that the block's sum lies in, while sums are in them."""
        return {f"sums {buffer}": "sums" for buffer, blocks in self._sums_of.items() if block in blocks}

    def room(self, block: str) -> dict[str, str]:
        """The memory of the block's activations, while they are there."""
        return {"room": "activations"} if block in self.lenders else {}

    def keep_staged(self, unit: str, staging: str) -> bool:
        """Whether the unit's complete gradient is updated from its staging buffer, and so need not leave the device."""
        if unit in self._homes and unit in self._staged:
            self._staging[unit] = staging
            return True
        return False

    # ------------------------------------------------------------------ ops

    def lend(self) -> None:
        """Activations of the lenders are no longer there."""
        self._lent = True
        self._builder.emit("lend", COMPUTE, "step", writes={"room": "lent"})

    def reclaim(self) -> None:
        self._builder.emit("reclaim", COMPUTE, "step", writes={"room": "activations"})

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
        return self._pieces[:len(self.spare)], self._pieces[len(self.spare):len(self.buffers)]

    def write(self) -> None:
        """After the summary: update, send back, fetch what is missing.

        A piece that was not among the first waits for the buffer of an earlier one, so those are sent first. Its weights go
        out before states that no fetch waits for: those of `LEAD` pieces go before them, in the time that its own take to
        arrive. Spare buffers, which the forward pass needs back, are sent in between, and what nothing waits for is last.
        """
        lent, others = self._first()
        rest = self._pieces[len(self.buffers):]
        for piece in (*lent, *others):
            self._update(piece)
        for piece in (*lent, *others):
            if self.placed(piece[0]) is None:
                self._send(piece, "weight")
        lead, needed = min(LEAD, len(self.buffers) - len(self.spare)), others[:len(rest)]
        between = [piece for pair in itertools.zip_longest(needed, lent) for piece in pair if piece is not None]
        sent = late = 0
        for piece in (*between, *others[len(needed):], *rest):
            self._send_all(piece)
            if piece in lent:
                continue
            sent += 1
            free = sent if sent >= len(needed) else sent - lead + 1
            for following in rest[late:max(late, free)]:
                self._update(following)
                if self.placed(following[0]) is None:
                    self._send(following, "weight")
                late += 1

    def _send_all(self, piece: Piece) -> None:
        """What was not sent yet; of a unit that is placed, no prefetch waits for the weights."""
        if self.placed(piece[0]) is not None:
            self._send(piece, "weight")
        self._send(piece, "states")

    def home(self) -> dict[str, str]:
        """What is ready when all pieces are home."""
        return {f"plane:{what} {unit} {k}": "ready" for unit, k in self._pieces for what in ("weight", "states")}

    def _emit(self, kind: str, lane: str, piece: Piece, reads: dict[str, str], writes: dict[str, str], **attributes) -> None:
        unit, k = piece
        self._builder.emit(kind, lane, unit, reads=reads, writes=writes, piece=self._bounds[unit][k],
                           states=self._buffer[piece], **attributes)

    def _over(self, buffer: str) -> dict[str, str]:
        """The buffer's part of the arena, while states are in it."""
        return {f"sums {buffer}": "states"} if self._sums_of.get(buffer) else {}

    def _room(self, buffer: str) -> dict[str, str]:
        return {"room": "lent"} if buffer in self.spare else {}

    def _fetch(self, piece: Piece) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        self._fetched.add(piece)
        planes = {f"plane:{what} {unit} {k}": "ready" for what in ("weight", "states")}
        self._emit("fetch_states", STATES_IN, piece, planes | self._room(buffer),
                   {buffer: f"{unit} {k} fetched"} | self._over(buffer))

    def _fetch_gradient(self, piece: Piece) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        self._with_gradient.add(piece)
        if unit not in self._staging:
            self._emit("fetch_gradient", STATES_IN, piece, self._gradient(unit), {f"gradient of {buffer}": f"{unit} {k}"})

    def _update(self, piece: Piece) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        if piece not in self._fetched:
            self._fetch(piece)
        if piece not in self._with_gradient:
            self._fetch_gradient(piece)
        reads = {buffer: f"{unit} {k} fetched", "summary": "ready"} | self._room(buffer)
        staging = self._staging.get(unit)
        reads |= {staging: f"{unit} sum"} if staging is not None else {f"gradient of {buffer}": f"{unit} {k}"}
        writes, slot = {buffer: f"{unit} {k} updated"}, self.placed(unit)
        if slot is not None:
            writes[self._slot_part(slot, k, len(self._bounds[unit]))] = unit
        self._emit("device_update", UPDATE, piece, reads, writes, staging=staging, slot=slot)

    def _send(self, piece: Piece, what: str) -> None:
        (unit, k), buffer = piece, self._buffer[piece]
        self._emit("offload_weights" if what == "weight" else "offload_states", STATES_OUT, piece,
                   {buffer: f"{unit} {k} updated"} | self._over(buffer) | self._room(buffer),
                   {f"plane:{what} {unit} {k}": "ready"})

"""The second of a plan's three passes: the ops of one step in program order, with what each reads
and writes. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.plan.assign_slots import BlockUse, assign_slots, block_slots, slot_of
from engine.plan.buffers import EMBED, HEAD, READY, Buffer, BufferKind, Content, ContentKind
from engine.plan.choices import PlanChoices
from engine.plan.derive_waits import Draft
from engine.plan.device_updates import DeviceUpdates
from engine.plan.ops import (
    Applied,
    Backward,
    Clip,
    Embed,
    EmbedBackward,
    FetchBoundary,
    FetchGrad,
    Forward,
    GradientSum,
    Loss,
    Offload,
    Op,
    Prefetch,
    Reduce,
    StoreBoundary,
    Summary,
    Update,
)

STEP = "step"
"""The unit of ops that are about the whole step."""

Reads = dict[Buffer, Content]


@dataclass
class _Boundaries:
    """Of one block on the host: micro-batches whose boundaries are not fetched yet, and the rings
    of the others.
    """

    ahead: Iterator[int]
    rings: dict[int, Buffer] = field(default_factory=dict)

    def come_by(self, micro_batch: int, ring: Buffer) -> None:
        self.rings[micro_batch] = ring


class StepWriter:
    """Writes one step's ops, once, and names the buffers that they use.

    blocks: unit names in forward order. tied: the head also uses the embed unit's weights. numel,
    state_bytes: as for `build_step_plan`. training: False for a pass that ends with the loss.
    updates: False for a step that ends with its summary.
    """

    def __init__(
        self,
        blocks: list[str],
        tied: bool,
        choices: PlanChoices,
        numel: Mapping[str, int],
        state_bytes: int,
        training: bool = True,
        updates: bool = True,
    ):
        self._blocks, self._tied, self._choices, self._training, self._updates = (
            blocks,
            tied,
            choices,
            training,
            updates,
        )
        self._above = dict(zip(blocks, [*blocks[1:], HEAD]))
        self._below = dict(zip(blocks[1:], blocks))
        self._resident = (
            blocks[len(blocks) - choices.resident_blocks :] if choices.resident_blocks else []
        )
        self.kept = frozenset(
            blocks[len(blocks) - choices.kept_blocks :] if choices.kept_blocks else ()
        )
        self._streamed = [block for block in blocks if block not in self._resident]
        slots = block_slots(self._streamed, self._resident, choices.slots)
        # Backward ends with the first blocks, and nothing takes their slots before the next step
        # does.
        lasting = {
            block: slots[block] for block in (*self._resident, *self._streamed[: choices.slots])
        }
        self._drafts: list[Draft] = []
        self.device = DeviceUpdates(
            blocks, lasting, choices, numel, state_bytes, self._host_gradient, self._drafts
        )
        there = {slot: unit for unit in blocks if (slot := self.device.placed(unit)) is not None}
        self._uses = assign_slots(blocks, slots, there, choices.rounds, training)
        self._next_fetch = 0
        self._ring_turn = {BufferKind.STORE_RING: 0, BufferKind.FETCH_RING: 0}
        self._staging_turn = 0

    # ------------------------------------------------------------------ buffers

    def slot_units(self) -> dict[Buffer, tuple[str, ...]]:
        slots: dict[Buffer, tuple[str, ...]] = {slot_of(EMBED): (EMBED,), slot_of(HEAD): (HEAD,)}
        slots |= {
            Buffer(BufferKind.SLOT, number=k): tuple(self._streamed)
            for k in range(min(self._choices.slots, len(self._streamed)))
        }
        return slots | {slot_of(unit): (unit,) for unit in self._resident}

    def _grad(self, unit: str) -> Buffer:
        if self._choices.gradient_sum == GradientSum.DEVICE or (
            unit in (EMBED, HEAD) and self._tied
        ):
            return Buffer(BufferKind.SUM, unit)
        return OUTER_SUM if unit in (EMBED, HEAD) else BLOCK_SUM

    def grad_units(self) -> dict[Buffer, tuple[str, ...]]:
        grads: dict[Buffer, tuple[str, ...]] = {}
        for unit in [EMBED, *self._blocks, HEAD]:
            grads[self._grad(unit)] = (*grads.get(self._grad(unit), ()), unit)
        return grads

    def staging_units(self) -> dict[Buffer, tuple[str, ...]]:
        return {staging: tuple(self._blocks) for staging in BLOCK_STAGINGS} | {
            OUTER_STAGING: (EMBED, HEAD)
        }

    def rings(self) -> tuple[Buffer, ...]:
        if not self._choices.host_boundaries:
            return ()
        return tuple(
            Buffer(way, number=k)
            for way in (BufferKind.STORE_RING, BufferKind.FETCH_RING)
            for k in range(self._choices.boundary_rings)
        )

    def _next_ring(self, way: BufferKind) -> Buffer:
        turn = self._ring_turn[way]
        self._ring_turn[way] = (turn + 1) % self._choices.boundary_rings
        return Buffer(way, number=turn)

    def _next_staging(self, unit: str) -> Buffer:
        if unit in (EMBED, HEAD):
            return OUTER_STAGING
        self._staging_turn ^= 1
        return BLOCK_STAGINGS[self._staging_turn]

    # ------------------------------------------------------------------ the step

    def write(self) -> Sequence[Draft]:
        """All ops of the step, in program order."""
        c, use = self._choices, 0
        per_round = c.micro_batches // c.rounds
        for round_ in range(c.rounds):
            batches = list(range(round_ * per_round, (round_ + 1) * per_round))
            use = self._forward_pass(batches, round_, use)
            for mb in batches:
                self._loss(mb, round_, mb == batches[0])
            if self._training:
                use = self._backward_pass(batches, round_, use)
        if self._training:
            self._finish_step()
        return self._drafts

    def _forward_pass(self, batches: list[int], round_: int, use: int) -> int:
        """Embed and every block; the number of the next block's use."""
        if round_ == 0 and self.device.placed(EMBED) is None:
            self._prefetch(EMBED, slot_of(EMBED))
        self._fetch_ahead(use)
        for mb in batches:
            self._emit(
                Embed,
                EMBED,
                self.device.weights(EMBED, slot_of(EMBED)),
                {_hidden(mb): _after("", round_)},
                micro_batch=mb,
                slot=slot_of(EMBED),
            )
        for block in self._blocks:
            self._fetch_ahead(use)
            if round_ == 0 and block == self._blocks[-1] and self.device.placed(HEAD) is None:
                # Not earlier: the head's update comes last, and a prefetch that waits holds the
                # lane up.
                self._prefetch(HEAD, slot_of(HEAD))
            if self._training and round_ == 0 and self.device.lenders[:1] == [block]:
                self.device.reclaim()
            for mb in batches:
                self._forward(block, mb, round_, self._uses[use])
            use += 1
        self._fetch_ahead(use)
        return use

    def _backward_pass(self, batches: list[int], round_: int, use: int) -> int:
        """Every block and embed, and the gradients of all units; the number of the next block's
        use.
        """
        last = round_ == self._choices.rounds - 1
        self._finish_gradient(HEAD, round_)
        finished: set[str] = set()
        boundaries = self._fetch_boundaries(self._blocks[-1], batches, round_)
        for block, following in zip(reversed(self._blocks), [*reversed(self._blocks[:-1]), None]):
            self._fetch_ahead(use)
            self._backward_unit(block, batches, round_, self._uses[use], boundaries)
            if following is not None:
                # Before the next prefetch, which waits for a slot: its first backward would have to
                # wait for both.
                boundaries = self._fetch_boundaries(following, batches, round_)
            use += 1
            self._fetch_ahead(use)
            self._finish_gradient(block, round_)
            finished.add(block)
            if last:
                if self.device.lenders[:1] == [block]:
                    self.device.lend()
                self.device.fetch_first(finished)
        for mb in batches:
            self._embed_backward(mb, round_, mb == batches[0])
        self._finish_gradient(EMBED, round_)
        return use

    def _finish_step(self) -> None:
        units = [EMBED, *self._blocks, HEAD]
        norms = {Buffer(BufferKind.NORM, unit): READY for unit in units}
        self._emit(Summary, STEP, norms | {LOSS: READY}, {SUMMARY: READY})
        if not self._updates:
            return
        self._emit(Clip, STEP, {SUMMARY: READY}, {CLIP: READY})
        self.device.write()
        for unit in units:
            if unit not in self._choices.device_homes:
                self._emit(
                    Update,
                    unit,
                    {CLIP: READY} | self._host_gradient(unit),
                    {Buffer(BufferKind.WEIGHTS, unit): READY},
                )
        if self._choices.device_homes:
            self._emit(Applied, STEP, self.device.all_planes(), {})

    # ------------------------------------------------------------------ ops

    def _emit(self, type_: type[Op], unit: str, reads: Reads, writes: Reads, **fields: Any) -> None:
        self._drafts.append(Draft(type_, unit, reads, writes, fields))

    def _fetch_ahead(self, current: int) -> None:
        """Issue the prefetches of uses up to `prefetch_depth` ahead, in order, once their slot is
        no longer needed.
        """
        while (
            self._next_fetch < len(self._uses)
            and self._next_fetch <= current + self._choices.prefetch_depth
        ):
            use = self._uses[self._next_fetch]
            if use.fetch:
                needed = any(
                    other.slot == use.slot for other in self._uses[current : self._next_fetch]
                )
                if needed:
                    return
                self._prefetch(use.unit, use.slot)
            self._next_fetch += 1

    def _prefetch(self, unit: str, slot: Buffer) -> None:
        self._emit(
            Prefetch,
            unit,
            self.device.planes(unit),
            {slot: Content(ContentKind.WEIGHTS, unit)},
            slot=slot,
        )

    def _forward(self, block: str, mb: int, round_: int, use: BlockUse) -> None:
        reads = self.device.weights(block, use.slot) | {
            _hidden(mb): _after(self._below.get(block, ""), round_)
        }
        writes = {_hidden(mb): _after(block, round_)}
        ring = None
        if self._training:
            reads |= self.device.activations_of(block)
            if self._choices.host_boundaries and block not in self.kept:
                ring = self._next_ring(BufferKind.STORE_RING)
                writes[ring] = Content(ContentKind.BOUNDARY, block, mb)
            else:
                writes[Buffer(BufferKind.SAVED, block, mb)] = self._saved(block, round_, use.slot)
        self._emit(Forward, block, reads, writes, micro_batch=mb, slot=use.slot, ring=ring)
        if ring is not None:
            self._emit(
                StoreBoundary,
                block,
                {ring: Content(ContentKind.BOUNDARY, block, mb)},
                {
                    Buffer(BufferKind.HOST_BOUNDARY, block, mb): Content(
                        ContentKind.BOUNDARY, number=round_
                    )
                },
                micro_batch=mb,
                ring=ring,
            )

    def _saved(self, block: str, round_: int, slot: Buffer) -> Content:
        """What a forward leaves on the device for its backward."""
        if block in self.kept:
            # What is kept points into the slot, so it must be the same one.
            return Content(ContentKind.ACTIVATIONS, number=round_, slot=slot)
        return Content(ContentKind.BOUNDARY, number=round_)

    def _loss(self, mb: int, round_: int, first: bool) -> None:
        reads = self.device.weights(HEAD, slot_of(HEAD)) | {
            _hidden(mb): _after(self._blocks[-1], round_)
        }
        writes = {LOSS: READY}
        if self._tied:
            reads |= self.device.weights(EMBED, slot_of(EMBED))
        if self._training:
            writes |= {
                _hidden(mb): _gradient(HEAD, round_),
                self._grad(HEAD): Content(ContentKind.SUM, HEAD),
            }
            if self._tied:
                writes[self._grad(EMBED)] = Content(ContentKind.SUM, EMBED)
        self._emit(
            Loss,
            HEAD,
            reads,
            writes,
            micro_batch=mb,
            slot=slot_of(HEAD),
            grad=self._grad(HEAD),
            first=first and self._starts_sum(round_),
        )

    def _starts_sum(self, round_: int) -> bool:
        return round_ == 0 or self._choices.gradient_sum != GradientSum.DEVICE

    def _fetch_boundaries(self, block: str, batches: list[int], round_: int) -> _Boundaries:
        """The first of the block's boundaries on the host; the others follow one by one as rings
        become free.
        """
        found = _Boundaries(
            iter(batches if self._choices.host_boundaries and block not in self.kept else [])
        )
        for _ in range(max(1, self._choices.boundary_rings - 1)):
            self._fetch_boundary(block, round_, found)
        return found

    def _fetch_boundary(self, block: str, round_: int, boundaries: _Boundaries) -> None:
        mb = next(boundaries.ahead, None)
        if mb is not None:
            ring = self._next_ring(BufferKind.FETCH_RING)
            boundaries.come_by(mb, ring)
            self._emit(
                FetchBoundary,
                block,
                {
                    Buffer(BufferKind.HOST_BOUNDARY, block, mb): Content(
                        ContentKind.BOUNDARY, number=round_
                    )
                },
                {ring: Content(ContentKind.BOUNDARY, block, mb)},
                micro_batch=mb,
                ring=ring,
            )

    def _backward_unit(
        self, block: str, batches: list[int], round_: int, use: BlockUse, boundaries: _Boundaries
    ) -> None:
        above, grad = self._above[block], self._grad(block)
        for mb in batches:
            reads = (
                self.device.weights(block, use.slot)
                | {_hidden(mb): _gradient(above, round_)}
                | self.device.activations_of(block)
            )
            ring = boundaries.rings.get(mb)
            if ring is not None:
                reads[ring] = Content(ContentKind.BOUNDARY, block, mb)
            else:
                reads[Buffer(BufferKind.SAVED, block, mb)] = self._saved(block, round_, use.slot)
            first = mb == batches[0] and self._starts_sum(round_)
            writes = {_hidden(mb): _gradient(block, round_), grad: Content(ContentKind.SUM, block)}
            if first:
                writes |= self.device.arena_of(block)
            self._emit(
                Backward,
                block,
                reads,
                writes,
                micro_batch=mb,
                slot=use.slot,
                grad=grad,
                first=first,
                ring=ring,
            )
            self._fetch_boundary(block, round_, boundaries)

    def _embed_backward(self, mb: int, round_: int, first: bool) -> None:
        grad = self._grad(EMBED)
        self._emit(
            EmbedBackward,
            EMBED,
            self.device.weights(EMBED, slot_of(EMBED))
            | {_hidden(mb): _gradient(self._blocks[0], round_)},
            {grad: Content(ContentKind.SUM, EMBED)},
            micro_batch=mb,
            slot=slot_of(EMBED),
            grad=grad,
            first=first and self._starts_sum(round_) and not self._tied,
        )

    def _finish_gradient(self, unit: str, round_: int) -> None:
        """Round the unit's sum and send it to the host, at the end of each round or of the last."""
        last = round_ == self._choices.rounds - 1
        if self._choices.gradient_sum == GradientSum.DEVICE and not last:
            return
        grad, staging = self._grad(unit), self._next_staging(unit)
        reads = {grad: Content(ContentKind.SUM, unit)} | self.device.arena_of(unit)
        plane = Buffer(BufferKind.GRADIENT, unit)
        adds = self._choices.gradient_sum == GradientSum.HOST and round_ > 0
        if adds:
            earlier = Content(ContentKind.EARLIER_SUM, unit)
            self._emit(
                FetchGrad,
                unit,
                {plane: Content(ContentKind.SUM, number=round_ - 1)},
                {staging: earlier},
                staging=staging,
            )
            reads[staging] = earlier
        writes = {staging: Content(ContentKind.SUM, unit)}
        if last:
            writes[Buffer(BufferKind.NORM, unit)] = READY
        self._emit(Reduce, unit, reads, writes, grad=grad, staging=staging, adds=adds, last=last)
        if last and self.device.keep_staged(unit, staging):
            return
        self._emit(
            Offload,
            unit,
            {staging: Content(ContentKind.SUM, unit)},
            {plane: Content(ContentKind.SUM, number=round_)},
            staging=staging,
        )

    def _host_gradient(self, unit: str) -> Reads:
        return {
            Buffer(BufferKind.GRADIENT, unit): Content(
                ContentKind.SUM, number=self._choices.rounds - 1
            )
        }


LOSS, SUMMARY, CLIP = Buffer(BufferKind.LOSS), Buffer(BufferKind.SUMMARY), Buffer(BufferKind.CLIP)
BLOCK_SUM, OUTER_SUM = Buffer(BufferKind.SUM, number=0), Buffer(BufferKind.SUM, number=1)
"""Of one block at a time, and of embed or head."""
BLOCK_STAGINGS = Buffer(BufferKind.STAGING, number=0), Buffer(BufferKind.STAGING, number=1)
OUTER_STAGING = Buffer(BufferKind.STAGING, number=2)


def _hidden(micro_batch: int) -> Buffer:
    return Buffer(BufferKind.HIDDEN, number=micro_batch)


def _after(block: str, round_: int) -> Content:
    """A hidden state; `block` is empty before the first."""
    return Content(ContentKind.HIDDEN, block, round_)


def _gradient(unit: str, round_: int) -> Content:
    return Content(ContentKind.GRADIENT, unit, round_)

"""The second of a plan's three passes writes the ops of one step in program order, with what each
reads and writes. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from engine.plan.assign_slots import BlockUse, assign_slots, slot_of
from engine.plan.buffers import EMBED, HEAD, READY, Buffer, BufferKind, Content, ContentKind
from engine.plan.choices import PlanChoices, PlaneSizes
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
    OffloadParked,
    Op,
    Prefetch,
    Reduce,
    StoreBoundary,
    Summary,
    Update,
)
from engine.plan.rounds import HostBoundaries, Round, Uses, gradient_of, host_boundary, state_after
from engine.plan.step_buffers import CLIP, LOSS, SUMMARY, StepBuffers, hidden, host_gradient

STEP = "step"
"""An op that concerns the whole step has this name in place of a unit."""


class StepEnd(Enum):
    """A step ends with one of these ops."""

    LOSS = "loss"
    """The pass has no gradients."""
    LOSS_AGAIN = "loss again"
    """The pass has no gradients either, and an earlier one has left weights in their slots."""
    SUMMARY = "summary"
    """The step is a dry run: no op writes weights or moments."""
    UPDATES = "updates"
    """The step is a full training step."""


class StepWriter:
    """A `StepWriter` writes the ops of one step. It can be used once.

    blocks: unit names in forward order. tied: the head also uses the embed unit's weights. end: the
    kind of op that ends the step.
    """

    def __init__(
        self,
        blocks: list[str],
        tied: bool,
        choices: PlanChoices,
        sizes: PlaneSizes,
        end: StepEnd,
    ):
        self._blocks = blocks
        self._tied = tied
        self._choices = choices
        self._end = end
        self._training = end in (StepEnd.SUMMARY, StepEnd.UPDATES)
        self._above = dict(zip(blocks, [*blocks[1:], HEAD]))
        self._below = dict(zip(blocks[1:], blocks))
        self._drafts: list[Draft] = []
        self.buffers = StepBuffers(blocks, tied, choices)
        self.device = DeviceUpdates(
            blocks, self.buffers.lasting_slots(), choices, sizes, self._drafts
        )
        self.held = self.buffers.own_slots() if end is StepEnd.LOSS_AGAIN else ()
        """These units, with their slots, are there when the step begins."""
        there = {
            slot: unit
            for unit, slot in (*self.device.placed_units(), *self.held)
            if unit in self.buffers.slots
        }
        self._uses = assign_slots(blocks, self.buffers.slots, there, choices.rounds, self._training)
        self._current = 0
        """The block use that is written next has this index in `_uses`."""
        self._next_fetch = 0
        """The prefetches of all uses before this index of `_uses` are written."""

    # ------------------------------------------------------------------ the step

    def write(self) -> Sequence[Draft]:
        """Returns every op of the step, in program order."""
        for round_ in self._rounds():
            self._forward_pass(round_)
            for micro_batch in round_.micro_batches:
                self._loss(micro_batch, round_)
            if self._training:
                self._backward_pass(round_)
        if self._training:
            self._emit_summary()
        if self._end is StepEnd.UPDATES:
            self._emit_updates()
        return self._drafts

    def _rounds(self) -> Iterator[Round]:
        rounds, count = self._choices.rounds, self._choices.micro_batches
        for number in range(rounds):
            micro_batches = range(number * count // rounds, (number + 1) * count // rounds)
            yield Round(number, micro_batches, is_last=number == rounds - 1)

    def _forward_pass(self, round_: Round) -> None:
        """Writes embed and every block of a round."""
        first_round = round_.number == 0
        shares = self._choices.shared_outer_slot
        # After a backward, embed is in the slot that it shares with the head.
        if (first_round or (shares and not self._training)) and not self._is_there(EMBED):
            self._prefetch(EMBED, self.buffers.outer_slot(EMBED))
        self._fetch_ahead()
        for micro_batch in round_.micro_batches:
            self._embed(micro_batch, round_)
        for block in self._blocks:
            self._fetch_ahead()
            is_last_block = block == self._blocks[-1]
            if (first_round or shares) and is_last_block and not self._is_there(HEAD):
                # The head's weights are not prefetched earlier: the head's update comes last, and a
                # prefetch that waits for it would delay all later copies on the lane.
                self._prefetch(HEAD, self.buffers.outer_slot(HEAD))
            if first_round and self._training and self._is_first_lender(block):
                self.device.reclaim()
            for micro_batch in round_.micro_batches:
                self._forward(block, micro_batch, round_)
            self._current += 1
        self._fetch_ahead()

    def _is_there(self, unit: str) -> bool:
        """Tells whether the slot of the embed or the head unit holds it when the step begins."""
        is_held = any(unit == held for held, _ in self.held)
        return is_held or self.device.placed(unit) is not None

    def _backward_pass(self, round_: Round) -> None:
        """Writes the backward of every block and of embed, and sends the gradients of all units."""
        self._finish_gradient(HEAD, round_)
        finished: set[str] = set()
        backwards = list(reversed(self._blocks))
        boundaries = self._fetch_boundaries(backwards[0], round_)
        for block, following in zip(backwards, [*backwards[1:], None]):
            self._fetch_ahead()
            if following is None and self._choices.shared_outer_slot:
                # The head was there. The next round, too, finds embed in its slot.
                self._prefetch(EMBED, self.buffers.outer_slot(EMBED))
            self._backward_unit(block, round_, boundaries)
            if following is not None:
                # Boundaries are fetched before the next prefetch, which waits for a slot. In the
                # opposite order, the first backward of the next block would wait for both.
                boundaries = self._fetch_boundaries(following, round_)
            self._current += 1
            self._fetch_ahead()
            self._finish_gradient(block, round_)
            finished.add(block)
            if round_.is_last:
                if self._is_first_lender(block):
                    self.device.lend()
                self.device.fetch_first(finished)
        for micro_batch in round_.micro_batches:
            self._embed_backward(micro_batch, round_)
        self._finish_gradient(EMBED, round_)

    def _is_first_lender(self, block: str) -> bool:
        """Tells whether this is the first block, in forward order, that lends the memory of its
        activations. Of the lenders, it is the last in backward.
        """
        return self.device.lenders[:1] == [block]

    def _emit_summary(self) -> None:
        reads = {Buffer(BufferKind.NORM, unit): READY for unit in self._units()}
        reads[LOSS] = READY
        self._emit(Summary, STEP, reads, {SUMMARY: READY})

    def _emit_updates(self) -> None:
        """Writes the clip factor and the updates, those on the device first."""
        self._emit(Clip, STEP, {SUMMARY: READY}, {CLIP: READY})
        self.device.write()
        last_round = self._choices.rounds - 1
        for unit in self._units():
            if unit in self._choices.device_homes:
                continue
            gradient = host_gradient(unit, last_round)
            ring = None
            if self._choices.parked_gradients:
                ring = self.buffers.next_gradient_ring(unit)
                gradient = {ring: Content(ContentKind.SUM, unit)}
                self._send_parked(unit, ring)
            weights = {Buffer(BufferKind.WEIGHTS, unit): READY}
            self._emit(Update, unit, {CLIP: READY} | gradient, weights, ring=ring)
        if self._choices.device_homes:
            self._emit(Applied, STEP, self.device.all_planes(), {})

    def _units(self) -> list[str]:
        return [EMBED, *self._blocks, HEAD]

    # ------------------------------------------------------------------ weights

    def _fetch_ahead(self) -> None:
        """Writes the prefetches of the uses up to `prefetch_depth` ahead, in order. It stops at the
        first use whose slot is still needed.
        """
        last = min(self._current + self._choices.prefetch_depth, len(self._uses) - 1)
        while self._next_fetch <= last:
            use = self._uses[self._next_fetch]
            if use.fetch:
                uses_before = self._uses[self._current : self._next_fetch]
                if any(earlier.slot == use.slot for earlier in uses_before):
                    return
                self._prefetch(use.unit, use.slot)
            self._next_fetch += 1

    def _prefetch(self, unit: str, slot: Buffer) -> None:
        writes = {slot: Content(ContentKind.WEIGHTS, unit)}
        self._emit(Prefetch, unit, self.device.planes(unit), writes, slot=slot)

    def _current_use(self) -> BlockUse:
        """Returns the block use whose ops are being written."""
        return self._uses[self._current]

    # ------------------------------------------------------------------ forward

    def _embed(self, micro_batch: int, round_: Round) -> None:
        slot = self.buffers.outer_slot(EMBED)
        reads = self.device.weights(EMBED, slot)
        writes = {hidden(micro_batch): state_after("", round_)}
        self._emit(Embed, EMBED, reads, writes, micro_batch=micro_batch, slot=slot)

    def _forward(self, block: str, micro_batch: int, round_: Round) -> None:
        slot = self._current_use().slot
        state = hidden(micro_batch)
        reads = self.device.weights(block, slot)
        reads[state] = state_after(self._below.get(block, ""), round_)
        writes = {state: state_after(block, round_)}
        ring = None
        if self._training:
            reads |= self.device.activations_of(block)
            if self._choices.host_boundaries and block not in self.buffers.kept:
                ring = self.buffers.next_ring(BufferKind.STORE_RING)
                writes[ring] = Content(ContentKind.BOUNDARY, block, micro_batch)
            else:
                saved = Buffer(BufferKind.SAVED, block, micro_batch)
                writes[saved] = self._saved(block, round_, slot)
        self._emit(Forward, block, reads, writes, micro_batch=micro_batch, slot=slot, ring=ring)
        if ring is not None:
            self._emit(
                StoreBoundary,
                block,
                {ring: Content(ContentKind.BOUNDARY, block, micro_batch)},
                host_boundary(block, micro_batch, round_),
                micro_batch=micro_batch,
                ring=ring,
            )

    def _saved(self, block: str, round_: Round, slot: Buffer) -> Content:
        """Returns the content that a forward leaves on the device for its backward."""
        if block in self.buffers.kept:
            # Kept activations hold views into the slot, so backward must find the block in the same
            # slot.
            return Content(ContentKind.ACTIVATIONS, number=round_.number, slot=slot)
        return Content(ContentKind.BOUNDARY, number=round_.number)

    def _loss(self, micro_batch: int, round_: Round) -> None:
        state, grad = hidden(micro_batch), self.buffers.grad(HEAD)
        slot = self.buffers.outer_slot(HEAD)
        reads = self.device.weights(HEAD, slot)
        reads[state] = state_after(self._blocks[-1], round_)
        writes = {LOSS: READY}
        if self._tied:
            reads |= self.device.weights(EMBED, slot_of(EMBED))
        if self._training:
            writes[state] = gradient_of(HEAD, round_)
            writes[grad] = Content(ContentKind.SUM, HEAD)
            if self._tied:
                writes[self.buffers.grad(EMBED)] = Content(ContentKind.SUM, EMBED)
        first = self._starts_sum(micro_batch, round_)
        self._emit(
            Loss, HEAD, reads, writes, micro_batch=micro_batch, slot=slot, grad=grad, first=first
        )

    # ------------------------------------------------------------------ backward

    def _fetch_boundaries(self, block: str, round_: Round) -> HostBoundaries:
        """Fetches the first of the block's boundaries from the host. The others are fetched one by
        one as ring buffers become free.
        """
        on_host = self._choices.host_boundaries and block not in self.buffers.kept
        boundaries = HostBoundaries(iter(round_.micro_batches if on_host else ()))
        for _ in range(max(1, self._choices.boundary_rings - 1)):
            self._fetch_boundary(block, round_, boundaries)
        return boundaries

    def _fetch_boundary(self, block: str, round_: Round, boundaries: HostBoundaries) -> None:
        micro_batch = next(boundaries.waiting, None)
        if micro_batch is None:
            return
        ring = self.buffers.next_ring(BufferKind.FETCH_RING)
        boundaries.comes_in(micro_batch, ring)
        self._emit(
            FetchBoundary,
            block,
            host_boundary(block, micro_batch, round_),
            {ring: Content(ContentKind.BOUNDARY, block, micro_batch)},
            micro_batch=micro_batch,
            ring=ring,
        )

    def _backward_unit(self, block: str, round_: Round, boundaries: HostBoundaries) -> None:
        slot, grad = self._current_use().slot, self.buffers.grad(block)
        for micro_batch in round_.micro_batches:
            state = hidden(micro_batch)
            reads = self.device.weights(block, slot)
            reads[state] = gradient_of(self._above[block], round_)
            reads |= self.device.activations_of(block)
            ring = boundaries.rings.get(micro_batch)
            if ring is not None:
                reads[ring] = Content(ContentKind.BOUNDARY, block, micro_batch)
            else:
                saved = Buffer(BufferKind.SAVED, block, micro_batch)
                reads[saved] = self._saved(block, round_, slot)
            first = self._starts_sum(micro_batch, round_)
            writes = {state: gradient_of(block, round_), grad: Content(ContentKind.SUM, block)}
            if first:
                writes |= self.device.arena_of(block)
            self._emit(
                Backward,
                block,
                reads,
                writes,
                micro_batch=micro_batch,
                slot=slot,
                grad=grad,
                first=first,
                ring=ring,
            )
            self._fetch_boundary(block, round_, boundaries)

    def _embed_backward(self, micro_batch: int, round_: Round) -> None:
        slot, grad = self.buffers.outer_slot(EMBED), self.buffers.grad(EMBED)
        reads = self.device.weights(EMBED, slot)
        reads[hidden(micro_batch)] = gradient_of(self._blocks[0], round_)
        self._emit(
            EmbedBackward,
            EMBED,
            reads,
            {grad: Content(ContentKind.SUM, EMBED)},
            micro_batch=micro_batch,
            slot=slot,
            grad=grad,
            # In a tied model the loss has begun the sum.
            first=self._starts_sum(micro_batch, round_) and not self._tied,
        )

    # ------------------------------------------------------------------ gradients

    def _starts_sum(self, micro_batch: int, round_: Round) -> bool:
        """Tells whether a backward of this micro-batch begins its unit's sum."""
        new_sum = round_.number == 0 or self._choices.gradient_sum != GradientSum.DEVICE
        return new_sum and micro_batch == round_.micro_batches[0]

    def _finish_gradient(self, unit: str, round_: Round) -> None:
        """Rounds the unit's sum and sends it to the host, after each round or after the last."""
        if self._choices.gradient_sum == GradientSum.DEVICE and not round_.is_last:
            return
        grad, staging = self.buffers.grad(unit), self.buffers.next_staging(unit)
        reads = {grad: Content(ContentKind.SUM, unit)} | self.device.arena_of(unit)
        adds = self._choices.gradient_sum == GradientSum.HOST and round_.number > 0
        if adds:
            earlier = Content(ContentKind.EARLIER_SUM, unit)
            before = host_gradient(unit, round_.number - 1)
            self._emit(FetchGrad, unit, before, {staging: earlier}, staging=staging)
            reads[staging] = earlier
        rounded = {staging: Content(ContentKind.SUM, unit)}
        writes = dict(rounded)
        if round_.is_last:
            writes[Buffer(BufferKind.NORM, unit)] = READY
        self._emit(
            Reduce,
            unit,
            reads,
            writes,
            grad=grad,
            staging=staging,
            adds=adds,
            last=round_.is_last,
        )
        stays = self.device.keep_staged(unit, staging) or self._choices.parked_gradients
        if round_.is_last and stays:
            return
        self._emit(Offload, unit, rounded, host_gradient(unit, round_.number), staging=staging)

    def _send_parked(self, unit: str, ring: Buffer) -> None:
        """Sends the parked gradient of a unit to the host, for an update there."""
        staging = self.buffers.next_staging(unit)
        content = Content(ContentKind.SUM, unit)
        # The clip factor is known first: until then, a step may turn out not to be applied.
        reads = {staging: content, SUMMARY: READY}
        self._emit(OffloadParked, unit, reads, {ring: content}, staging=staging, ring=ring)

    def _emit(self, type_: type[Op], unit: str, reads: Uses, writes: Uses, **fields: Any) -> None:
        """Writes the next op. fields: the fields specific to the op's kind."""
        self._drafts.append(Draft(type_, unit, reads, writes, fields))

"""The second of a plan's three passes writes the ops of one step in program order, with what each
reads and writes. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from engine.planning.schedule.buffers import (
    EMBED,
    HEAD,
    READY,
    Buffer,
    BufferKind,
    Content,
    ContentKind,
)
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.derive_waits import Draft
from engine.planning.schedule.ops import (
    AllGather,
    AllReduce,
    Barrier,
    Clip,
    OptimizerStep,
    Prefetch,
    Summary,
    Update,
    UpdateMoments,
)
from engine.planning.schedule.prefetch_slots import assign_slots
from engine.planning.schedule.rounds import OffloadedBlockInputs, Round
from engine.planning.schedule.step_buffers import CLIP, LOSS, SUMMARY, TOTALS, host_gradient
from engine.planning.schedule.unit_ops import UnitOps

STEP = "step"
"""Name in place of a unit of an op that concerns the whole step."""


class StepEnd(Enum):
    """A step ends with one of these ops."""

    LOSS = "loss"
    """End of a pass without gradients."""
    LOSS_AGAIN = "loss again"
    """The same after an earlier pass, which has left weights in their slots."""
    SUMMARY = "summary"
    """End of a dry run: no op writes weights or moments."""
    UPDATES = "updates"
    """End of a full training step."""


class StepWriter(UnitOps):
    """Writes the ops of one step. It can be used once.

    blocks: unit names in forward order. tied: the head or blocks also use the embed unit's weights.
    end: the kind of op that ends the step.
    """

    def __init__(
        self,
        blocks: list[str],
        tied: bool,
        choices: PlanChoices,
        sizes: PlaneSizes,
        end: StepEnd,
    ):
        training = end in (StepEnd.SUMMARY, StepEnd.UPDATES)
        super().__init__(blocks, tied, choices, sizes, training)
        self._end = end
        self.gpu_resident = self.buffers.gpu_resident_slots()
        """Units, with their slots, that live on the device."""
        self.held = self.buffers.own_slots() if end is StepEnd.LOSS_AGAIN else ()
        """Units, with their slots, that are there when the step begins."""
        there = {
            slot: unit
            for unit, slot in (*self.device.placed_units(), *self.gpu_resident, *self.held)
            if unit in self.buffers.slots
        }
        back = self.trained.blocks_back if self._training else []
        passes = [*blocks, *reversed(back)] * choices.batching.rounds
        self._uses = assign_slots(passes, self.buffers.slots, there)
        self._current = 0
        """Index in `_uses` of the block use that is written next."""
        self._barrier_passed: set[str] = set()
        """Units for which the ranks have passed the barrier in this step."""
        self._next_fetch = 0
        """Index in `_uses` before which the prefetches of all uses are written."""

    # ------------------------------------------------------------------ the step

    def write(self) -> Sequence[Draft]:
        """Returns every op of the step, in program order."""
        if self._end is StepEnd.UPDATES:
            self.disk_offloaded.read_first()
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
        rounds, count = self._choices.batching.rounds, self._choices.batching.micro_batches
        for number in range(rounds):
            micro_batches = range(number * count // rounds, (number + 1) * count // rounds)
            yield Round(number, micro_batches, is_last=number == rounds - 1)

    def _forward_pass(self, round_: Round) -> None:
        """Writes embed and every block of a round."""
        first_round = round_.number == 0
        shares = self._choices.streaming.shared_embed_and_head_slot
        # After its backward, embed is in the slot that it shares with the head.
        goes_back = self._training and self.trained.trains(EMBED)
        if (first_round or (shares and not goes_back)) and not self._is_there(EMBED):
            self._prefetch(EMBED, self.buffers.embed_or_head_slot(EMBED))
        self._fetch_ahead()
        for micro_batch in round_.micro_batches:
            self._embed(micro_batch, round_)
        for block in self._blocks:
            self._fetch_ahead()
            is_last_block = block == self._blocks[-1]
            if (first_round or shares) and is_last_block and not self._is_there(HEAD):
                # The head's weights are not prefetched earlier: the head's update comes last, and a
                # prefetch that waits for it would delay all later copies on the lane.
                self._prefetch(HEAD, self.buffers.embed_or_head_slot(HEAD))
            for micro_batch in round_.micro_batches:
                self._forward(block, micro_batch, round_)
            self._current += 1
        self._fetch_ahead()

    def _is_there(self, unit: str) -> bool:
        """Returns whether the slot of the embed or the head unit holds it when the step begins."""
        is_there = any(unit == there for there, _ in (*self.gpu_resident, *self.held))
        return is_there or self.device.placed(unit) is not None

    def _backward_pass(self, round_: Round) -> None:
        """Writes the backward of every block and of embed, and sends the gradients of all units."""
        self._finish_gradient(HEAD, round_)
        finished: set[str] = set()
        groups = self.buffers.backward_groups()
        self.on_disk.read_first([group[-1] for group in groups], round_)
        block_inputs = OffloadedBlockInputs(iter(()))
        if groups:
            block_inputs = self._fetch_block_inputs(groups[0], round_)
        for group, following in zip(groups, [*groups[1:], None]):
            self._fetch_ahead()
            is_last = following is None and self.trained.trains(EMBED)
            if is_last and self._choices.streaming.shared_embed_and_head_slot:
                # The head was there. The next round, too, finds embed in its slot.
                self._prefetch(EMBED, self.buffers.embed_or_head_slot(EMBED))
            self._backward_group(group, round_, block_inputs)
            if following is not None:
                # Block inputs are fetched before the next prefetch, which waits for a slot. In the
                # opposite order, the first backward of the next block would wait for both.
                block_inputs = self._fetch_block_inputs(following, round_)
            self._current += len(group)
            if self._choices.sharding.ranks == 1:
                self._fetch_ahead()
            for block in group:
                self._finish_gradient(block, round_)
                finished.add(block)
                if round_.is_last:
                    self.device.fetch_first(finished)
            if self._choices.sharding.ranks > 1:
                # On COLLECTIVE the accumulator is complete, and goes before weights that come from
                # the host.
                self._fetch_ahead()
        self._embed_backwards(round_)

    def _emit_summary(self) -> None:
        trained = self.trained.only(self._units())
        reads = {Buffer(BufferKind.NORM, unit): READY for unit in trained}
        reads[LOSS] = READY
        if self._choices.sharding.world_size > 1:
            self._emit(AllReduce, STEP, reads, {TOTALS: READY})
            reads = {TOTALS: READY}
        self._emit(Summary, STEP, reads, {SUMMARY: READY})

    def _emit_updates(self) -> None:
        """Writes the clip factor and the updates: those on the device first, then those of moments
        that were read from the disk ahead, and then all others.
        """
        gpu_resident = [
            (unit, slot) for unit, slot in self.gpu_resident if self.trained.trains(unit)
        ]
        for unit, slot in gpu_resident:
            self._update_in_place(unit, slot)
        self._emit(Clip, STEP, {SUMMARY: READY}, {CLIP: READY})
        self.device.write()
        self.disk_offloaded.write_first()
        elsewhere = {
            *self._choices.updates.device_updated_units,
            *self.buffers.gpu_resident,
            *self.disk_offloaded.units,
        }
        for unit in self.trained.only(self._units()):
            if unit not in elsewhere:
                self._update_on_host(unit)
                self.disk_offloaded.write_next()
        self.disk_offloaded.write_rest()
        if self._choices.updates.moments_after_weights:
            for unit in self.trained.only(self._units()):
                if unit not in elsewhere:
                    self._update_moments(unit)
        if self._choices.updates.device_updated_units or gpu_resident or self.disk_offloaded.units:
            states = {Buffer(BufferKind.STATES, unit): READY for unit, _ in gpu_resident}
            if self._choices.sharding.ranks > 1:  # the weights are gathered after the update
                for unit, slot in gpu_resident:
                    states |= self.device.weights(unit, slot)
            states |= self.disk_offloaded.states()
            self._emit(OptimizerStep, STEP, self.device.all_planes() | states, {})

    def _update_on_host(self, unit: str) -> None:
        """Writes the update of a unit whose planes are all in RAM."""
        if self._choices.gradients.gradients_on_gpu:
            self._update_kept_gradient(unit)
            return
        gradient = host_gradient(unit, self._choices.batching.rounds - 1)
        weights = {Buffer(BufferKind.WEIGHTS, unit): READY}
        after_weights = True if self._choices.updates.moments_after_weights else None
        chunk = self._own_chunk(unit)
        self._emit(
            Update,
            unit,
            {CLIP: READY} | gradient,
            weights,
            chunk=chunk,
            after_weights=after_weights,
        )

    def _update_moments(self, unit: str) -> None:
        """Writes the update of moments that goes after those of all weights."""
        gradient = host_gradient(unit, self._choices.batching.rounds - 1)
        chunk = self._own_chunk(unit)
        self._emit(UpdateMoments, unit, {CLIP: READY} | gradient, {}, chunk=chunk)

    def _own_chunk(self, unit: str) -> tuple[int, int] | None:
        """Returns the elements that this rank updates; None where it updates all of the unit."""
        return self.shards.bounds(self._numel[unit]) if self._choices.sharding.ranks > 1 else None

    def _units(self) -> list[str]:
        return [EMBED, *self._blocks, HEAD]

    # ------------------------------------------------------------------ weights

    def _fetch_ahead(self) -> None:
        """Writes the prefetches of the uses up to `prefetch_depth` ahead, in order. It stops at the
        first use whose slot is still needed.
        """
        last = min(self._current + self._choices.streaming.prefetch_depth, len(self._uses) - 1)
        while self._next_fetch <= last:
            use = self._uses[self._next_fetch]
            if use.fetch:
                uses_before = self._uses[self._current : self._next_fetch]
                if any(earlier.slot == use.slot for earlier in uses_before):
                    return
                self._prefetch(use.unit, use.slot)
            self._next_fetch += 1

    def _prefetch(self, unit: str, slot: Buffer) -> None:
        writes = self.device.weights(unit, slot) | self.buffers.fetched_over(unit)
        planes = self.device.planes(unit)
        if self._choices.sharding.ranks == 1:
            self._emit(Prefetch, unit, planes, writes, slot=slot)
            return
        if self._choices.sharding.unsharded_reads:
            self._prefetch_unsharded(unit, slot)
            return
        shard = dict.fromkeys(writes, Content(ContentKind.SHARD, unit))
        self._emit(Prefetch, unit, planes, shard, slot=slot)
        self._emit(AllGather, unit, shard, writes, slot=slot)

    def _prefetch_unsharded(self, unit: str, slot: Buffer) -> None:
        """Writes the fetch of a unit from memory that the ranks share. It is preceded by a barrier
        where ranks may still be updating the unit, which is trained. They update nothing before all
        of them have sent their norms, and so have read what they need of this step.
        """
        reads, met = self.device.planes(unit), Buffer(BufferKind.BARRIER_PASSED, unit)
        if self.trained.trains(unit):
            if unit not in self._barrier_passed:
                self._barrier_passed.add(unit)
                self._emit(Barrier, unit, reads, {met: READY})
            reads = reads | {met: READY}
        self._emit(Prefetch, unit, reads, self.device.weights(unit, slot), slot=slot, whole=True)

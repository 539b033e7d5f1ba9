"""The ops of single units are written here, with what each reads and writes.
`engine.planning.schedule.write_ops` puts them into program order. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from engine.planning.schedule.device_updates import DeviceUpdates, Places
from engine.planning.schedule.offloaded_activations import DiskOffloadedBlockInputs
from engine.planning.schedule.offloaded_updates import DiskOffloadedUpdates
from engine.planning.schedule.ops import (
    AllGather,
    Backward,
    Embed,
    EmbedBackward,
    FetchBlockInput,
    FetchGrad,
    Forward,
    Keeps,
    Loss,
    MainGrad,
    Offload,
    OffloadBlockInput,
    OffloadKeptGradient,
    Op,
    Recompute,
    Reduce,
    ReduceScatter,
    Update,
    UpdateInPlace,
)
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.schedule.rounds import (
    OffloadedBlockInputs,
    Round,
    Uses,
    gradient_of,
    offloaded_block_input,
    state_after,
)
from engine.planning.schedule.shards import Shards, cut
from engine.planning.schedule.step_buffers import (
    CLIP,
    LOSS,
    SUMMARY,
    StepBuffers,
    hidden,
    host_gradient,
)


class UnitOps:
    """Writes the ops of single units into the drafts of one step.

    blocks: unit names in forward order. tied: the head or blocks also use the embed unit's weights.
    training: the step has a backward.
    """

    def __init__(
        self,
        blocks: list[str],
        tied: bool,
        choices: PlanChoices,
        sizes: PlaneSizes,
        training: bool,
    ):
        self._blocks = blocks
        self._tied = tied
        self._choices = choices
        self._training = training
        self._above = dict(zip(blocks, [*blocks[1:], HEAD]))
        self._below = dict(zip(blocks[1:], blocks))
        self._drafts: list[Draft] = []
        self.buffers = StepBuffers(blocks, tied, choices, sizes)
        self.trained = self.buffers.trained
        self.shards = Shards(choices.sharding.ranks, sizes.rank)
        self._numel = sizes.numel
        self._embed_chunks: list[tuple[int, int] | None] = [None]
        """Chunks in which the gradient of embed is accumulated; one None for a whole."""
        if choices.streaming.embed_and_head_in_kept_gradients:
            self._embed_chunks = [*cut(sizes.numel[EMBED], sizes.embed_chunk)]
        places = Places(self.buffers.lasting_slots(), self.buffers.shared_main_grads())
        self.device = DeviceUpdates(blocks, places, choices, sizes, self._drafts)
        self.disk_offloaded = DiskOffloadedUpdates(
            blocks, self.buffers, choices, sizes, self._drafts
        )
        self.on_disk = DiskOffloadedBlockInputs(self.trained.blocks_back, choices, self._drafts)

    # ------------------------------------------------------------------ forward

    def _embed(self, micro_batch: int, round_: Round) -> None:
        slot = self.buffers.embed_or_head_slot(EMBED)
        reads = self.device.weights(EMBED, slot)
        writes = {hidden(micro_batch): state_after("", round_)}
        self._emit(Embed, EMBED, reads, writes, micro_batch=micro_batch, slot=slot)

    def _forward(self, block: str, micro_batch: int, round_: Round) -> None:
        slot = self.buffers.slots[block]
        state = hidden(micro_batch)
        reads = self.device.weights(block, slot)
        reads[state] = state_after(self._below.get(block, ""), round_)
        writes = {state: state_after(block, round_)}
        ring, keeps = None, self._keeps(block)
        if keeps == Keeps.BLOCK_INPUT and self._choices.activations.offloaded_block_inputs:
            ring = self.buffers.next_ring(BufferKind.OFFLOAD_RING)
            writes[ring] = Content(ContentKind.BLOCK_INPUT, block, micro_batch)
        elif keeps != Keeps.NOTHING:
            saved = Buffer(BufferKind.SAVED, block, micro_batch)
            writes[saved] = self._saved(block, round_)
        self._emit(
            Forward,
            block,
            reads,
            writes,
            micro_batch=micro_batch,
            slot=slot,
            ring=ring,
            keeps=keeps,
        )
        if ring is not None:
            self._offload_block_input(block, micro_batch, round_, ring)

    def _offload_block_input(
        self, block: str, micro_batch: int, round_: Round, ring: Buffer
    ) -> None:
        """Sends a block input from a ring buffer to the host, and on to the disk if it waits
        there.
        """
        block_input = Content(ContentKind.BLOCK_INPUT, block, micro_batch)
        host = self.on_disk.ring_out(block, micro_batch)
        writes = (
            offloaded_block_input(block, micro_batch, round_)
            if host is None
            else {host: block_input}
        )
        place = {"micro_batch": micro_batch, "ring": ring, "host": host}
        self._emit(OffloadBlockInput, block, {ring: block_input}, writes, **place)
        if host is not None:
            self.on_disk.write(block, micro_batch, round_, host)

    def _keeps(self, block: str) -> Keeps:
        """Returns what a forward keeps of the block."""
        if not self._training or block in self.buffers.second_of_pair:
            return Keeps.NOTHING
        if block in self.trained.forward_only:
            return Keeps.NOTHING
        return Keeps.ACTIVATIONS if block in self.buffers.kept else Keeps.BLOCK_INPUT

    def _saved(self, block: str, round_: Round) -> Content:
        """Returns the content that a forward leaves on the device for its backward."""
        if block in self.buffers.kept:
            return self._activations(block, round_)
        return Content(ContentKind.BLOCK_INPUT, number=round_.number)

    def _activations(self, block: str, round_: Round) -> Content:
        # Activations hold views into the slot, so backward must find the block in the same slot.
        slot = self.buffers.slots[block]
        return Content(ContentKind.ACTIVATIONS, number=round_.number, slot=slot)

    def _loss(self, micro_batch: int, round_: Round) -> None:
        state, grad = hidden(micro_batch), self._sum(HEAD)
        slot = self.buffers.embed_or_head_slot(HEAD)
        reads = self.device.weights(HEAD, slot)
        reads[state] = state_after(self._blocks[-1], round_)
        writes = {LOSS: READY}
        if self._tied:
            reads |= self.device.weights(EMBED, slot_of(EMBED))
        if self._training:
            writes[state] = gradient_of(HEAD, round_)
        accumulated = self.trained.only([HEAD, EMBED] if self._tied else [HEAD])
        first = self._starts_main_grad(micro_batch, round_)
        for unit in accumulated if self._training else []:
            writes[self.buffers.grad(unit)] = Content(ContentKind.MAIN_GRAD, unit)
        for unit in accumulated if first and self._training else []:
            writes |= self._begun_main_grad(unit)
        self._emit(
            Loss, HEAD, reads, writes, micro_batch=micro_batch, slot=slot, grad=grad, first=first
        )

    # ------------------------------------------------------------------ backward

    def _fetch_block_inputs(self, group: Sequence[str], round_: Round) -> OffloadedBlockInputs:
        """Fetches the first of a group's block inputs from the host. The others are fetched one by
        one as ring buffers become free. Of a group, the last block keeps block inputs.
        """
        block = group[-1]
        on_host = (
            self._choices.activations.offloaded_block_inputs and block not in self.buffers.kept
        )
        block_inputs = OffloadedBlockInputs(iter(round_.micro_batches if on_host else ()))
        for _ in range(max(1, self._choices.activations.block_input_rings - 1)):
            self._fetch_block_input(block, round_, block_inputs)
        return block_inputs

    def _fetch_block_input(
        self, block: str, round_: Round, block_inputs: OffloadedBlockInputs
    ) -> None:
        micro_batch = next(block_inputs.waiting, None)
        if micro_batch is None:
            return
        ring = self.buffers.next_ring(BufferKind.FETCH_RING)
        block_inputs.comes_in(micro_batch, ring)
        block_input = Content(ContentKind.BLOCK_INPUT, block, micro_batch)
        host = self.on_disk.ring_in(block, micro_batch)
        reads = (
            offloaded_block_input(block, micro_batch, round_)
            if host is None
            else {host: block_input}
        )
        place = {"micro_batch": micro_batch, "ring": ring, "host": host}
        self._emit(FetchBlockInput, block, reads, {ring: block_input}, **place)
        if host is not None:
            self.on_disk.read_next()

    def _backward_group(
        self, group: Sequence[str], round_: Round, block_inputs: OffloadedBlockInputs
    ) -> None:
        """Writes the backward of a block, or of two that are recomputed together."""
        *second, first = group
        for micro_batch in round_.micro_batches:
            ring = block_inputs.rings.get(micro_batch)
            if second:
                self._recompute(first, second[0], micro_batch, round_, ring)
                self._backward(second[0], micro_batch, round_)
                self._backward(first, micro_batch, round_, ring, recomputes=False)
            else:
                self._backward(first, micro_batch, round_, ring)
            self._fetch_block_input(first, round_, block_inputs)

    def _recompute(
        self, block: str, second: str, micro_batch: int, round_: Round, ring: Buffer | None
    ) -> None:
        """Writes the recompute of a block, whose output is the input of `second`."""
        slot, saved = self.buffers.slots[block], Buffer(BufferKind.SAVED, block, micro_batch)
        block_input = Content(ContentKind.BLOCK_INPUT, number=round_.number)
        reads = self.device.weights(block, slot)
        if ring is not None:
            reads[ring] = Content(ContentKind.BLOCK_INPUT, block, micro_batch)
        else:
            reads[saved] = block_input
        writes = {
            saved: self._activations(block, round_),
            Buffer(BufferKind.SAVED, second, micro_batch): block_input,
        }
        self._emit(
            Recompute,
            block,
            reads,
            writes,
            micro_batch=micro_batch,
            slot=slot,
            ring=ring,
            following=second,
        )

    def _backward(
        self,
        block: str,
        micro_batch: int,
        round_: Round,
        ring: Buffer | None = None,
        recomputes: bool | None = None,
    ) -> None:
        """Writes the backward of a block. ring: its input comes from the host through it.
        recomputes: None where that depends on what the forward has kept. What `recompute` keeps has
        a view of the ring, so this op reads the ring then, too.
        """
        slot, grad = self.buffers.slots[block], self._sum(block)
        if recomputes is None:
            recomputes = block not in self.buffers.kept
        state = hidden(micro_batch)
        reads = self.device.weights(block, slot)
        reads[state] = gradient_of(self._above[block], round_)
        if ring is not None:
            reads[ring] = Content(ContentKind.BLOCK_INPUT, block, micro_batch)
        if ring is None or not recomputes:
            saved = Buffer(BufferKind.SAVED, block, micro_batch)
            block_input = Content(ContentKind.BLOCK_INPUT, number=round_.number)
            reads[saved] = block_input if recomputes else self._activations(block, round_)
        first = self._starts_main_grad(micro_batch, round_)
        writes = {state: gradient_of(block, round_)}
        if grad is not None:
            writes[grad] = Content(ContentKind.MAIN_GRAD, block)
        if grad is not None and first:
            writes |= self._begun_main_grad(block)
        self._emit(
            Backward,
            block,
            reads,
            writes,
            micro_batch=micro_batch,
            slot=slot,
            grad=grad,
            first=first,
            ring=ring if recomputes else None,
            recomputes=recomputes,
        )

    def _embed_backwards(self, round_: Round) -> None:
        """Writes the backward of embed, chunk by chunk where its accumulator is, and rounds the
        accumulator.
        """
        if not self.trained.trains(EMBED):
            return
        for number, chunk in enumerate(self._embed_chunks):
            for micro_batch in round_.micro_batches:
                self._embed_backward(micro_batch, round_, number)
            if chunk is None:
                self._finish_gradient(EMBED, round_)
            else:
                self._finish_rows(number, round_)

    def _embed_backward(self, micro_batch: int, round_: Round, number: int) -> None:
        slot, grad = self.buffers.embed_or_head_slot(EMBED), self.buffers.grad(EMBED)
        state, chunk = hidden(micro_batch), self._embed_chunks[number]
        looked_up = gradient_of(EMBED, round_)
        writes = {grad: self._main_grad_of_rows(number)}
        if number == 0:
            reads = self.device.weights(EMBED, slot)
            reads[state] = gradient_of(self._blocks[0], round_)
            if chunk is not None:
                writes[state] = looked_up
        else:
            reads = {state: looked_up}
        # In a tied model the loss has begun the accumulator.
        first = self._starts_main_grad(micro_batch, round_) and not self._tied
        if first:
            writes |= self._begun_main_grad(EMBED)
        self._emit(
            EmbedBackward,
            EMBED,
            reads,
            writes,
            micro_batch=micro_batch,
            slot=slot,
            grad=grad,
            first=first,
            chunk=chunk,
        )

    def _main_grad_of_rows(self, number: int) -> Content:
        """Returns the sum of a chunk of embed, or of the whole unit."""
        whole = self._embed_chunks[number] is None
        return Content(ContentKind.MAIN_GRAD, EMBED, chunk=None if whole else number)

    def _finish_rows(self, number: int, round_: Round) -> None:
        """Rounds the sum of a chunk of embed into its part of the kept gradient."""
        grad, staging = self.buffers.grad(EMBED), self.buffers.next_staging(EMBED)
        norm = Buffer(BufferKind.NORM, EMBED)
        reads = {grad: self._main_grad_of_rows(number)} | self.device.arena_of(EMBED)
        writes = {staging: self._main_grad_of_rows(number), norm: READY}
        if number > 0:
            reads |= {staging: self._main_grad_of_rows(number - 1), norm: READY}
        if number == len(self._embed_chunks) - 1:
            writes[staging] = Content(ContentKind.MAIN_GRAD, EMBED)
            self.device.keep_staged(EMBED, staging)
        self._emit(
            Reduce,
            EMBED,
            reads,
            writes | self.buffers.kept_gradient_over(EMBED),
            grad=grad,
            staging=staging,
            adds=False,
            last=round_.is_last,
            chunk=self._embed_chunks[number],
        )

    # ------------------------------------------------------------------ gradients

    def _sum(self, unit: str) -> Buffer | None:
        """Returns the buffer of the unit's accumulator; None where there is none."""
        return self.buffers.grad(unit) if self.trained.trains(unit) else None

    def _starts_main_grad(self, micro_batch: int, round_: Round) -> bool:
        """Returns whether a backward of this micro-batch begins its unit's accumulator."""
        is_first = round_.number == 0 or self._choices.gradients.main_grad != MainGrad.DEVICE
        return is_first and micro_batch == round_.micro_batches[0]

    def _begun_main_grad(self, unit: str) -> Uses:
        """Returns the memory that a new sum of the unit takes from others."""
        return self.device.arena_of(unit) | self.buffers.begun_main_grad(unit)

    def _finish_gradient(self, unit: str, round_: Round) -> None:
        """Rounds the unit's accumulator and sends it to the host, after each round or after the
        last.
        """
        is_early = self._choices.gradients.main_grad == MainGrad.DEVICE and not round_.is_last
        if is_early or not self.trained.trains(unit):
            return
        if self._choices.sharding.world_size > 1:
            self._scatter(unit, round_)
            return
        grad, staging = self.buffers.grad(unit), self.buffers.next_staging(unit)
        reads = {grad: Content(ContentKind.MAIN_GRAD, unit)} | self.device.arena_of(unit)
        adds = self._choices.gradients.main_grad == MainGrad.HOST and round_.number > 0
        if adds:
            earlier = Content(ContentKind.EARLIER_MAIN_GRAD, unit)
            before = host_gradient(unit, round_.number - 1)
            self._emit(FetchGrad, unit, before, {staging: earlier}, staging=staging)
            reads[staging] = earlier
        writes = {staging: Content(ContentKind.MAIN_GRAD, unit)} | self.buffers.kept_gradient_over(
            unit
        )
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
        self._offload(unit, staging, round_)

    def _scatter(self, unit: str, round_: Round) -> None:
        """Adds the accumulators of all ranks on all nodes, and after the last round rounds this
        rank's shard and sends it to the host. What is left in the accumulator is no sum of any
        rank.
        """
        grad, staging, total = self.buffers.grad(unit), None, self.buffers.main_grad_shard(unit)
        reads = {grad: Content(ContentKind.MAIN_GRAD, unit)} | self.device.arena_of(unit)
        writes = {grad: Content(ContentKind.SHARD, unit)}
        if total is not None and round_.number > 0:
            reads[total] = Content(ContentKind.MAIN_GRAD, unit, round_.number - 1)
        if round_.is_last:
            staging = self.buffers.next_staging(unit)
            writes[staging] = Content(ContentKind.MAIN_GRAD, unit)
            writes[Buffer(BufferKind.NORM, unit)] = READY
        elif total is not None:
            writes[total] = Content(ContentKind.MAIN_GRAD, unit, round_.number)
        first = None if total is None else round_.number == 0
        own = {"grad": grad, "staging": staging, "total": total, "first": first}
        self._emit(ReduceScatter, unit, reads, writes, **own)
        if staging is not None:
            self._offload(unit, staging, round_)

    def _offload(self, unit: str, staging: Buffer, round_: Round) -> None:
        """Sends a rounded gradient to the host, unless it waits on the device for its update."""
        waits = self._choices.gradients.gradients_on_gpu or unit in self.buffers.gpu_resident
        stays = self.device.keep_staged(unit, staging) or waits
        if round_.is_last and stays:
            return
        rounded = {staging: Content(ContentKind.MAIN_GRAD, unit)}
        self._emit(Offload, unit, rounded, host_gradient(unit, round_.number), staging=staging)

    def _update_in_place(self, unit: str, slot: Buffer) -> None:
        """Writes the update of a unit that lives on the device."""
        staging = self.buffers.next_staging(unit)
        states = {Buffer(BufferKind.STATES, unit): READY}
        weights = self.device.weights(unit, slot)
        reads = {staging: Content(ContentKind.MAIN_GRAD, unit), SUMMARY: READY} | states | weights
        if self._choices.sharding.ranks == 1:
            self._emit(UpdateInPlace, unit, reads, states | weights, slot=slot, staging=staging)
            return
        shard = dict.fromkeys(weights, Content(ContentKind.SHARD, unit))
        self._emit(UpdateInPlace, unit, reads, states | shard, slot=slot, staging=staging)
        self._emit(AllGather, unit, shard, weights, slot=slot)

    def _update_kept_gradient(self, unit: str) -> None:
        """Sends the kept gradient of a unit to the host chunk by chunk, each for an update
        there.
        """
        staging = self.buffers.next_staging(unit)
        # The clip factor is known first: until then, a step may turn out not to be applied.
        reads = {staging: Content(ContentKind.MAIN_GRAD, unit), SUMMARY: READY}
        weights = {Buffer(BufferKind.WEIGHTS, unit): READY}
        for number, chunk in enumerate(self.device.kept_gradient_chunks(unit)):
            ring = self.buffers.next_gradient_ring()
            gradient = {ring: Content(ContentKind.MAIN_GRAD, unit, chunk=number)}
            place = {"ring": ring, "chunk": chunk}
            self._emit(OffloadKeptGradient, unit, reads, gradient, staging=staging, **place)
            self._emit(Update, unit, {CLIP: READY} | gradient, weights, **place)

    def _emit(self, type_: type[Op], unit: str, reads: Uses, writes: Uses, **fields: Any) -> None:
        """Writes the next op. fields: the fields specific to the op's kind."""
        self._drafts.append(Draft(type_, unit, reads, writes, fields))

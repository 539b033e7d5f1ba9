"""`DeviceUpdates` writes the part of a step in which optimizers run on the device, on states that
are streamed there and back. No torch.

- A unit's planes travel in chunks: each chunk is fetched into an update buffer on STATES IN,
  updated there on UPDATE and sent back on STATES OUT. Each lane takes the chunks in the order in
  which the next forward pass needs the weights.
- The first chunks, one for each buffer, are fetched before the gradients are complete.
- Between two steps most of the device's memory is idle. The buffers therefore reuse the memory of
  fp32 accumulators, which are not needed between the end of a step and the first backward of the
  next.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.planning.schedule.arena import Arena, lay_out_arena
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
    DeviceUpdate,
    FetchGradient,
    FetchStates,
    OfChunk,
    OffloadStates,
    OffloadWeights,
)
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.schedule.shards import Shards, cut_between, largest_updated
from engine.planning.schedule.step_buffers import SUMMARY, host_gradient

Chunk = tuple[str, int]
"""Unit of a chunk, and its number within the unit."""

LEAD = 2
"""Number of chunks whose states are sent from their buffers before the weights of the first chunk
that is then fetched into one of these buffers.
"""

_ITEM_BYTES = 14


@dataclass(frozen=True)
class Places:
    """Where weights and accumulators are on the device when a step ends."""

    slots: dict[str, Buffer]
    """Blocks that are still in a slot, which is private or shared."""
    main_grads: dict[Buffer, tuple[str, ...]]
    """Units whose accumulators may share their memory with update buffers, by accumulator, in the
    order in which these follow each other in memory.
    """


class DeviceUpdates:
    """Writes the ops of units whose optimizer runs on the device, into `drafts`.

    blocks: all blocks, in forward order. places: where the blocks are, and their accumulators.
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
        self._units = frozenset(choices.updates.device_updated_units)
        """Units whose optimizers run on the device."""
        embed_and_head = {EMBED: slot_of(EMBED), HEAD: slot_of(HEAD)}
        self._slots = (
            places.slots
            if choices.streaming.shared_embed_and_head_slot
            else {**embed_and_head, **places.slots}
        )
        self._shards = Shards(choices.sharding.ranks, sizes.rank)
        if choices.sharding.ranks > 1:
            self._slots = {}  # the other ranks need the updated weights, too
        self._numel = sizes.numel
        self.chunk_numel = self.ring_numel = 0
        self.buffers: list[Buffer] = []
        if choices.gradients.gradients_on_gpu:
            self.ring_numel = sizes.ring_numel or self._largest_shard(blocks)
        if self._units:
            self.chunk_numel = sizes.chunk_numel or self._largest_shard(blocks)
            self.buffers = [
                Buffer(BufferKind.UPDATE, number=number)
                for number in range(choices.updates.update_buffers)
            ]
        self._bounds = {
            unit: cut_between(*self._shards.bounds(sizes.numel[unit]), self.chunk_numel)
            for unit in choices.updates.device_updated_units
        }
        self._slot_parts = {
            slot: _parts(slot, len(self._bounds[unit])) for unit, slot in self.placed_units()
        }
        """Parts of each slot in which a unit is updated, one for each of its chunks."""
        self._chunks = self._chunks_in_order(blocks)
        self._buffer = dict(zip(self._chunks, itertools.cycle(self.buffers)))
        # The gradients of these units are not overwritten in the staging buffers before the step
        # ends.
        elsewhere = {*choices.placement.gpu_resident(blocks), *sizes.frozen}
        streamed = [block for block in blocks if block not in elsewhere]
        self._may_stay_staged = frozenset((EMBED, *streamed[:2]))
        if choices.gradients.gradients_on_gpu:
            self._may_stay_staged = self._units
        self._staging: dict[str, Buffer] = {}
        """Staging buffer in which the complete gradient of a unit stays, by unit."""
        self._main_grads_of: dict[Buffer, list[str]] = {}
        """Units whose accumulators share memory with each buffer."""
        self.main_grads = tuple(places.main_grads) if self._units else ()
        """Accumulators in the arena."""
        self.arena = self._lay_over_main_grads(places.main_grads, sizes) if self._units else None
        # What was written so far.
        self._fetched: set[Chunk] = set()
        self._with_gradient: set[Chunk] = set()

    def _largest_shard(self, blocks: list[str]) -> int:
        """Returns the elements of the largest shard of any block, or of embed and head where no
        block is trained.
        """
        numel = self._numel
        largest = largest_updated([numel[block] for block in blocks], (numel[EMBED], numel[HEAD]))
        return self._shards.numel(largest)

    def _chunks_in_order(self, blocks: list[str]) -> list[Chunk]:
        """Returns the chunks of all units, in the order of the next forward pass."""
        chunks: list[Chunk] = []
        for unit in (EMBED, *blocks, HEAD):
            if unit in self._units:
                chunks += [(unit, number) for number in range(len(self._bounds[unit]))]
        return chunks

    def _lay_over_main_grads(
        self, main_grads: Mapping[Buffer, tuple[str, ...]], sizes: PlaneSizes
    ) -> Arena:
        """Returns where accumulators and buffers are in the memory that they share, and notes which
        of them use the same.
        """
        size = sizes.buffer_bytes or _ITEM_BYTES * self.chunk_numel
        numel = dict(sizes.numel)
        if self._choices.streaming.embed_and_head_in_kept_gradients:
            numel[EMBED] = sizes.embed_chunk
        largest = [
            self._shards.padded(max(map(numel.__getitem__, units))) for units in main_grads.values()
        ]
        main_grad_bytes = [4 * numel for numel in largest]
        main_grad = self._choices.gradients.main_grad
        arena = lay_out_arena(main_grad_bytes, size, len(self.buffers), main_grad)
        users = list(main_grads.values())
        for number, buffer in enumerate(self.buffers):
            there = [users[at] for at in arena.main_grads_under(number)]
            self._main_grads_of[buffer] = list(itertools.chain.from_iterable(there))
        return arena

    # ------------------------------------------------------------------ what other ops must know

    def kept_gradient_chunks(self, unit: str) -> list[tuple[int, int]]:
        """Returns where each chunk of the unit's kept gradient begins and ends, in elements."""
        return cut_between(*self._shards.bounds(self._numel[unit]), self.ring_numel)

    def placed(self, unit: str) -> Buffer | None:
        """Returns the slot that the unit is still in when the step ends, and in which it is
        therefore updated. Returns None where the unit is in no slot then, or its optimizer runs on
        the host.
        """
        return self._slots.get(unit) if unit in self._units else None

    def placed_units(self) -> tuple[tuple[str, Buffer], ...]:
        """Returns the units that are updated in a slot, each with its slot."""
        slots = [(unit, self.placed(unit)) for unit in self._choices.updates.device_updated_units]
        return tuple((unit, slot) for unit, slot in slots if slot is not None)

    def planes(self, unit: str) -> dict[Buffer, Content]:
        """Returns the buffers of the unit's weights on the host: one, or one for each chunk where
        the optimizer runs on the device and sends the weights back chunk by chunk.
        """
        if unit not in self._units:
            return {Buffer(BufferKind.WEIGHTS, unit): READY}
        chunks = range(len(self._bounds[unit]))
        return {Buffer(BufferKind.WEIGHTS, unit, chunk=number): READY for number in chunks}

    def weights(self, unit: str, slot: Buffer) -> dict[Buffer, Content]:
        """Returns the weights of a unit in a slot. The slot consists of parts where some unit is
        updated in it chunk by chunk, and other units of the slot then use all these parts.
        """
        content = Content(ContentKind.WEIGHTS, unit)
        return dict.fromkeys(self._slot_parts.get(slot, (slot,)), content)

    def arena_of(self, unit: str) -> dict[Buffer, Content]:
        """Returns the parts of the arena that the accumulator of a unit uses, with accumulators as
        their content.
        """
        return {
            _arena(buffer): Content(ContentKind.MAIN_GRAD)
            for buffer, units in self._main_grads_of.items()
            if unit in units
        }

    def all_planes(self) -> dict[Buffer, Content]:
        """Returns the planes that are ready when all chunks are applied."""
        planes = {}
        for unit, number in self._chunks:
            planes[Buffer(BufferKind.WEIGHTS, unit, chunk=number)] = READY
            planes[Buffer(BufferKind.STATES, unit, chunk=number)] = READY
        return planes

    def keep_staged(self, unit: str, staging: Buffer) -> bool:
        """Returns whether the unit's complete gradient stays in the staging buffer. The optimizer
        reads it there, so the gradient need not leave the device.
        """
        if unit in self._units and unit in self._may_stay_staged:
            self._staging[unit] = staging
            return True
        return False

    # ------------------------------------------------------------------ during backward

    def fetch_first(self, finished: Collection[str]) -> None:
        """Fetches chunks into the buffers that are free. finished: blocks whose gradients are
        complete.
        """
        for chunk in self._chunks[: len(self.buffers)]:
            if chunk not in self._fetched:
                if not set(self._main_grads_of.get(self._buffer[chunk], ())) <= set(finished):
                    return
                self._fetch(chunk)
            if chunk not in self._with_gradient and chunk[0] in finished:
                self._fetch_gradient(chunk)

    # ------------------------------------------------------------------ after the summary

    def write(self) -> None:
        """Updates all chunks, sends them back, and fetches the chunks that are missing.

        A late chunk, one that was not among the first to be fetched, waits for the buffer of an
        earlier chunk. So the chunks in those buffers are sent first. The weights of a late chunk
        are sent before states that no fetch waits for, but after the states of `LEAD` chunks, which
        are sent while the late chunk is being fetched. Chunks that nothing waits for are sent last.
        """
        first, late = self._chunks[: len(self.buffers)], self._chunks[len(self.buffers) :]
        for chunk in first:
            self._update(chunk)
        for chunk in first:
            self._send_weights_if_fetched(chunk)
        awaited = min(len(first), len(late))
        lead = min(LEAD, len(self.buffers))
        updated = 0  # late chunks that were fetched and updated
        for sent, chunk in enumerate(self._chunks, 1):
            self._send_rest(chunk)
            free = sent if sent >= awaited else sent - lead + 1
            for following in late[updated : max(updated, free)]:
                self._update(following)
                self._send_weights_if_fetched(following)
                updated += 1

    def _update(self, chunk: Chunk) -> None:
        """Writes the update of a chunk, preceded by its fetches that are still missing."""
        (unit, number), buffer = chunk, self._buffer[chunk]
        if chunk not in self._fetched:
            self._fetch(chunk)
        if chunk not in self._with_gradient:
            self._fetch_gradient(chunk)
        reads = {buffer: Content(ContentKind.FETCHED, unit, chunk=number), SUMMARY: READY}
        staging = self._staging.get(unit)
        if staging is not None:
            reads[staging] = Content(ContentKind.MAIN_GRAD, unit)
        else:
            reads[_gradient_in(buffer)] = Content(ContentKind.MAIN_GRAD, unit, chunk=number)
        writes = {buffer: Content(ContentKind.UPDATED, unit, chunk=number)}
        slot = self.placed(unit)
        if slot is not None:
            part = _parts(slot, len(self._bounds[unit]))[number]
            writes[part] = Content(ContentKind.WEIGHTS, unit)
        self._emit(DeviceUpdate, chunk, reads, writes, staging=staging, slot=slot)

    def _send_weights_if_fetched(self, chunk: Chunk) -> None:
        """Sends the weights of a chunk at once if the next forward pass fetches them from the host.
        No prefetch waits for the weights of a unit that is updated in its slot.
        """
        if self.placed(chunk[0]) is None:
            self._send(OffloadWeights, chunk, BufferKind.WEIGHTS)

    def _send_rest(self, chunk: Chunk) -> None:
        """Sends the parts of a chunk that have not been sent yet."""
        if self.placed(chunk[0]) is not None:
            self._send(OffloadWeights, chunk, BufferKind.WEIGHTS)
        self._send(OffloadStates, chunk, BufferKind.STATES)

    # ------------------------------------------------------------------ single ops

    def _fetch(self, chunk: Chunk) -> None:
        (unit, number), buffer = chunk, self._buffer[chunk]
        self._fetched.add(chunk)
        reads = {
            Buffer(BufferKind.WEIGHTS, unit, chunk=number): READY,
            Buffer(BufferKind.STATES, unit, chunk=number): READY,
        }
        writes = {buffer: Content(ContentKind.FETCHED, unit, chunk=number)}
        writes |= self._states_in_arena(buffer)
        self._emit(FetchStates, chunk, reads, writes)

    def _fetch_gradient(self, chunk: Chunk) -> None:
        (unit, number), buffer = chunk, self._buffer[chunk]
        self._with_gradient.add(chunk)
        if unit in self._staging:
            return
        reads = host_gradient(unit, self._choices.batching.rounds - 1)
        writes = {_gradient_in(buffer): Content(ContentKind.MAIN_GRAD, unit, chunk=number)}
        self._emit(FetchGradient, chunk, reads, writes)

    def _send(self, type_: type[OfChunk], chunk: Chunk, kind: BufferKind) -> None:
        (unit, number), buffer = chunk, self._buffer[chunk]
        reads = {buffer: Content(ContentKind.UPDATED, unit, chunk=number)}
        reads |= self._states_in_arena(buffer)
        self._emit(type_, chunk, reads, {Buffer(kind, unit, chunk=number): READY})

    def _states_in_arena(self, buffer: Buffer) -> dict[Buffer, Content]:
        """Returns the buffer's part of the arena, with states as its content."""
        return (
            {_arena(buffer): Content(ContentKind.STATES)} if self._main_grads_of.get(buffer) else {}
        )

    def _emit(
        self,
        type_: type[OfChunk],
        chunk: Chunk,
        reads: dict[Buffer, Content],
        writes: dict[Buffer, Content],
        **fields: Any,
    ) -> None:
        """Writes the next op. fields: the fields specific to the op's kind."""
        unit, number = chunk
        fields = {"chunk": self._bounds[unit][number], "buffer": self._buffer[chunk], **fields}
        self._drafts.append(Draft(type_, unit, reads, writes, fields))


def _parts(slot: Buffer, chunks: int) -> list[Buffer]:
    """Returns the parts of a slot that the chunks of its unit are written to."""
    return [slot] if chunks == 1 else [slot.part(number) for number in range(chunks)]


def _arena(buffer: Buffer) -> Buffer:
    """Returns the part of the arena that an update buffer occupies."""
    return Buffer(BufferKind.ARENA, number=buffer.number)


def _gradient_in(buffer: Buffer) -> Buffer:
    """Returns the part of an update buffer that a gradient is fetched to."""
    return Buffer(BufferKind.UPDATE_GRADIENT, number=buffer.number)

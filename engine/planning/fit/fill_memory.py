"""A `MemoryFiller` finds how a batch split can use the device's memory: as little as the settings
allow, or as well as it can. Pure arithmetic, no torch.

The memory that remains is used in this order:

1. The fp32 accumulators of all rounds stay on the device.
2. Block inputs stay on the device if they fit there. If the host has space for them too, a second
   try keeps them on the host, which leaves more device memory for the other items.
3. Units come to live on the device: none, as many as fit, as many as fit beside the activations of
   all blocks, and four numbers between.
4. Update buffers are reserved for optimizers on the device. Several numbers of buffers are tried.
5. As many blocks as fit keep their activations.
6. As many blocks as fit stay in their slots.

Each way to do so is a candidate, which the planner compares with all others (`choose`).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.config.settings import AUTO
from engine.planning.fit.batch_splits import BatchSplit
from engine.planning.fit.buffer_sizes import (
    disk_offloaded_bytes,
    disk_offloaded_input_bytes,
    saved_input_count,
    state_bytes,
)
from engine.planning.fit.device_memory import Sizer
from engine.planning.layout.update_buffers import small_chunks
from engine.planning.schedule.buffers import HEAD
from engine.planning.schedule.choices import EmbedAndHead, PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.shards import Shards

UPDATE_BUFFERS = (2, 4, 8)
"""Numbers of update buffers for whole blocks that are tried, besides as many as fit over the fp32
accumulators. Small chunks are tried where they take no memory of their own.
"""
ON_HOST = ("offload", "offload_pairs")
"""Values of `engine.activation_checkpointing` with which block inputs are in RAM."""


class Candidate(NamedTuple):
    """A candidate is a way to run a step. `size` is the rows of a micro-batch."""

    size: int
    choices: PlanChoices

    @property
    def split_key(self) -> tuple[int, int]:
        """The micro-batch size and the rounds, which identify the batch split of a candidate."""
        return self.size, self.choices.batching.rounds


class MemoryFiller:
    """Fills the device's memory for the batch splits of one job.

    free_host_bytes: bytes of RAM beside the states of all units and the program; negative where
    these alone do not fit.
    coarse: fewer candidates are tried. family: all candidates keep gradients, embed and head, and
    block inputs of pairs as it does; with several rounds, embed and head are not in kept gradients
    but share a slot. Its slots are the fewest, unless the settings say how many. disk_bytes: bytes
    of the disk that moments and block inputs which do not fit in RAM may take.
    """

    def __init__(
        self,
        sizer: Sizer,
        free_host_bytes: int,
        coarse: bool,
        family: PlanChoices,
        disk_bytes: int = 0,
    ):
        self._family = family
        self._has_one_rank = sizer.job.world_size == 1
        may_be_gpu_resident = self._has_one_rank or not sizer.shape.has_fp32_weights
        self._allows_gpu_resident = may_be_gpu_resident and sizer.job.config.engine.states == AUTO
        self._disk_bytes = disk_bytes
        self.sizer = sizer
        self._engine = sizer.job.config.engine
        self._rounding = sizer.job.rounding
        self._free_host_bytes = free_host_bytes
        self._coarse = coarse
        blocks = len(sizer.shape.blocks)
        self._device_only = sizer.shape.device_only(sizer.device)
        self._counts: Sequence[int] = range(blocks, -1, -1)
        """Numbers of blocks without recompute or kept in slots that are tried."""
        if sizer.device == "cpu":
            self._counts = (blocks, 0)

    def minimum_memory(self, batch_split: BatchSplit) -> Candidate:
        """Returns the candidate that takes the least device memory that the settings allow."""
        engine = self._engine
        slots = self._family.streaming.slots
        if engine.slots != AUTO:
            slots = max(engine.slots, self._least_slots)
        resident = 0 if engine.blocks_kept_in_slots == AUTO else engine.blocks_kept_in_slots
        kept = 0
        if engine.activation_checkpointing == "none":
            kept = min(resident or 1, self.sizer.most_without_recompute)
        can_go_to_host = (
            engine.activation_checkpointing in (AUTO, "none") and self.sizer.device == "cuda"
        )
        choices = self._family.changed(
            micro_batches=batch_split.micro_batches,
            rounds=batch_split.rounds,
            slots=slots,
            prefetch_depth=max(1, slots - 1),
            blocks_kept_in_slots=resident,
            blocks_without_recompute=kept,
            offloaded_block_inputs=engine.activation_checkpointing in ON_HOST or can_go_to_host,
            main_grad=self._minimum_main_grad(batch_split.rounds),
            compiled=self.sizer.compiled,
            tile_tokens=self.sizer.tile_tokens,
            # On long rows, the copy of a block input takes a hundredth of the time of its block.
            block_input_rings=1
            if self.sizer.tile_tokens
            else self._family.activations.block_input_rings,
        )
        choices = self._with_device_only(choices)
        in_kept_gradients = choices.streaming.embed_and_head_in_kept_gradients
        if in_kept_gradients and choices.gradients.main_grad != MainGrad.VERTICAL:
            choices = choices.changed(embed_and_head=EmbedAndHead.SHARED_SLOT)
        return Candidate(batch_split.size, choices)

    def filled(self, minimum: Candidate, host_bytes: float = math.inf) -> Iterator[Candidate]:
        """Yields the candidates that use the memory that `minimum` leaves. host_bytes: most bytes
        of RAM that they take beside block inputs.
        """
        if self._disk_bytes:  # what does not fit goes to the disk
            host_bytes = math.inf
        for start in self._main_grad_places(minimum):
            if self._least_host_bytes(start) > host_bytes:
                continue
            for place in self._block_input_places(start):
                for gpu_resident in self._gpu_resident(place):
                    if self._without_block_inputs(gpu_resident) > host_bytes:
                        continue
                    size, choices = gpu_resident
                    for with_buffers in self._with_update_buffers(choices):
                        if self.sizer.fits(size, with_buffers):
                            yield Candidate(size, self._with_blocks(size, with_buffers))

    @property
    def _least_slots(self) -> int:
        """Fewest slots: two for blocks that are recomputed in pairs, else one."""
        return self._family.activations.blocks_per_saved_input

    def host_bytes(self, candidate: Candidate) -> int:
        """Returns the bytes that a candidate takes on the host beyond the planes of all units: its
        block inputs, without the planes of units that live on the device and the moments that are
        on the disk.
        """
        block_inputs, choices = self.sizer.block_input_bytes(*candidate), candidate.choices
        if not (choices.placement.gpu_resident_units or choices.placement.disk_offloaded_units):
            return block_inputs
        shape = self.sizer.shape
        here = state_bytes(shape, candidate.choices.changed(device_updated_units=()))
        return block_inputs + here - self._family_state_bytes

    @functools.cached_property
    def _family_state_bytes(self) -> int:
        return state_bytes(self.sizer.shape, self._family)

    def _without_block_inputs(self, candidate: Candidate) -> int:
        """Returns what `host_bytes` would be without block inputs on the host."""
        size, choices = candidate
        return self.host_bytes(Candidate(size, choices.changed(offloaded_block_inputs=False)))

    def _least_host_bytes(self, start: Candidate) -> int:
        """Returns a lower bound of `host_bytes`, for all candidates that use the memory that
        `start` leaves: as many units as fit live on the device, and no block input is on the host.
        """
        size, choices = start
        if self._may_be_gpu_resident(choices):
            most = self._most_gpu_resident(size, choices)
            choices = self._gpu_resident_choices(choices, most)
        return self._without_block_inputs(Candidate(size, choices))

    def offloaded_to_disk(self, candidate: Candidate) -> Candidate:
        """Returns the first of the candidate's `disk_offload_candidates`."""
        return self.disk_offload_candidates(candidate)[0]

    def disk_offload_candidates(self, candidate: Candidate) -> list[Candidate]:
        """Returns the candidates that keep so little on the disk that the rest just fits in RAM:
        block inputs alone, and moments alone; where neither is enough, all block inputs and some
        moments. If the disk has no room for them, or RAM is still too short, nothing goes there.
        """
        lack = self.host_bytes(candidate) - self._free_host_bytes
        if not self._disk_bytes or candidate.choices.updates.device_updated_units or lack <= 0:
            return [candidate]
        block_inputs = self._disk_offloaded_block_inputs(candidate, lack)
        found = [block_inputs, self._disk_offloaded_moments(candidate)]
        if not any(found):
            found = [self._disk_offloaded_moments(self._without_block_inputs_in_ram(candidate))]
        return [candidate for candidate in found if candidate is not None] or [candidate]

    def _disk_offloaded_block_inputs(self, candidate: Candidate, lack: int) -> Candidate | None:
        """Returns the candidate with as few block inputs on the disk as free `lack` bytes of RAM;
        None where all of them are not enough, or the disk has no room for them.
        """
        size, choices = candidate
        most = self._without_block_inputs_in_ram(
            candidate
        ).choices.activations.disk_offloaded_block_inputs
        enough = self.sizer.block_input_bytes(*candidate) - lack

        def offloading(count: int) -> Candidate:
            return Candidate(size, choices.changed(disk_offloaded_block_inputs=count))

        def fits(count: int) -> bool:
            return self.sizer.block_input_bytes(*offloading(count)) <= enough

        count = bisect_left(range(most + 1), True, key=fits)
        found = offloading(count)
        return (
            found
            if count <= most and self._disk_offloaded_bytes(found) <= self._disk_bytes
            else None
        )

    def _disk_offloaded_moments(self, candidate: Candidate) -> Candidate | None:
        """Returns the candidate with the moments of as few units on the disk as make the rest fit
        in RAM; None where those of all are not enough, or the disk has no room for them.
        """
        size, choices = candidate.size, candidate.choices.changed(gpu_resident_apart=False)
        most = len(self.sizer.shape.units) - choices.placement.gpu_resident_units
        for count in range(most + 1):
            found = Candidate(size, choices.changed(disk_offloaded_units=count))
            if self._disk_offloaded_bytes(found) > self._disk_bytes:
                return None
            if self.host_bytes(found) <= self._free_host_bytes:
                return found
        return None

    def _without_block_inputs_in_ram(self, candidate: Candidate) -> Candidate:
        """Returns the candidate with all block inputs of the host on the disk."""
        size, choices = candidate
        count = 0
        if choices.activations.offloaded_block_inputs:
            of_one = saved_input_count(self.sizer.shape, choices)
            count = of_one * choices.batching.micro_batches
        return Candidate(size, choices.changed(disk_offloaded_block_inputs=count))

    def _disk_offloaded_bytes(self, candidate: Candidate) -> int:
        """Returns the bytes that a candidate takes of the disk."""
        shape, tokens = self.sizer.shape, candidate.size * self.sizer.row_length
        block_inputs = disk_offloaded_input_bytes(shape, candidate.choices, tokens)
        return block_inputs + disk_offloaded_bytes(shape, candidate.choices)

    def _gpu_resident(self, place: Candidate) -> list[Candidate]:
        """Returns the candidate with no unit on the device, and with several numbers of them."""
        size, choices = place
        if not self._may_be_gpu_resident(choices):
            return [place]
        if choices.placement.gpu_resident_apart and self._engine.slots == AUTO:
            # While a block computes that lives there, the bus fills one slot more.
            choices = choices.changed(
                slots=1 + choices.streaming.slots, prefetch_depth=choices.streaming.slots
            )
        fits = self._most_gpu_resident(size, choices)
        beside = min(
            fits, self._most_gpu_resident(size, self._with_blocks_without_recompute(size, choices))
        )
        numbers = {beside, fits}
        if not self._coarse:
            shares = (beside + (fits - beside) * share // 4 for share in (1, 2, 3))
            numbers |= {beside // 2, *shares}
        living = [self._gpu_resident_choices(choices, count) for count in sorted(numbers - {0})]
        return [place, *(Candidate(size, each) for each in living)]

    def gpu_resident_candidates(self, minimum: Candidate) -> list[Candidate]:
        """Returns the candidate with each number of units that fit on the device, from one on."""
        size, choices = minimum
        if not self._may_be_gpu_resident(choices):
            return []
        most = self._most_gpu_resident(size, choices)
        in_ram = choices.changed(disk_offloaded_units=0, disk_offloaded_block_inputs=0)
        counts = range(1, most + 1)
        found = [Candidate(size, self._gpu_resident_choices(in_ram, count)) for count in counts]
        return [self.offloaded_to_disk(candidate) for candidate in found]

    def _most_gpu_resident(self, size: int, choices: PlanChoices) -> int:
        """Returns how many units fit on the device beside these choices."""
        kept, most = self._engine.blocks_kept_in_slots, len(self.sizer.shape.units)
        if kept != AUTO and kept > 0:
            most -= 1 + kept

        def fits(count: int) -> bool:
            return self.sizer.fits(size, self._gpu_resident_choices(choices, count))

        for count in (most, most - 1):  # with all blocks, no update buffer may be needed
            if count > 0 and fits(count):
                return count
        counts = range(most, -1, -1)
        first = bisect_left(counts, True, key=fits)
        return counts[first] if first < len(counts) else 0

    def _gpu_resident_choices(self, choices: PlanChoices, count: int) -> PlanChoices:
        """Returns the choices with so many units on the device."""
        return self._with_device_only(choices.changed(gpu_resident_units=count))

    def _with_device_only(self, choices: PlanChoices) -> PlanChoices:
        """Returns the choices with one update buffer where the device must update units that do
        not live there.
        """
        if not self._device_only:
            return choices
        blocks = [unit.name for unit in self.sizer.shape.blocks]
        gpu_resident = choices.placement.gpu_resident(blocks)
        units = tuple(unit for unit in self._device_only if unit not in gpu_resident)
        return choices.changed(device_updated_units=units, update_buffers=min(1, len(units)))

    def _may_be_gpu_resident(self, choices: PlanChoices) -> bool:
        """Returns whether units may live on the device beside these choices."""
        if choices.streaming.shared_embed_and_head_slot:
            return False
        fits = choices.gradients.main_grad != MainGrad.HOST
        return self.sizer.device == "cuda" and self._allows_gpu_resident and fits

    def _minimum_main_grad(self, rounds: int) -> MainGrad:
        """Returns the gradient accumulator of the session that is continued, or else the one that
        takes the least device memory.
        """
        kept = self._rounding.get("main_grad")
        if kept:
            return MainGrad(kept)
        if rounds == 1:
            return MainGrad.VERTICAL
        if self._family.sharding.ranks > 1:
            return MainGrad.SHARDS
        # Accumulators on the host need a plane there, which kept gradients do without.
        is_on_device = self._family.gradients.gradients_on_gpu or not self._has_one_rank
        return MainGrad.DEVICE if is_on_device else MainGrad.HOST

    def _main_grad_places(self, minimum: Candidate) -> list[Candidate]:
        """Returns the candidate with the accumulators of all rounds on the device, if they fit.
        Several ranks may also keep shards of them.
        """
        size, choices = minimum
        on_device = choices.changed(main_grad=MainGrad.DEVICE)
        are_there = choices.batching.rounds == 1 or choices.gradients.main_grad == MainGrad.DEVICE
        if are_there or self._rounding or not self.sizer.fits(size, on_device):
            return [minimum]
        shards = [minimum] if choices.gradients.main_grad == MainGrad.SHARDS else []
        return [*shards, Candidate(size, on_device)]

    def _block_input_places(self, start: Candidate) -> list[Candidate]:
        """Returns the candidate with its block inputs on the device, and with block inputs on the
        host if the host has space. If they do not fit on the device, only the unchanged candidate
        is returned.
        """
        size, choices = start
        if self._engine.activation_checkpointing in ON_HOST:
            return [start]
        on_device = choices.changed(offloaded_block_inputs=False)
        if not self.sizer.fits(size, on_device):
            return [start]
        places = [Candidate(size, on_device)]
        if (
            choices.activations.offloaded_block_inputs
            and self.host_bytes(self.offloaded_to_disk(start)) <= self._free_host_bytes
        ):
            places.append(start)
        return places

    def _with_update_buffers(self, choices: PlanChoices) -> Iterator[PlanChoices]:
        """Yields the choices with each number of update buffers to try, as few as there may be
        first. Their space is reserved as if the optimizer of one unit ran on the device;
        `StepTimes` chooses the units whose optimizers do.
        """
        yield choices
        nothing_streamed = choices.placement.gpu_resident_units == len(self.sizer.shape.units)
        # States that are streamed to the device do not go to the disk.
        if nothing_streamed or self._disk_bytes or self.sizer.device == "cpu":
            return
        there = choices.changed(device_updated_units=(HEAD,))
        # Buffers for whole units are large, so the most of them may take too much.
        is_coarse = self._coarse and self.sizer.job.cuts_units
        for number in UPDATE_BUFFERS[-1:] if is_coarse else UPDATE_BUFFERS:
            yield there.changed(update_buffers=number)
        if choices.gradients.main_grad == MainGrad.DEVICE:
            whole = self.sizer.buffers_over_main_grads(there)
            if whole > UPDATE_BUFFERS[-1]:
                yield there.changed(update_buffers=whole)
            return
        if not self.sizer.job.cuts_units:
            return
        largest = self.sizer.shape.largest_block
        chunks = small_chunks(Shards(choices.sharding.ranks).numel(largest))
        in_chunks = there.changed(update_chunks=chunks)
        small = self.sizer.buffers_over_main_grads(in_chunks)
        if chunks > 1 and small > 1:
            yield in_chunks.changed(update_buffers=small)

    def _with_blocks(self, size: int, choices: PlanChoices) -> PlanChoices:
        """Returns the choices with as many blocks without recompute and kept in slots as fit."""
        choices = self._with_blocks_without_recompute(size, choices)
        kept = choices.activations.blocks_without_recompute
        if kept == self.sizer.most_without_recompute:  # there are no block inputs
            choices = choices.changed(offloaded_block_inputs=False)
        return self._with_blocks_kept_in_slots(size, choices)

    def _with_blocks_without_recompute(self, size: int, choices: PlanChoices) -> PlanChoices:
        """Returns the choices with as many kept blocks as fit."""
        if self._engine.activation_checkpointing not in (AUTO, "none"):
            return choices
        # On the CPU a slot takes a copy within the same memory, which blocks kept in slots avoid.
        # So blocks that keep their activations also stay in their slots.
        stays = self.sizer.device == "cpu" and self._engine.blocks_kept_in_slots == AUTO

        def keeping(count: int) -> PlanChoices:
            kept = min(count, self.sizer.most_without_recompute)
            if stays:
                return choices.changed(blocks_without_recompute=kept, blocks_kept_in_slots=count)
            return choices.changed(blocks_without_recompute=kept)

        found = self._most(size, choices.activations.blocks_without_recompute, keeping)
        return choices if found is None else found

    def _with_blocks_kept_in_slots(self, size: int, choices: PlanChoices) -> PlanChoices:
        """Returns the choices with as many blocks kept in slots as fit."""
        if self._engine.blocks_kept_in_slots != AUTO:
            return choices

        blocks = len(self.sizer.shape.blocks)
        most = blocks - choices.placement.gpu_resident_blocks(blocks)

        def staying(count: int) -> PlanChoices:
            return choices.changed(blocks_kept_in_slots=min(count, most))

        found = self._most(size, choices.placement.blocks_kept_in_slots, staying)
        return choices if found is None else found

    def _most(
        self, size: int, least: int, with_count: Callable[[int], PlanChoices]
    ) -> PlanChoices | None:
        """Returns the choices with the most blocks that fit, not fewer than `least`; None where
        none fit. More blocks take more memory, so a binary search over the counts is used.
        """
        counts = [count for count in self._counts if count >= least]

        def fits(count: int) -> bool:
            return self.sizer.fits(size, with_count(count), self.sizer.memory.keeping)

        if fits(counts[0]):  # the most common case
            return with_count(counts[0])
        first = bisect_left(counts, True, lo=1, key=fits)
        return with_count(counts[first]) if first < len(counts) else None

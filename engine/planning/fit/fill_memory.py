"""A `MemoryFiller` finds how a spread can use the device's memory: as little as the settings allow,
or as well as it can. Pure arithmetic, no torch.

The memory that remains is used in this order:

1. The fp32 sums of all rounds stay on the device.
2. Boundaries stay on the device if they fit there. If the host has space for them too, a second try
   keeps them on the host, which leaves more device memory for the other items.
3. Units come to live on the device: as many as fit, as many as fit beside the activations of all
   blocks, or none.
4. Update buffers are reserved for optimizers on the device. Several numbers of buffers are tried.
5. As many blocks as fit keep their activations.
6. As many blocks as fit stay resident.
7. Spare update buffers use the memory of activations between two steps.

Each way to do so is a candidate, which the planner compares with all others (`choose`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.config.settings import AUTO
from engine.planning.fit.buffer_sizes import (
    boundary_count,
    host_boundary_bytes,
    spilled_boundary_bytes,
    spilled_bytes,
    state_bytes,
)
from engine.planning.fit.candidates import Spread
from engine.planning.fit.device_memory import Sizer
from engine.planning.layout.update_buffers import small_pieces
from engine.planning.schedule.buffers import HEAD
from engine.planning.schedule.choices import PlanChoices, settled_blocks
from engine.planning.schedule.ops import GradientSum
from engine.planning.schedule.shards import Shards

UPDATE_BUFFERS = (2, 4, 8)
"""These numbers of update buffers for whole blocks are tried, and as many as fit over the fp32
sums. Small pieces are tried where they take no memory of their own.
"""
SPARE_BUFFERS = (4, 8)
"""Spare buffers for this many blocks are tried, in the place of activations between two steps."""
ON_HOST = ("offload", "offload_pairs")
"""Values of `engine.activation_checkpointing` with which boundaries are in RAM."""


class Candidate(NamedTuple):
    """A candidate is a way to run a step. `size` is the rows of a micro-batch."""

    size: int
    choices: PlanChoices


class UpdateBuffers(NamedTuple):
    """So many buffers hold pieces of the states of units that the device updates. `pieces` of them
    are a block.
    """

    number: int
    pieces: int = 1


class Elsewhere(NamedTuple):
    """An `Elsewhere` says which states may be elsewhere than in RAM."""

    settles: bool = True
    """Units may live on the device."""
    disk_bytes: int = 0
    """Moments and boundaries that do not fit in RAM may take this many bytes of the disk."""


class MemoryFiller:
    """A `MemoryFiller` fills the device's memory for the spreads of one job.

    free_host_bytes: bytes of RAM that may hold boundaries which would also fit on the device.
    quick: fewer ways are tried. frame: all candidates park gradients, share a slot and keep
    boundaries as it does, and have its slots unless the settings say how many.
    """

    def __init__(
        self,
        sizer: Sizer,
        free_host_bytes: int,
        quick: bool,
        frame: PlanChoices,
        elsewhere: Elsewhere,
    ):
        self._frame = frame
        self._has_one_rank = sizer.job.world_size == 1
        may_settle = elsewhere.settles and (self._has_one_rank or not sizer.shape.has_exact)
        self._settles = may_settle and sizer.job.config.engine.states == AUTO
        self._disk_bytes = elsewhere.disk_bytes
        self.sizer = sizer
        self._engine = sizer.job.config.engine
        self._rounding = sizer.job.rounding
        self._free_host_bytes = free_host_bytes
        self._quick = quick
        blocks = len(sizer.shape.blocks)
        self._counts: Sequence[int] = range(blocks, -1, -1)
        """These numbers of kept or resident blocks are tried."""
        if sizer.device == "cpu":
            self._counts = (blocks, 0)

    def leanest(self, spread: Spread) -> Candidate:
        """Returns the candidate that takes the least device memory that the settings allow."""
        engine = self._engine
        slots = self._frame.slots if engine.slots == AUTO else max(engine.slots, self._least_slots)
        resident = 0 if engine.blocks_kept_in_slots == AUTO else engine.blocks_kept_in_slots
        kept = 0
        if engine.activation_checkpointing == "none":
            kept = min(resident or 1, self.sizer.most_kept)
        can_go_to_host = (
            engine.activation_checkpointing in (AUTO, "none") and self.sizer.device == "cuda"
        )
        choices = self._frame.changed(
            micro_batches=spread.micro_batches,
            rounds=spread.rounds,
            slots=slots,
            prefetch_depth=max(1, slots - 1),
            resident_blocks=resident,
            kept_blocks=kept,
            host_boundaries=engine.activation_checkpointing in ON_HOST or can_go_to_host,
            gradient_sum=self._least_gradient_sum(spread.rounds),
            compiled=self.sizer.compiled,
            tile_tokens=self.sizer.tile_tokens,
            # On long rows, a boundary is on its way for a hundredth of the time of its block.
            boundary_rings=1 if self.sizer.tile_tokens else self._frame.boundary_rings,
        )
        if choices.gradient_sum != GradientSum.VERTICAL:
            choices = choices.changed(outer_in_parked=False)
        is_small = self.sizer.shape.dtype == "bfloat16" and self._has_one_rank
        if choices.gradient_sum == GradientSum.DEVICE and is_small:
            choices = choices.changed(gradients_in_sums=choices.parked_gradients)
        return Candidate(spread.size, choices)

    def filled(self, lean: Candidate, host_bytes: float = math.inf) -> Iterator[Candidate]:
        """Yields the candidates that use the memory that `lean` leaves. host_bytes: they take at
        most so many bytes of RAM beside boundaries.
        """
        if self._disk_bytes:  # what does not fit goes to the disk
            host_bytes = math.inf
        for start in self._sum_places(lean):
            if self._least_host_bytes(start) > host_bytes:
                continue
            for place in self._boundary_places(start):
                for settled in self._settled(place):
                    if self._without_boundaries(settled) > host_bytes:
                        continue
                    for buffers in self._update_buffers(settled.choices):
                        yield from self._filled_blocks(settled, buffers)

    @property
    def _least_slots(self) -> int:
        """Two blocks that are recomputed together need two slots."""
        return self._frame.boundary_blocks

    def boundary_bytes(self, candidate: Candidate) -> int:
        """Returns the bytes that a candidate's boundaries take of RAM, those of all ranks."""
        tokens = candidate.size * self.sizer.row_length
        ranks = candidate.choices.ranks_of_host
        return ranks * host_boundary_bytes(self.sizer.shape, candidate.choices, tokens)

    def host_bytes(self, candidate: Candidate) -> int:
        """Returns the bytes that a candidate takes on the host beyond the planes of all units: its
        boundaries, without the planes of units that live on the device and the moments that are on
        the disk.
        """
        boundaries, choices = self.boundary_bytes(candidate), candidate.choices
        if not (choices.settled_units or choices.spilled_units):
            return boundaries
        shape = self.sizer.shape
        here = state_bytes(shape, candidate.choices.changed(device_homes=()))
        return boundaries + here - state_bytes(shape, self._frame)

    def _without_boundaries(self, candidate: Candidate) -> int:
        """Returns what `host_bytes` would be without boundaries on the host."""
        size, choices = candidate
        return self.host_bytes(Candidate(size, choices.changed(host_boundaries=False)))

    def _least_host_bytes(self, start: Candidate) -> int:
        """Returns a lower bound of `host_bytes`, for all candidates that use the memory that
        `start` leaves: as many units as fit live on the device, and no boundary is on the host.
        """
        size, choices = start
        if self._may_settle(choices):
            choices = choices.changed(settled_units=self._most_settled(size, choices))
        return self._without_boundaries(Candidate(size, choices))

    def spilled(self, candidate: Candidate) -> Candidate:
        """Returns the first of the candidate's `spilled_ways`."""
        return self.spilled_ways(candidate)[0]

    def spilled_ways(self, candidate: Candidate) -> list[Candidate]:
        """Returns the ways to keep so little on the disk that the rest just fits in RAM: boundaries
        alone, and moments alone; where neither is enough, all boundaries and some moments. If the
        disk has no room for them, or RAM is still too short, nothing goes there.
        """
        lack = self.host_bytes(candidate) - self._free_host_bytes
        if not self._disk_bytes or candidate.choices.device_homes or lack <= 0:
            return [candidate]
        boundaries = self._spilled_boundaries(candidate, lack)
        found = [boundaries, self._spilled_moments(candidate)]
        if not any(found):
            found = [self._spilled_moments(self._without_boundaries_in_ram(candidate))]
        return [way for way in found if way is not None] or [candidate]

    def _spilled_boundaries(self, candidate: Candidate, lack: int) -> Candidate | None:
        """Returns the candidate with as few boundaries on the disk as free `lack` bytes of RAM;
        None where all of them are not enough, or the disk has no room for them.
        """
        size, choices = candidate
        most = self._without_boundaries_in_ram(candidate).choices.spilled_boundaries
        enough = self.boundary_bytes(candidate) - lack

        def spilling(count: int) -> Candidate:
            return Candidate(size, choices.changed(spilled_boundaries=count))

        def fits(count: int) -> bool:
            return self.boundary_bytes(spilling(count)) <= enough

        count = bisect_left(range(most + 1), True, key=fits)
        found = spilling(count)
        return found if count <= most and self._spilled_bytes(found) <= self._disk_bytes else None

    def _spilled_moments(self, candidate: Candidate) -> Candidate | None:
        """Returns the candidate with the moments of as few units on the disk as make the rest fit
        in RAM; None where those of all are not enough, or the disk has no room for them.
        """
        size, choices = candidate.size, candidate.choices.changed(settled_apart=False)
        most = len(self.sizer.shape.units) - choices.settled_units
        for count in range(most + 1):
            found = Candidate(size, choices.changed(spilled_units=count))
            if self._spilled_bytes(found) > self._disk_bytes:
                return None
            if self.host_bytes(found) <= self._free_host_bytes:
                return found
        return None

    def _without_boundaries_in_ram(self, candidate: Candidate) -> Candidate:
        """Returns the candidate with all boundaries of the host on the disk."""
        size, choices = candidate
        count = boundary_count(self.sizer.shape, choices) if choices.host_boundaries else 0
        return Candidate(size, choices.changed(spilled_boundaries=count * choices.micro_batches))

    def _spilled_bytes(self, candidate: Candidate) -> int:
        """Returns the bytes that a candidate takes of the disk."""
        shape, tokens = self.sizer.shape, candidate.size * self.sizer.row_length
        boundaries = spilled_boundary_bytes(shape, candidate.choices, tokens)
        return boundaries + spilled_bytes(shape, candidate.choices)

    def _settled(self, place: Candidate) -> list[Candidate]:
        """Returns the candidate with no unit on the device, and with several numbers of them."""
        size, choices = place
        if not self._may_settle(choices):
            return [place]
        if choices.settled_apart and self._engine.slots == AUTO:
            # While a block computes that lives there, the bus fills one slot more.
            choices = choices.changed(slots=1 + choices.slots, prefetch_depth=choices.slots)
        fits = self._most_settled(size, choices)
        beside = min(fits, self._most_settled(size, self._with_kept_blocks(size, choices)))
        numbers = {beside, fits}
        if not self._quick:
            shares = (beside + (fits - beside) * share // 4 for share in (1, 2, 3))
            numbers |= {beside // 2, *shares}
        living = [choices.changed(settled_units=count) for count in sorted(numbers - {0})]
        return [place, *(Candidate(size, each) for each in living)]

    def settled_ways(self, lean: Candidate) -> list[Candidate]:
        """Returns the candidate with each number of units that fit on the device, from one on."""
        size, choices = lean
        if not self._may_settle(choices):
            return []
        most = self._most_settled(size, choices)
        in_ram = choices.changed(spilled_units=0, spilled_boundaries=0)
        counts = range(1, most + 1)
        found = [Candidate(size, in_ram.changed(settled_units=count)) for count in counts]
        return [self.spilled(way) for way in found]

    def _most_settled(self, size: int, choices: PlanChoices) -> int:
        """Returns how many units fit on the device beside these choices."""
        kept, most = self._engine.blocks_kept_in_slots, len(self.sizer.shape.units)
        if kept != AUTO and kept > 0:
            most -= 1 + kept

        def fits(count: int) -> bool:
            return self.sizer.fits(size, choices.changed(settled_units=count))

        counts = range(most, -1, -1)
        first = bisect_left(counts, True, key=fits)
        return counts[first] if first < len(counts) else 0

    def _may_settle(self, choices: PlanChoices) -> bool:
        """Tells whether units may live on the device beside these choices."""
        fits = not choices.shared_outer_slot and choices.gradient_sum != GradientSum.HOST
        return self.sizer.device == "cuda" and self._settles and fits

    def _least_gradient_sum(self, rounds: int) -> GradientSum:
        """Returns the gradient sum of the session that is continued, or else the one that takes the
        least device memory.
        """
        kept = self._rounding.get("gradient_sum")
        if kept:
            return GradientSum(kept)
        if rounds == 1:
            return GradientSum.VERTICAL
        if self._frame.ranks > 1:
            return GradientSum.SHARDS
        # Sums on the host need a plane there, which parked gradients do without.
        is_on_device = self._frame.parked_gradients or not self._has_one_rank
        return GradientSum.DEVICE if is_on_device else GradientSum.HOST

    def _sum_places(self, lean: Candidate) -> list[Candidate]:
        """Returns the candidate with the sums of all rounds on the device, if they fit. Several
        ranks may also keep shards of them.
        """
        size, choices = lean
        on_device = choices.changed(gradient_sum=GradientSum.DEVICE)
        are_there = choices.rounds == 1 or choices.gradient_sum == GradientSum.DEVICE
        if are_there or self._rounding or not self.sizer.fits(size, on_device):
            return [lean]
        shards = [lean] if choices.gradient_sum == GradientSum.SHARDS else []
        return [*shards, Candidate(size, on_device)]

    def _boundary_places(self, start: Candidate) -> list[Candidate]:
        """Returns the candidate with its boundaries on the device, and with boundaries on the host
        if the host has space. If they do not fit on the device, only the unchanged candidate is
        returned.
        """
        size, choices = start
        if self._engine.activation_checkpointing in ON_HOST:
            return [start]
        on_device = choices.changed(host_boundaries=False)
        if not self.sizer.fits(size, on_device):
            return [start]
        places = [Candidate(size, on_device)]
        if (
            choices.host_boundaries
            and self.host_bytes(self.spilled(start)) <= self._free_host_bytes
        ):
            places.append(start)
        return places

    def _update_buffers(self, choices: PlanChoices) -> list[UpdateBuffers]:
        """Returns the update buffers to try."""
        nothing_streamed = choices.settled_units == len(self.sizer.shape.units)
        # States that are streamed to the device do not go to the disk.
        if nothing_streamed or self._disk_bytes or self.sizer.device == "cpu":
            return [UpdateBuffers(0)]
        found = [UpdateBuffers(0)]
        whole = self.sizer.buffers_over_sums(choices)
        if not choices.gradients_in_sums:  # a whole block does not fit into half of its sum
            some = UPDATE_BUFFERS[-1:] if self._quick else UPDATE_BUFFERS
            found += map(UpdateBuffers, some)
            if choices.gradient_sum == GradientSum.DEVICE and whole > UPDATE_BUFFERS[-1]:
                found.append(UpdateBuffers(whole))
        largest = self.sizer.shape.largest_block
        pieces = small_pieces(Shards(choices.ranks).numel(largest))
        small = self.sizer.buffers_over_sums(choices.changed(update_pieces=pieces))
        is_scarce = choices.gradient_sum != GradientSum.DEVICE or choices.gradients_in_sums
        if is_scarce and pieces > 1 and small > 1:
            found.append(UpdateBuffers(small, pieces))
        if choices.gradients_in_sums:
            found += [UpdateBuffers(blocks * pieces, pieces) for blocks in UPDATE_BUFFERS]
        return found

    def _filled_blocks(self, place: Candidate, buffers: UpdateBuffers) -> Iterator[Candidate]:
        """Yields the candidate with these update buffers and as many kept and resident blocks
        as fit, without and with spare buffers.
        """
        size, choices = place
        # Space for the buffers is reserved as if one unit's optimizer ran on the device. The units
        # whose optimizers do run there are chosen at the end.
        choices = choices.changed(
            update_buffers=buffers.number,
            update_pieces=buffers.pieces,
            device_homes=(HEAD,) if buffers.number else (),
        )
        if not self.sizer.fits(size, choices):
            return
        choices = self._with_kept_blocks(size, choices)
        if choices.kept_blocks == self.sizer.most_kept:  # there are no boundaries
            choices = choices.changed(host_boundaries=False)
        choices = self._with_resident_blocks(size, choices)
        yield Candidate(size, choices)
        if buffers.number > 2 and not self._quick and self._has_one_rank:
            yield from self._with_spare_buffers(size, choices)

    def _with_kept_blocks(self, size: int, choices: PlanChoices) -> PlanChoices:
        """Returns the choices with as many kept blocks as fit."""
        if self._engine.activation_checkpointing not in (AUTO, "none"):
            return choices
        # On the CPU a slot takes a copy within the same memory, which resident blocks avoid. So
        # blocks that keep their activations also stay resident.
        stays = self.sizer.device == "cpu" and self._engine.blocks_kept_in_slots == AUTO

        def keeping(count: int) -> PlanChoices:
            kept = min(count, self.sizer.most_kept)
            if stays:
                return choices.changed(kept_blocks=kept, resident_blocks=count)
            return choices.changed(kept_blocks=kept)

        found = self._most(size, choices.kept_blocks, keeping)
        return choices if found is None else found

    def _with_resident_blocks(self, size: int, choices: PlanChoices) -> PlanChoices:
        """Returns the choices with as many resident blocks as fit."""
        if self._engine.blocks_kept_in_slots != AUTO:
            return choices

        blocks = len(self.sizer.shape.blocks)
        most = blocks - settled_blocks(blocks, choices)

        def staying(count: int) -> PlanChoices:
            return choices.changed(resident_blocks=min(count, most))

        found = self._most(size, choices.resident_blocks, staying)
        return choices if found is None else found

    def _with_spare_buffers(self, size: int, choices: PlanChoices) -> Iterator[Candidate]:
        for blocks in SPARE_BUFFERS:
            spare = blocks * choices.update_pieces
            lenders = self.sizer.spare_blocks(size, choices, spare)
            if lenders is None:
                continue
            more = choices.changed(
                update_buffers=choices.update_buffers + spare,
                spare_buffers=spare,
                spare_blocks=lenders,
            )
            if self.sizer.fits(size, more):
                yield Candidate(size, more)

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

"""A `Planner` compares the candidates of one job: those ways to run its steps that keep gradients
on the GPU, share a slot and place block inputs in one way (`engine.planning.fit.candidates`).
`engine.planning.fit.choose` says how the fastest is found. No torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

from engine.config.settings import AUTO
from engine.machine.link_rates import of_rank
from engine.machine.rates import Rates
from engine.planning.fit.candidates import BatchSplit
from engine.planning.fit.cost_model import Cost, MicroBatch, step_seconds
from engine.planning.fit.fill_memory import Candidate, MemoryFiller
from engine.planning.fit.memory_items import Item
from engine.planning.fit.optimizer_placement import (
    place_optimizers,
    wait_for_block_inputs,
    wait_for_disk,
)
from engine.planning.fit.simulate_step import predicted_seconds
from engine.planning.schedule.choices import PlanChoices, gpu_resident_blocks, recorded_passes
from engine.planning.schedule.ops import MainGrad
from engine.planning.shape.saved_attention_sizes import returned_bytes
from engine.text import GIB

SIMULATED = 3
"""The plans of this many candidates are simulated."""
SIMULATED_USES = 250
"""They are simulated only if a step has at most this many uses of blocks in forward, for which
simulation takes a few hundredths of a second.
"""
WORTH_SIMULATING = 1.05
"""Candidates are considered up to this multiple of the shortest step by the closed form, whose
error is smaller than that.
"""
ALIKE = 1.002
"""Two steps count as equally fast if their times differ by less than this factor."""
GPU_RESIDENT_COST = 1.01
"""A step may take longer by this factor for more units that live on the device, since they take no
RAM and nothing of theirs crosses the bus. Predictions are less exact than that.
"""
ALL_GPU_RESIDENT_COST = 1.05
"""It may take longer by this factor where the whole model lives on the device and units are short.
No other lane then takes the interpreter from the thread that launches the blocks, which no
prediction counts.
"""
SHORT_UNIT_SECONDS = 0.03
"""A unit is short if its forward and backward of a micro-batch take less than this. With longer
ones, the thread that launches blocks is far ahead of the device (an H200, 3.1 billion parameters: a
unit takes 15 ms with 16 x 1,024 tokens, and steps are up to 5 % longer than predicted; with
96 x 1,024 in two micro-batches it takes 45 ms, and they are up to 2 % longer).
"""
GRAPHS_GAIN = 0.98
"""Blocks are recorded as CUDA graphs where the step is shorter by this factor."""
SHARDS_GAIN = 0.95
"""Shards of sums are added up in every round, and the sums of all rounds once, if each device has
room for them. Shards are kept instead of these only if the step is shorter by this factor, since no
GPU has measured both. Against a vertical step, four GPUs gained more than was predicted.
"""
MOST_RECORDED = 600
"""At most so many passes over blocks are recorded."""
FILLED_RESERVE_BYTES = GIB // 2
"""So much of that is free beside the program, its data and the pages of a checkpoint."""


@dataclass(frozen=True)
class Chosen:
    """A `Chosen` is the result of `choose`: the plan's choices, the two sizes that go with them,
    and the memory that they take.
    """

    choices: PlanChoices
    micro_batch_size: int
    loss_chunk: int
    gpu_items: tuple[Item, ...]
    """They are the items of device memory, those of one rank. On the CPU they are the same buffers,
    in RAM.
    """
    offloaded_input_bytes: int
    """All ranks together keep so much of block inputs in RAM."""

    @property
    def rounding(self) -> dict[str, Any]:
        """Returns the choices that affect how results are rounded. A resumed run passes them to
        `choose` again.
        """
        return {
            "micro_batch_size": self.micro_batch_size,
            "loss_chunk": self.loss_chunk,
            "main_grad": self.choices.main_grad.value,
            "rounds": self.choices.rounds,
            "ranks": self.choices.ranks,
            "hosts": self.choices.hosts,
            "span": self.choices.span,
            "compiled": self.choices.compiled,
            "tile_tokens": self.choices.tile_tokens,
        }

    def pad_up_to(self, max_seq_len: int) -> int:
        """Returns the length that rows may be padded to, since a block is compiled for few lengths;
        0 where it is not compiled.
        """
        return max_seq_len if self.choices.compiles_blocks else 0

    @property
    def gpu_bytes(self) -> int:
        return sum(item.bytes for item in self.gpu_items)


@dataclass(frozen=True)
class TimedCandidate:
    """A `TimedCandidate` is a candidate with the predicted seconds of its step. `size` is the rows
    of a micro-batch.
    """

    seconds: float
    size: int
    choices: PlanChoices

    @property
    def batch_split(self) -> tuple[int, int]:
        """Returns the micro-batch size and the rounds, which identify the batch split of a way."""
        return self.size, self.choices.rounds


def fastest_of(ways: Sequence[TimedCandidate]) -> TimedCandidate:
    """Returns the fastest way. One that keeps shards of sums must be clearly faster than those that
    keep the sums of all rounds on the device.
    """
    best = min(ways, key=attrgetter("seconds"))
    shards = [way for way in ways if way.choices.main_grad == MainGrad.SHARDS]
    sums = [way.seconds for way in ways if way.choices.main_grad == MainGrad.DEVICE]
    on_device = min(sums, default=math.inf)
    if best not in shards or best.seconds < SHARDS_GAIN * on_device:
        return best
    return min((way for way in ways if way not in shards), key=attrgetter("seconds"))


def _gpu_resident(way: TimedCandidate) -> int:
    """Returns how many units live on the device."""
    return way.choices.gpu_resident_units


class Planner:
    """A `Planner` compares the candidates of one job.

    free_host_bytes: bytes of RAM that may hold block inputs which would also fit on the device.
    """

    def __init__(
        self,
        filler: MemoryFiller,
        ways: list[BatchSplit],
        rates: Rates,
        free_host_bytes: int,
        coarse: bool,
    ):
        self.sizer = filler.sizer
        self._filler = filler
        self._batch_splits = ways
        self._rates = rates
        self._free_host_bytes = free_host_bytes
        self._coarse = coarse
        self._costs: dict[int, Cost] = {}

    @property
    def least_seconds(self) -> float:
        """Returns the time of the fastest way that fits, in closed form; infinity where none
        fits.
        """
        return self._found[0].seconds if self._found else math.inf

    def best(self) -> TimedCandidate:
        """Returns the fastest way that fits. There must be one."""
        best = self._best_of(self._found)
        if best.choices.main_grad != MainGrad.SHARDS:
            return self._recorded(best)
        found = [best]
        for kind in (MainGrad.DEVICE, MainGrad.VERTICAL):
            candidates = self._spacious or self._closest
            others = [way for way in candidates if way.choices.main_grad == kind]
            found += [self._best_of(self._timed(others))] if others else []
        return self._recorded(fastest_of(found))

    def _best_of(self, found: list[TimedCandidate]) -> TimedCandidate:
        return found[0] if self._coarse else self._fastest(found)

    def _recorded(self, way: TimedCandidate) -> TimedCandidate:
        """Returns the way with its blocks recorded as CUDA graphs, where that is possible and makes
        its step shorter.
        """
        sizer, blocks = self.sizer, len(self.sizer.shape.blocks)
        choices = way.choices.changed(graphs=True)
        is_whole = (
            gpu_resident_blocks(blocks, choices) == blocks and not choices.offloaded_block_inputs
        )
        is_whole = is_whole and choices.world_size == 1
        # What is recorded of a block goes forward and backward.
        is_whole = is_whole and not sizer.shape.forward_blocks
        few = recorded_passes(blocks, choices) <= MOST_RECORDED
        if not (is_whole and few and way.choices.compiles_blocks and sizer.fits(way.size, choices)):
            return way
        seconds = self._simulated_seconds(replace(way, choices=choices))
        before = self._simulated_seconds(way)
        if seconds > GRAPHS_GAIN * before:
            return way
        return replace(way, choices=choices, seconds=seconds)

    @functools.cached_property
    def _found(self) -> list[TimedCandidate]:
        return self._timed(self._spacious or self._closest)

    @property
    def has_room(self) -> bool:
        """Tells whether a candidate fits, and leaves RAM free beside the states, the program and
        the block inputs.
        """
        minimum = self.minimum_memory()
        if self.free_after_block_inputs >= 0 and self.sizer.fits(*minimum):  # the most common case
            return True
        free = self._free_host_bytes
        return any(self._filler.host_bytes(way) <= free for way in self._candidates(free))

    @property
    def fits_in_filled_ram(self) -> bool:
        """Tells whether a candidate fits if RAM is filled to the last."""
        filled = self._free_host_bytes + FILLED_RESERVE_BYTES
        return any(self.is_in_ram(way) for way in self._candidates(filled))

    @functools.cached_property
    def _spacious(self) -> list[Candidate]:
        free = self._free_host_bytes
        return [way for way in self._fitting if self._filler.host_bytes(way) <= free]

    @property
    def _closest(self) -> list[Candidate]:
        """Returns the candidates that fit if RAM is filled to the last, else those that take the
        least of it.
        """
        in_ram = [way for way in self._fitting if self.is_in_ram(way)]
        least = min(map(self._filler.host_bytes, self._fitting), default=0)
        return in_ram or [w for w in self._fitting if self._filler.host_bytes(w) == least]

    def is_in_ram(self, way: Candidate) -> bool:
        """Tells whether RAM holds the candidate if it is filled to the last."""
        return self._filler.host_bytes(way) <= self._free_host_bytes + FILLED_RESERVE_BYTES

    @functools.cached_property
    def free_after_block_inputs(self) -> int:
        """Returns the bytes of RAM that remain beside the states, the program and the block inputs
        of the minimum-memory candidate. It is negative where RAM is short.
        """
        return self._free_host_bytes - self._filler.host_bytes(self.minimum_memory())

    def fits_on_device(self) -> bool:
        """Tells whether the device holds the minimum-memory candidate."""
        return self.sizer.fits(*self.minimum_memory(), self.sizer.memory.limit)

    def minimum_memory(self) -> Candidate:
        """Returns the candidate that takes the least memory. More rounds would take still less, but
        they round the sums once per round, which is done only on request.
        """
        ways = self._batch_splits
        fewest_rounds = ways[0].rounds
        smallest = min((way for way in ways if way.rounds == fewest_rounds), key=attrgetter("size"))
        return self._filler.offloaded_to_disk(self._filler.minimum_memory(smallest))

    def balanced(self, host_free: int) -> Candidate | None:
        """Returns the minimum-memory candidate with so many units that live on the device that RAM,
        of which `host_free` bytes are free, and the device's memory are filled alike. Returns None
        where none may live there.
        """
        planes = host_free - self._free_host_bytes

        def fullest(way: Candidate) -> float:
            on_host = (planes + self._filler.host_bytes(way)) / host_free
            return max(on_host, self.sizer.total(*way) / self.sizer.memory.limit)

        return min(
            self._filler.gpu_resident_candidates(self.minimum_memory()), key=fullest, default=None
        )

    def chosen(self, candidate: Candidate) -> Chosen:
        """Returns the result of `choose` for a candidate."""
        return Chosen(
            choices=candidate.choices,
            micro_batch_size=candidate.size,
            loss_chunk=self.sizer.loss_chunk,
            gpu_items=self.sizer.items(*candidate),
            offloaded_input_bytes=self._filler.block_input_bytes(candidate),
        )

    @functools.cached_property
    def _fitting(self) -> list[Candidate]:
        """The list holds the candidates that fit on the device, by batch split."""
        return list(self._candidates())

    def _candidates(self, host_bytes: float = math.inf) -> Iterator[Candidate]:
        """Yields the candidates that fit on the device, by batch split. host_bytes: as for
        `MemoryFiller.filled`.
        """
        job = self.sizer.job
        # A sum that is rounded once per round is used only if the settings request it.
        exact = not job.rounding and job.config.engine.rounds == AUTO
        for batch_split in self._batch_splits:
            minimum = self._filler.minimum_memory(batch_split)
            if not self.sizer.fits(*minimum):
                continue
            for candidate in self._filler.filled(minimum, host_bytes):
                if exact and candidate.choices.main_grad == MainGrad.HOST:
                    continue
                yield from self._filler.disk_offload_candidates(candidate)
                yield from self._keeping_attention(candidate, minimum)
            if self.sizer.device == "cpu":  # sizes are tried in order of preference
                break

    def _keeping_attention(self, way: Candidate, minimum: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with as many blocks that keep what attention returned as RAM has
        room for. Their buffers on the device may take the place of blocks that stay there and of
        activations, as far as `minimum` does without them.
        """
        sizer, shape, (size, choices) = self.sizer, self.sizer.shape, way
        is_whole = choices.blocks_per_saved_input == 1 and not choices.spare_buffers
        if not (sizer.tile_tokens and choices.offloaded_block_inputs and is_whole):
            return
        of_token = returned_bytes(shape.attention_width, shape.attention_heads, shape.item_bytes)
        one = choices.changed(attention_blocks=1, attention_bytes=of_token)
        places = itertools.product(
            range(
                choices.blocks_without_recompute, minimum.choices.blocks_without_recompute - 1, -1
            ),
            range(choices.blocks_kept_in_slots, minimum.choices.blocks_kept_in_slots - 1, -1),
        )
        for kept, resident in places:
            found = one.changed(blocks_without_recompute=kept, blocks_kept_in_slots=resident)
            if sizer.fits(size, found):
                yield from self._with_most_attention(Candidate(size, found))
                return

    def _with_most_attention(self, way: Candidate) -> Iterator[Candidate]:
        """Yields the candidate, in which one block keeps what attention returned, with as many such
        blocks as RAM has room for.
        """
        size, choices = way
        before = self._filler.host_bytes(Candidate(size, choices.changed(attention_blocks=0)))
        room = int(self._free_host_bytes - before) // (self._filler.host_bytes(way) - before)
        count = min(room, self.sizer.most_without_recompute - choices.blocks_without_recompute)
        if count > 0:
            yield Candidate(size, choices.changed(attention_blocks=count))

    def _timed(self, fitting: Sequence[Candidate]) -> list[TimedCandidate]:
        """Returns the candidates with their times and with the place where each optimizer runs,
        fastest first. Candidates that would be clearly slower even if they waited for no update are
        left out.
        """
        bounds = [
            (self._step_seconds(size, choices, waited=0.0), (size, choices))
            for size, choices in fitting
        ]
        least = math.inf
        found = []
        for bound, (size, without_device_updates) in sorted(bounds, key=itemgetter(0)):
            if bound > WORTH_SIMULATING * least:
                break
            choices, waited = self._with_optimizer_placement(size, without_device_updates)
            if without_device_updates.update_buffers > choices.update_buffers:
                # Another candidate uses the memory of the buffers that nothing needs.
                continue
            seconds = self._step_seconds(size, choices, waited)
            found.append(TimedCandidate(seconds, size, choices))
            least = min(least, seconds)
        without_doubles = dict.fromkeys(found)
        return sorted(without_doubles, key=attrgetter("seconds"))

    def _step_seconds(self, size: int, choices: PlanChoices, waited: float) -> float:
        """Returns the seconds of a step in closed form. waited: those in which the first forward
        pass waits for updates.
        """
        cost = self._cost(size)
        return step_seconds(cost, choices, waited + wait_for_block_inputs(cost, choices))

    def _with_optimizer_placement(
        self, size: int, choices: PlanChoices
    ) -> tuple[PlanChoices, float]:
        """Returns the choices with the units whose optimizer runs on the device, and how long the
        first forward pass waits for updates.
        """
        device_updated = place_optimizers(self._cost(size), choices, self.sizer.device)
        waited = device_updated.waited
        if choices.disk_offloaded_units:
            waited = max(waited, wait_for_disk(self._cost(size), choices))
        if device_updated.units:
            return choices.changed(device_updated_units=device_updated.units), waited
        no_buffers = {"update_buffers": 0, "spare_buffers": 0, "spare_blocks": 0}
        late = device_updated.moments_after_weights
        return choices.changed(
            device_updated_units=(), moments_after_weights=late, **no_buffers
        ), waited

    def _fastest(self, found: list[TimedCandidate]) -> TimedCandidate:
        """Returns the fastest way by simulation. It compares first the best way of each batch
        split, then the ways to use memory within the best batch split. `found` is sorted by time.
        """
        # In the mapping, the fastest way of each batch split overwrites the slower ones, because it
        # comes last.
        by_batch_split = {way.batch_split: way for way in reversed(found)}
        best_first = sorted(by_batch_split.values(), key=attrgetter("seconds"))
        best_of_batch_splits = self._simulated(best_first[:SIMULATED])
        # Of ways that are equally fast, the one with fewer rounds is taken.
        least = min(way.seconds for way in best_of_batch_splits)
        equally_fast = [way for way in best_of_batch_splits if way.seconds <= ALIKE * least]
        batch_split = min(equally_fast, key=lambda way: way.choices.rounds).batch_split
        alike = [way for way in found if way.batch_split == batch_split]
        near = [way for way in alike if way.seconds <= WORTH_SIMULATING * alike[0].seconds]
        by_kind = {way.choices.disk_offloaded_block_inputs > 0: way for way in reversed(near)}
        tried = [*alike[:SIMULATED], max(near, key=_gpu_resident), *by_kind.values()]
        if self.sizer.shape.has_alike_frozen_blocks:
            # Those that live there cost nothing, so many ways are as fast.
            as_fast = [way for way in near if way.seconds <= GPU_RESIDENT_COST * near[0].seconds]
            tried.append(max(as_fast, key=_gpu_resident))
        ways = self._simulated(sorted(tried, key=attrgetter("seconds")))
        least = min(way.seconds for way in ways)
        whole = len(self.sizer.shape.units)

        def is_equally_fast(way: TimedCandidate) -> bool:
            uses = whole * way.choices.micro_batches
            is_short = way.seconds < SHORT_UNIT_SECONDS * uses
            cost = (
                ALL_GPU_RESIDENT_COST
                if is_short and _gpu_resident(way) == whole
                else GPU_RESIDENT_COST
            )
            return way.seconds <= cost * least

        equally_fast = [way for way in ways if is_equally_fast(way)]
        most = max(map(_gpu_resident, equally_fast))
        best = [way for way in equally_fast if _gpu_resident(way) == most]
        return min(best, key=attrgetter("seconds"))

    def _simulated(self, ways: list[TimedCandidate]) -> list[TimedCandidate]:
        """Returns the ways that are worth simulating, with simulated times. Where a plan is so long
        that simulating it would delay the app's form, the ways are returned unchanged.
        """
        worth = [way for way in ways if way.seconds <= WORTH_SIMULATING * ways[0].seconds]
        uses = max(way.choices.micro_batches for way in worth) * len(self.sizer.shape.blocks)
        if uses > SIMULATED_USES:
            return worth
        return [replace(way, seconds=self._simulated_seconds(way)) for way in worth]

    def _simulated_seconds(self, way: TimedCandidate) -> float:
        sizer = self.sizer
        micro_batch = self._micro_batch(way.size)
        return predicted_seconds(sizer.shape, way.choices, self._rates, micro_batch, sizer.device)

    def _micro_batch(self, size: int) -> MicroBatch:
        sizer = self.sizer
        varlen = sizer.shape.varlen(sizer.packed, sizer.device)
        rows = MicroBatch(size, sizer.row_length, varlen, sizer.tile_tokens)
        return rows.learning(sizer.job.config.objective, sizer.loss_chunk)

    def _cost(self, size: int) -> Cost:
        if size not in self._costs:
            sizer = self.sizer
            micro_batch = self._micro_batch(size)
            rates = of_rank(self._rates, sizer.job.ranks)
            self._costs[size] = Cost(sizer.shape, rates, micro_batch, sizer.compiled)
        return self._costs[size]

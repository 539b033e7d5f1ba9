"""A `Planner` compares the candidates of one plan family: all make the same choices about kept
gradients, shared slots and block inputs (`engine.planning.fit.candidates`).
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
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.planning.shape.saved_attention_sizes import returned_bytes
from engine.text import GIB

SIMULATED = 3
"""Number of candidates whose plans are simulated."""
SIMULATED_USES = 250
"""Most uses of blocks in forward of a step that is simulated, which takes a few hundredths of a
second.
"""
WORTH_SIMULATING = 1.05
"""Multiple of the shortest step by the closed form up to which candidates are considered. The error
of that form is smaller.
"""
ALIKE = 1.002
"""Factor by which the times of two steps may differ that count as equally fast."""
GPU_RESIDENT_COST = 1.01
"""Factor by which a step may take longer for more units that live on the device, since they take no
RAM and nothing of theirs crosses the bus. Predictions are less exact than that.
"""
ALL_GPU_RESIDENT_COST = 1.05
"""Factor by which it may take longer where the whole model lives on the device and units are short.
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
"""Factor by which a step must be shorter for blocks to be recorded as CUDA graphs."""
SHARDS_GAIN = 0.95
"""Factor by which a step must be shorter for shards of accumulators to be kept, which are added up
in every round, where each device has room for whole accumulators, which are added up once: no GPU
has measured both. Against a vertical step, four GPUs gained more than was predicted.
"""
MOST_RECORDED = 600
"""Most passes over blocks that are recorded."""
FILLED_RESERVE_BYTES = GIB // 2
"""RAM that candidates may take beyond the usual limit where nothing fits otherwise. What remains is
for the program, its data and the pages of a checkpoint.
"""


@dataclass(frozen=True)
class Chosen:
    """The result of `choose`: the plan's choices, the two sizes that go with them, and the memory
    that they take.
    """

    choices: PlanChoices
    micro_batch_size: int
    loss_chunk: int
    gpu_items: tuple[Item, ...]
    """The items of device memory, those of one rank. On the CPU they are the same buffers, in
    RAM.
    """
    offloaded_input_bytes: int
    """Bytes of block inputs that all ranks together keep in RAM."""

    @property
    def rounding(self) -> dict[str, Any]:
        """Choices that affect how results are rounded. A resumed run passes them to `choose`
        again.
        """
        return {
            "micro_batch_size": self.micro_batch_size,
            "loss_chunk": self.loss_chunk,
            "main_grad": self.choices.gradients.main_grad.value,
            "rounds": self.choices.batching.rounds,
            "ranks": self.choices.sharding.ranks,
            "replicas": self.choices.sharding.replicas,
            "nodes_per_replica": self.choices.sharding.nodes_per_replica,
            "compiled": self.choices.kernels.compiled,
            "tile_tokens": self.choices.kernels.tile_tokens,
        }

    def pad_up_to(self, max_seq_len: int) -> int:
        """Returns the length that rows may be padded to, since a block is compiled for few lengths;
        0 where it is not compiled.
        """
        return max_seq_len if self.choices.kernels.compiles_blocks else 0

    @property
    def gpu_bytes(self) -> int:
        return sum(item.bytes for item in self.gpu_items)


@dataclass(frozen=True)
class TimedCandidate:
    """A candidate with the predicted seconds of its step. `size` is the rows of a micro-batch."""

    seconds: float
    size: int
    choices: PlanChoices

    @property
    def batch_split(self) -> tuple[int, int]:
        """The micro-batch size and the rounds, which identify the batch split of a candidate."""
        return self.size, self.choices.batching.rounds


def fastest_of(candidates: Sequence[TimedCandidate]) -> TimedCandidate:
    """Returns the fastest candidate. One that keeps shards of accumulators must be clearly faster
    than those that keep the accumulators of all rounds on the device.
    """
    best = min(candidates, key=attrgetter("seconds"))
    shards = [
        candidate
        for candidate in candidates
        if candidate.choices.gradients.main_grad == MainGrad.SHARDS
    ]
    of_all_rounds = [
        candidate.seconds
        for candidate in candidates
        if candidate.choices.gradients.main_grad == MainGrad.DEVICE
    ]
    on_device = min(of_all_rounds, default=math.inf)
    if best not in shards or best.seconds < SHARDS_GAIN * on_device:
        return best
    return min(
        (candidate for candidate in candidates if candidate not in shards),
        key=attrgetter("seconds"),
    )


def _gpu_resident(candidate: TimedCandidate) -> int:
    """Returns how many units live on the device."""
    return candidate.choices.placement.gpu_resident_units


class Planner:
    """Compares the candidates of one job.

    free_host_bytes: bytes of RAM that may hold block inputs which would also fit on the device.
    """

    def __init__(
        self,
        filler: MemoryFiller,
        batch_splits: list[BatchSplit],
        rates: Rates,
        free_host_bytes: int,
        coarse: bool,
    ):
        self.sizer = filler.sizer
        self._filler = filler
        self._batch_splits = batch_splits
        self._rates = rates
        self._free_host_bytes = free_host_bytes
        self._coarse = coarse
        self._costs: dict[int, Cost] = {}

    @property
    def least_seconds(self) -> float:
        """The time of the fastest candidate that fits, in closed form; infinity where none fits."""
        return self._found[0].seconds if self._found else math.inf

    def best(self) -> TimedCandidate:
        """Returns the fastest candidate that fits. There must be one."""
        best = self._best_of(self._found)
        if best.choices.gradients.main_grad != MainGrad.SHARDS:
            return self._recorded(best)
        found = [best]
        for kind in (MainGrad.DEVICE, MainGrad.VERTICAL):
            candidates = self._spacious or self._closest
            others = [
                candidate
                for candidate in candidates
                if candidate.choices.gradients.main_grad == kind
            ]
            found += [self._best_of(self._timed(others))] if others else []
        return self._recorded(fastest_of(found))

    def _best_of(self, found: list[TimedCandidate]) -> TimedCandidate:
        return found[0] if self._coarse else self._fastest(found)

    def _recorded(self, candidate: TimedCandidate) -> TimedCandidate:
        """Returns the candidate with its blocks recorded as CUDA graphs, where that is possible and
        makes its step shorter.
        """
        sizer, blocks = self.sizer, len(self.sizer.shape.blocks)
        choices = candidate.choices.changed(graphs=True)
        is_whole = (
            choices.placement.gpu_resident_blocks(blocks) == blocks
            and not choices.activations.offloaded_block_inputs
        )
        is_whole = is_whole and choices.sharding.world_size == 1
        # What is recorded of a block goes forward and backward.
        is_whole = is_whole and not sizer.shape.forward_blocks
        few = choices.recorded_passes(blocks) <= MOST_RECORDED
        if not (
            is_whole
            and few
            and candidate.choices.kernels.compiles_blocks
            and sizer.fits(candidate.size, choices)
        ):
            return candidate
        seconds = self._simulated_seconds(replace(candidate, choices=choices))
        before = self._simulated_seconds(candidate)
        if seconds > GRAPHS_GAIN * before:
            return candidate
        return replace(candidate, choices=choices, seconds=seconds)

    @functools.cached_property
    def _found(self) -> list[TimedCandidate]:
        return self._timed(self._spacious or self._closest)

    @property
    def has_room(self) -> bool:
        """Whether a candidate fits, and leaves RAM free beside the states, the program and the
        block inputs.
        """
        minimum = self.minimum_memory()
        if self.free_after_block_inputs >= 0 and self.sizer.fits(*minimum):  # the most common case
            return True
        free = self._free_host_bytes
        return any(
            self._filler.host_bytes(candidate) <= free for candidate in self._candidates(free)
        )

    @property
    def fits_in_filled_ram(self) -> bool:
        """Whether a candidate fits if RAM is filled to the last."""
        filled = self._free_host_bytes + FILLED_RESERVE_BYTES
        return any(self.is_in_ram(candidate) for candidate in self._candidates(filled))

    @functools.cached_property
    def _spacious(self) -> list[Candidate]:
        free = self._free_host_bytes
        return [
            candidate for candidate in self._fitting if self._filler.host_bytes(candidate) <= free
        ]

    @property
    def _closest(self) -> list[Candidate]:
        """Candidates that fit if RAM is filled to the last, else those that take the least of
        it.
        """
        in_ram = [candidate for candidate in self._fitting if self.is_in_ram(candidate)]
        least = min(map(self._filler.host_bytes, self._fitting), default=0)
        return in_ram or [w for w in self._fitting if self._filler.host_bytes(w) == least]

    def is_in_ram(self, candidate: Candidate) -> bool:
        """Returns whether RAM holds the candidate if it is filled to the last."""
        return self._filler.host_bytes(candidate) <= self._free_host_bytes + FILLED_RESERVE_BYTES

    @functools.cached_property
    def free_after_block_inputs(self) -> int:
        """Bytes of RAM that remain beside the states, the program and the block inputs of the
        minimum-memory candidate. It is negative where RAM is short.
        """
        return self._free_host_bytes - self._filler.host_bytes(self.minimum_memory())

    def fits_on_device(self) -> bool:
        """Returns whether the device holds the minimum-memory candidate."""
        return self.sizer.fits(*self.minimum_memory(), self.sizer.memory.limit)

    def minimum_memory(self) -> Candidate:
        """Returns the candidate that takes the least memory. More rounds would take still less, but
        they round the accumulators once per round, which is done only on request.
        """
        splits = self._batch_splits
        fewest_rounds = splits[0].rounds
        smallest = min(
            (split for split in splits if split.rounds == fewest_rounds), key=attrgetter("size")
        )
        return self._filler.offloaded_to_disk(self._filler.minimum_memory(smallest))

    def balanced(self, host_free: int) -> Candidate | None:
        """Returns the minimum-memory candidate with the number of GPU-resident units at which RAM
        (`host_free` bytes are free) and the device's memory are equally full; None where no unit
        may live on the device.
        """
        planes = host_free - self._free_host_bytes

        def fullest(candidate: Candidate) -> float:
            on_host = (planes + self._filler.host_bytes(candidate)) / host_free
            return max(on_host, self.sizer.total(*candidate) / self.sizer.memory.limit)

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
        """Candidates that fit on the device, by batch split."""
        return list(self._candidates())

    def _candidates(self, host_bytes: float = math.inf) -> Iterator[Candidate]:
        """Yields the candidates that fit on the device, by batch split. host_bytes: as for
        `MemoryFiller.filled`.
        """
        job = self.sizer.job
        # An accumulator that is rounded once per round is used only if the settings request it.
        exact = not job.rounding and job.config.engine.rounds == AUTO
        for batch_split in self._batch_splits:
            minimum = self._filler.minimum_memory(batch_split)
            if not self.sizer.fits(*minimum):
                continue
            for candidate in self._filler.filled(minimum, host_bytes):
                if exact and candidate.choices.gradients.main_grad == MainGrad.HOST:
                    continue
                yield from self._filler.disk_offload_candidates(candidate)
                yield from self._keeping_attention(candidate, minimum)
            if self.sizer.device == "cpu":  # sizes are tried in order of preference
                break

    def _keeping_attention(self, candidate: Candidate, minimum: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with as many blocks that keep what attention returned as RAM has
        room for. Their buffers on the device may take the place of blocks that stay there and of
        activations, as far as `minimum` does without them.
        """
        sizer, shape, (size, choices) = self.sizer, self.sizer.shape, candidate
        is_whole = (
            choices.activations.blocks_per_saved_input == 1 and not choices.updates.spare_buffers
        )
        if not (sizer.tile_tokens and choices.activations.offloaded_block_inputs and is_whole):
            return
        of_token = returned_bytes(shape.attention_width, shape.attention_heads, shape.item_bytes)
        one = choices.changed(attention_blocks=1, attention_bytes=of_token)
        places = itertools.product(
            range(
                choices.activations.blocks_without_recompute,
                minimum.choices.activations.blocks_without_recompute - 1,
                -1,
            ),
            range(
                choices.placement.blocks_kept_in_slots,
                minimum.choices.placement.blocks_kept_in_slots - 1,
                -1,
            ),
        )
        for kept, resident in places:
            found = one.changed(blocks_without_recompute=kept, blocks_kept_in_slots=resident)
            if sizer.fits(size, found):
                yield from self._with_most_attention(Candidate(size, found))
                return

    def _with_most_attention(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the candidate, in which one block keeps what attention returned, with as many such
        blocks as RAM has room for.
        """
        size, choices = candidate
        before = self._filler.host_bytes(Candidate(size, choices.changed(attention_blocks=0)))
        room = int(self._free_host_bytes - before) // (self._filler.host_bytes(candidate) - before)
        count = min(
            room, self.sizer.most_without_recompute - choices.activations.blocks_without_recompute
        )
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
            if without_device_updates.updates.update_buffers > choices.updates.update_buffers:
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
        if choices.placement.disk_offloaded_units:
            waited = max(waited, wait_for_disk(self._cost(size), choices))
        if device_updated.units:
            return choices.changed(device_updated_units=device_updated.units), waited
        no_buffers = {"update_buffers": 0, "spare_buffers": 0, "spare_blocks": 0}
        late = device_updated.moments_after_weights
        return choices.changed(
            device_updated_units=(), moments_after_weights=late, **no_buffers
        ), waited

    def _fastest(self, found: list[TimedCandidate]) -> TimedCandidate:
        """Returns the fastest candidate by simulation. It compares first the best candidate of each
        batch split, then the candidates for the use of memory within the best batch split. `found`
        is sorted by time.
        """
        # In the mapping, the fastest candidate of each batch split overwrites the slower ones,
        # because it comes last.
        by_batch_split = {candidate.batch_split: candidate for candidate in reversed(found)}
        best_first = sorted(by_batch_split.values(), key=attrgetter("seconds"))
        best_of_batch_splits = self._simulated(best_first[:SIMULATED])
        # Of candidates that are equally fast, the one with fewer rounds is taken.
        least = min(candidate.seconds for candidate in best_of_batch_splits)
        equally_fast = [
            candidate for candidate in best_of_batch_splits if candidate.seconds <= ALIKE * least
        ]
        batch_split = min(
            equally_fast, key=lambda candidate: candidate.choices.batching.rounds
        ).batch_split
        alike = [candidate for candidate in found if candidate.batch_split == batch_split]
        near = [
            candidate
            for candidate in alike
            if candidate.seconds <= WORTH_SIMULATING * alike[0].seconds
        ]
        by_kind = {
            candidate.choices.activations.disk_offloaded_block_inputs > 0: candidate
            for candidate in reversed(near)
        }
        tried = [*alike[:SIMULATED], max(near, key=_gpu_resident), *by_kind.values()]
        if self.sizer.shape.has_alike_frozen_blocks:
            # Those that live there cost nothing, so many candidates are as fast.
            as_fast = [
                candidate
                for candidate in near
                if candidate.seconds <= GPU_RESIDENT_COST * near[0].seconds
            ]
            tried.append(max(as_fast, key=_gpu_resident))
        candidates = self._simulated(sorted(tried, key=attrgetter("seconds")))
        least = min(candidate.seconds for candidate in candidates)
        whole = len(self.sizer.shape.units)

        def is_equally_fast(candidate: TimedCandidate) -> bool:
            uses = whole * candidate.choices.batching.micro_batches
            is_short = candidate.seconds < SHORT_UNIT_SECONDS * uses
            cost = (
                ALL_GPU_RESIDENT_COST
                if is_short and _gpu_resident(candidate) == whole
                else GPU_RESIDENT_COST
            )
            return candidate.seconds <= cost * least

        equally_fast = [candidate for candidate in candidates if is_equally_fast(candidate)]
        most = max(map(_gpu_resident, equally_fast))
        best = [candidate for candidate in equally_fast if _gpu_resident(candidate) == most]
        return min(best, key=attrgetter("seconds"))

    def _simulated(self, candidates: list[TimedCandidate]) -> list[TimedCandidate]:
        """Returns the candidates that are worth simulating, with simulated times. Where a plan is
        so long that simulating it would delay the app's form, the candidates are returned
        unchanged.
        """
        worth = [
            candidate
            for candidate in candidates
            if candidate.seconds <= WORTH_SIMULATING * candidates[0].seconds
        ]
        uses = max(candidate.choices.batching.micro_batches for candidate in worth) * len(
            self.sizer.shape.blocks
        )
        if uses > SIMULATED_USES:
            return worth
        return [
            replace(candidate, seconds=self._simulated_seconds(candidate)) for candidate in worth
        ]

    def _simulated_seconds(self, candidate: TimedCandidate) -> float:
        sizer = self.sizer
        micro_batch = self._micro_batch(candidate.size)
        return predicted_seconds(
            sizer.shape, candidate.choices, self._rates, micro_batch, sizer.device
        )

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

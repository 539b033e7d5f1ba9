"""The planner is in this file: from a job and the available memory, `choose` finds the choices of
the fastest plan that fits. Pure arithmetic, no torch: the fit report, the trainer and the app's
form all call the same function.

`choose` keeps what the user set and fills in `auto`:

- Strategies. A plan family (`plan_families`) is a way to take less RAM or less memory of the device
  at some cost, and a strategy (`Strategy`) gives its candidates: each way to spread a step's rows
  over micro-batches and rounds is combined with blocks without recompute, blocks kept in slots and
  update buffers, as far as the device's memory allows (`fill_memory`). This gives tens to thousands
  of candidates.
- Search. `fastest` finds the candidate with the shortest step among those of all strategies, first
  the best batch split and then the best use of memory within it: by a closed form, by deciding
  where the optimizer of each unit runs, and by simulating the plans of the few that may be the
  fastest.
- The fastest candidate is compared with itself with its blocks recorded as CUDA graphs, and with
  the fastest that keeps gradients on the device, among those with the best batch splits.
- Where no candidate fits in RAM and `engine.disk` names a folder, the moments of as many
  units as do not fit go there, or the inputs of as many blocks, and all plan families are compared
  anew.
- Where no candidate fits and rows are long, parts of the blocks run in sequence chunks
  (`engine.model.blocks`), and all is tried anew.
- Where nothing fits, the report says so. What is returned then is the fastest candidate that fits
  on the device and lacks the least RAM, else the one that takes the least memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.config.settings import AUTO
from engine.machine.disk_rates import with_disk
from engine.machine.rates import TYPICAL
from engine.machine.readings import compiler_problem
from engine.planning.fit.batch_splits import BatchSplit, batch_splits
from engine.planning.fit.buffer_sizes import host_matrix_bytes, state_bytes
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.device_memory import (
    COMFORTABLE,
    WORKER_BYTES,
    DeviceMemory,
    Sizer,
    size_of_device,
)
from engine.planning.fit.fastest import Found, fastest
from engine.planning.fit.fill_memory import ON_HOST, Candidate, MemoryFiller
from engine.planning.fit.job import Job, Target, refuse_contradictions
from engine.planning.fit.plan_families import (
    keeps_gradients_on_gpu,
    plan_families,
    with_kept_gradients,
)
from engine.planning.fit.step_times import StepTimes, TimedCandidate
from engine.planning.fit.strategy import USABLE_RESERVE_BYTES, Strategy
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.planning.shape.sequence_tiling import sequence_chunks_for
from engine.text import GIB

KEPT_GRADIENTS_GAIN = 0.92
"""Gradients are kept on the GPU for speed alone only if the step is shorter by this factor. They
leave no room for blocks that stay there, and predictions of such plans have been up to 13 % too
short (an H100, 7.6 billion parameters, 16 x 1,024 tokens).
"""
NEAR = 1.01
"""Factor by which a step may take longer than the fastest for its batch split to be tried with kept
gradients, too.
"""
GRAPHS_GAIN = 0.98
"""Factor by which a step must be shorter for blocks to be recorded as CUDA graphs."""
MOST_RECORDED = 600
"""Most passes over blocks that are recorded."""

CPU_SHARE = 0.25
"""Fraction of the free RAM below which all device memory must be for blocks to stay in their slots
and keep their activations on the CPU.
"""
CPU_RUNTIME_BYTES = round(0.8 * GIB)
HOST_RESERVE_BYTES = 3 * GIB
"""RAM that is left for the program, its data and the pages of a checkpoint."""


def choose(job: Job, target: Target, coarse: bool = False) -> Chosen:
    """Returns the choices for one run: of those that fit, the ones with the shortest step.

    For a job that does not fit, the report says so: where the device holds a candidate, the one
    that lacks the least RAM is returned, else the minimum-memory one. coarse: fewer
    candidates are tried and none is simulated but for CUDA graphs, for a table of many models and
    machines. Raises ConfigError where settings contradict each other or the model.
    """
    closest: Chosen | None = None
    least_lack = tile_tokens = 0
    for attempt in _attempts(job, target):
        if closest is not None and attempt.tile_tokens != tile_tokens:
            break  # smaller sequence chunks take less memory of the device, not of RAM
        tile_tokens = attempt.tile_tokens
        tried = _Try(job, target, coarse, attempt)
        strategies = tried.strategies()
        found = tried.fastest(strategies)
        if found is not None:
            best = tried.with_kept_gradients(found) or found.best
            candidate = Candidate(best.size, best.choices)
            lack, chosen = tried.lack(candidate), tried.chosen(candidate)
            if lack <= USABLE_RESERVE_BYTES:
                return chosen
            if closest is None or lack < least_lack:
                closest, least_lack = chosen, lack
    return closest or tried.chosen(strategies[-1].minimum_memory())


def least_choices(job: Job, target: Target) -> tuple[Chosen, ...]:
    """Returns the choices with which this job takes the least memory: with block inputs on the
    host, if settings allow that, with block inputs on the device, and with RAM and the device's
    memory equally full. Where none of them fits, no choices do. It times nothing, and raises the
    same errors as `choose`.
    """
    found = []
    for attempt in _attempts(job, target):
        if attempt.share < 1.0:
            continue
        tried = _Try(job, target, True, attempt)
        for strategy in tried.strategies():
            minimum = strategy.minimum_memory()
            found.append(tried.chosen(minimum))
            balanced = strategy.balanced(target.host_free)
            if balanced is not None:
                found.append(tried.chosen(balanced))
            if (
                minimum.choices.activations.offloaded_block_inputs
                and job.config.engine.activation_checkpointing not in ON_HOST
            ):
                on_device = minimum.choices.changed(
                    offloaded_block_inputs=False, disk_offloaded_block_inputs=0
                )
                found.append(tried.chosen(Candidate(minimum.size, on_device)))
    return tuple(found)


def _places(target: Target) -> tuple[bool, ...]:
    """Returns whether moments and block inputs may go to the disk, for each try in turn."""
    return (False, True) if target.disk_free else (False,)


def _kernels_compiled(job: Job, target: Target) -> bool:
    """Returns whether blocks run compiled, by the settings or by what this machine can do."""
    asked = job.config.engine.kernels
    if asked != AUTO:
        return asked == "compiled"
    if target.device != "cuda" or job.shape.dtype != "bfloat16":
        return False
    # This machine may be unable to compile; another machine is assumed to be able to.
    return not (target.here and compiler_problem())


class _Attempt(NamedTuple):
    """What a try to find a plan may do."""

    tile_tokens: int
    """Tokens of a sequence chunk in which parts of the blocks run; 0 where they run on whole
    rows.
    """
    offloads_to_disk: bool
    """Whether moments and block inputs that do not fit in RAM go to the disk."""
    share: float
    """Fraction of the device's memory that automatic choices fill."""


def _attempts(job: Job, target: Target) -> Iterator[_Attempt]:
    """Yields the tries in order. The whole limit is used where nothing fits comfortably, the disk
    where nothing fits in RAM, and sequence chunks where nothing fits without them.
    """
    shares = dict.fromkeys((_comfortable(job, target), 1.0))
    return itertools.starmap(
        _Attempt, itertools.product(_sequence_chunks(job, target.device), _places(target), shares)
    )


def _sequence_chunks(job: Job, device: str) -> tuple[int, ...]:
    """Returns the sizes of sequence chunks, 0 for none, for each try in turn."""
    if job.rounding:
        return (job.rounding["tile_tokens"],)
    shape = job.shape
    packed = job.config.packs and shape.packs
    is_masked = shape.attention.masked_blocks(packed, job.row_length, shape.dtype, device)
    if is_masked or any(unit.tiled is None for unit in shape.blocks):
        return (0,)
    return (0, *sequence_chunks_for(job.row_length))


class _Try:
    """One try to find a plan: its strategies, and the fastest of their candidates."""

    def __init__(self, job: Job, target: Target, coarse: bool, attempt: _Attempt):
        refuse_contradictions(job)
        compiled = job.rounding["compiled"] if job.rounding else _kernels_compiled(job, target)
        self._job = job
        self._target = target
        self._coarse = coarse
        memory = _device_memory(job, target, attempt.share)
        self._sizer = Sizer(job, memory, compiled, attempt.tile_tokens)
        rates = with_disk(target.rates or TYPICAL[target.device], job.config)
        self._times = StepTimes(self._sizer, rates)
        self._offloads_to_disk = attempt.offloads_to_disk

    def strategies(self) -> list[Strategy]:
        """Returns the usual strategy where RAM suffices, else those of the groups of plan families
        up to the first that fits with room for its block inputs, or the one that comes closest.

        Where a group fits only with its block inputs on the device, the next one is looked at too:
        with less RAM for states, block inputs may go to the host, and micro-batches may be larger.
        Where the disk takes the overflow, all are looked at: the less RAM the rest takes, the fewer
        go.
        """
        strategies: list[Strategy] = []
        found: list[Strategy] = []
        for families in plan_families(self._job, self._target, self._coarse):
            group = [self._strategy(family) for family in families]
            roomy = [each for each in group if each.has_room]
            is_enough = any(each.minimum_lack <= 0 for each in roomy)
            if (is_enough or found) and not self._offloads_to_disk:
                return [*found, *roomy]
            found = [*found, *roomy]
            strategies += group
        if found:
            return found
        # Nothing leaves the usual reserve of RAM. Units that live on the GPU take none of it, so
        # candidates are asked and not the minimum of memory.
        filled = [each for each in strategies if each.fits_in_filled_ram]
        if filled:
            return filled
        on_device = [each for each in strategies if each.fits_on_device()] or strategies
        least = min(each.minimum_lack for each in on_device)
        return [each for each in on_device if each.minimum_lack == least]

    def _strategy(self, family: PlanChoices, only: Sequence[BatchSplit] = ()) -> Strategy:
        """Returns the strategy of one plan family. only: it considers these batch splits alone."""
        job, target, coarse = self._job, self._target, self._coarse
        free = self.free_beside(family)
        disk_bytes = target.disk_free if self._offloads_to_disk else 0
        filler = MemoryFiller(self._sizer, free, coarse, family, disk_bytes)
        splits = list(only or batch_splits(job, self._sizer.device, coarse))
        return Strategy(filler, splits, free)

    def free_beside(self, choices: PlanChoices) -> int:
        """Returns the bytes of RAM that are left for block inputs beside the states of all units,
        the matrix that the host updates, the other ranks, and what the program and its data take
        (`HOST_RESERVE_BYTES`).
        """
        job, target = self._job, self._target
        states = state_bytes(job.shape, choices.changed(device_updated_units=()))
        states += host_matrix_bytes(job.shape, target.device)
        workers = (job.ranks - 1) * WORKER_BYTES[target.device]  # each rank is a process
        return target.host_free - states - workers - HOST_RESERVE_BYTES

    def lack(self, candidate: Candidate) -> int:
        """Returns the bytes of RAM that a candidate lacks; negative where RAM is left."""
        return self._sizer.block_input_bytes(*candidate) - self.free_beside(candidate.choices)

    def chosen(self, candidate: Candidate) -> Chosen:
        """Returns the result of `choose` for a candidate."""
        return Chosen(
            choices=candidate.choices,
            micro_batch_size=candidate.size,
            loss_chunk=self._sizer.loss_chunk,
            gpu_items=self._sizer.items(*candidate),
            offloaded_input_bytes=self._sizer.block_input_bytes(*candidate),
        )

    def fastest(self, strategies: Sequence[Strategy]) -> Found | None:
        """Returns the fastest candidate of the strategies that leaves RAM free; where none does,
        the fastest that uses what it may of the reserve, else the fastest of those that lack the
        least. None where no candidate fits on the device.
        """
        lacks = [
            (strategy.lack(candidate), candidate)
            for strategy in strategies
            for candidate in strategy.candidates
        ]
        if not lacks:
            return None
        least = min(lack for lack, _ in lacks)
        most = next((limit for limit in (0, USABLE_RESERVE_BYTES) if least <= limit), least)
        candidates = [candidate for lack, candidate in lacks if lack <= most]
        units = len(self._sizer.shape.units)
        found = fastest(candidates, self._times, units, simulates=not self._coarse)
        return found._replace(best=self._recorded(found.best))

    def with_kept_gradients(self, found: Found) -> TimedCandidate | None:
        """Returns the fastest candidate with one of the best batch splits that keeps gradients on
        the GPU; None where it is not clearly faster than the best without, where this one keeps
        them there already, accumulates on the host or uses the disk, where the settings or the
        device decide, and for a table (`coarse`). Kept gradients take 2 bytes a
        parameter less of RAM, and those of units that the device updates never cross the bus.
        """
        best, choices = found.best, found.best.choices
        unfit = choices.gradients.gradients_on_gpu or choices.gradients.main_grad == MainGrad.HOST
        if (
            unfit
            or self._offloads_to_disk
            or self._coarse
            or keeps_gradients_on_gpu(self._job, self._target) is not None
        ):
            return None
        splits = {
            BatchSplit(each.size, each.choices.batching.micro_batches, each.choices.batching.rounds)
            for each in found.near
            if each.seconds <= NEAR * found.near[0].seconds
        }
        strategy = self._strategy(with_kept_gradients(choices), sorted(splits))
        kept = self.fastest([strategy]) if strategy.has_room else None
        if kept is None:
            return None
        return kept.best if kept.best.seconds <= KEPT_GRADIENTS_GAIN * best.seconds else None

    def _recorded(self, candidate: TimedCandidate) -> TimedCandidate:
        """Returns the candidate with its blocks recorded as CUDA graphs, where that is possible and
        makes its step shorter.
        """
        sizer, blocks = self._sizer, len(self._sizer.shape.blocks)
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
        recorded = self._times.simulated(replace(candidate, choices=choices))
        before = self._times.simulated(candidate)
        return recorded if recorded.seconds <= GRAPHS_GAIN * before.seconds else candidate


def _comfortable(job: Job, target: Target) -> float:
    """Returns the share of the device's memory that automatic choices fill."""
    limit = job.config.engine.within_cap(target.gpu_limit or 0)
    return COMFORTABLE[size_of_device(target.device, limit)]


def _device_memory(job: Job, target: Target, share: float) -> DeviceMemory:
    if target.device == "cpu":
        planes = job.shape.states.host_bytes // job.nodes_per_replica
        limit = (target.host_free - planes) // job.ranks - CPU_RUNTIME_BYTES
        keeping = min(COMFORTABLE["cpu"] * limit, CPU_SHARE * target.host_free / job.ranks)
        return DeviceMemory("cpu", limit, share * limit, keeping)
    if target.gpu_limit is None:
        raise ValueError("gpu_limit is needed for a GPU")
    limit = job.config.engine.within_cap(target.gpu_limit)
    return DeviceMemory(target.device, limit, share * limit, share * limit)

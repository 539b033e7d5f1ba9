"""The planner is in this file: from a job and the available memory, `choose` finds the choices of
the fastest plan that fits. Pure arithmetic, no torch: the fit report, the trainer and the app's
form all call the same function.

`choose` keeps what the user set and fills in `auto`:

- Candidates. Each way to spread a step's rows over micro-batches and rounds (`batch_splits`) is
  combined with blocks without recompute, blocks kept in slots and update buffers in several
  candidates, as far as the device's memory allows (`fill_memory`). This gives a few hundred
  candidates.
- Bounds. A closed form (`cost_model.step_seconds`) gives a lower bound on the step time of each
  candidate, as if the step waited for no update. Candidates are examined in order of this bound,
  lowest first. For each, `optimizer_placement` decides where the optimizer of each unit runs,
  which gives its time. The search stops at the first bound that is clearly above the best time so
  far.
- Simulation. The closed form is wrong by a few per cent where the bus limits the step, so the plans
  of the best few candidates are built and simulated (`predicted_seconds`). The one with the
  shortest simulated step is returned.
- Where no candidate fits in RAM and `engine.disk` names a folder, the moments of as many
  units as do not fit go there, or the inputs of as many blocks, and all plan families are compared
  anew.
- Where no candidate fits and rows are long, parts of the blocks run in sequence chunks
  (`engine.model.blocks`), and all is tried anew.
- Where no candidate fits, the one that takes the least memory is returned. The report
  then says that it does not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from engine.config.settings import AUTO
from engine.machine.disk_rates import with_disk
from engine.machine.rates import TYPICAL
from engine.machine.read_machine import compiler_problem
from engine.planning.fit.buffer_sizes import state_bytes
from engine.planning.fit.candidates import (
    BatchSplit,
    batch_splits,
    keeps_gradients_on_gpu,
    plan_families,
)
from engine.planning.fit.device_memory import (
    COMFORTABLE,
    WORKER_BYTES,
    DeviceMemory,
    Sizer,
    size_of_device,
)
from engine.planning.fit.fill_memory import ON_HOST, Candidate, MemoryFiller, OutsideRam
from engine.planning.fit.job import Job, Target, refuse_contradictions
from engine.planning.fit.planner import (
    ALIKE,
    WORTH_SIMULATING,
    Chosen,
    Planner,
    TimedCandidate,
    fastest_of,
)
from engine.planning.schedule.choices import Gradients, Placement, PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.planning.shape.sequence_tiling import sequence_chunks_for
from engine.text import GIB

KEPT_GRADIENTS_GAIN = 0.92
"""Gradients that would take memory of their own on the device are kept on the GPU for speed alone
only if the step is shorter by this factor. They leave no room for blocks that stay there, and
predictions of such plans have been up to 13 % too short (an H100, 7.6 billion parameters, 16 x
1,024 tokens).
"""

CPU_SHARE = 0.25
"""Fraction of the free RAM below which all device memory must be for blocks to stay in their slots
and keep their activations on the CPU.
"""
CPU_RUNTIME_BYTES = round(0.8 * GIB)
HOST_RESERVE_BYTES = 3 * GIB
"""RAM that is left free when block inputs are kept there for speed alone."""


def choose(job: Job, target: Target, coarse: bool = False) -> Chosen:
    """Returns the choices for one run: of those that fit, the ones with the shortest step.

    For a job that does not fit, the minimum-memory choices are returned, and the report says that
    they do not fit. coarse: fewer candidates are tried and none is simulated, for a table of many
    models and machines. Raises ConfigError where settings contradict each other or the model.
    """
    over: Chosen | None = None
    for attempt in _attempts(job, target):
        if over is not None and attempt.tile_tokens:
            break  # sequence chunks take less memory of the device, not of RAM
        maker = _PlannerMaker(job, target, coarse, attempt)
        planners = maker.planners()
        least = min(planner.least_seconds for planner in planners)
        if least < math.inf:
            worth = [each for each in planners if each.least_seconds <= WORTH_SIMULATING * least]
            found = [(planner, planner.best()) for planner in worth]
            best = fastest_of([timed for _, timed in found])
            planner = next(planner for planner, timed in found if timed is best)
            kept_gradients = maker.with_kept_gradients(best)
            if kept_gradients is not None and kept_gradients.has_room:
                other = kept_gradients.best()
                gain = (
                    ALIKE
                    if other.choices.gradients.gradients_in_main_grads
                    else KEPT_GRADIENTS_GAIN
                )
                if other.seconds <= gain * best.seconds:
                    planner, best = kept_gradients, other
            candidate = Candidate(best.size, best.choices)
            chosen = planner.chosen(candidate)
            if planner.is_in_ram(candidate):
                return chosen
            over = over or chosen
    return over or planners[-1].chosen(planners[-1].minimum_memory())


def least_choices(job: Job, target: Target) -> tuple[Chosen, ...]:
    """Returns the choices with which this job takes the least memory: with block inputs on the
    host, if settings allow that, and with block inputs on the device. Where neither fits, no
    choices do. The function is about a thousand times as fast as `choose`, and raises the same
    errors.
    """
    found = []
    for attempt in _attempts(job, target):
        if attempt.share < 1.0:
            continue
        for planner in _PlannerMaker(job, target, True, attempt).planners():
            minimum = planner.minimum_memory()
            found.append(planner.chosen(minimum))
            balanced = planner.balanced(target.host_free)
            if balanced is not None:
                found.append(planner.chosen(balanced))
            if (
                minimum.choices.activations.offloaded_block_inputs
                and job.config.engine.activation_checkpointing not in ON_HOST
            ):
                on_device = minimum.choices.changed(
                    offloaded_block_inputs=False, disk_offloaded_block_inputs=0
                )
                found.append(planner.chosen(Candidate(minimum.size, on_device)))
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
    is_masked = shape.masked_blocks(job.config.packs and shape.packs, job.row_length, device)
    if is_masked or any(unit.tiled is None for unit in shape.blocks):
        return (0,)
    return (0, *sequence_chunks_for(job.row_length))


class _PlannerMaker:
    """Makes the planners of one try."""

    def __init__(self, job: Job, target: Target, coarse: bool, attempt: _Attempt):
        refuse_contradictions(job)
        compiled = job.rounding["compiled"] if job.rounding else _kernels_compiled(job, target)
        self._job = job
        self._target = target
        self._coarse = coarse
        memory = _device_memory(job, target, attempt.share)
        self._sizer = Sizer(job, memory, compiled, attempt.tile_tokens)
        self._offloads_to_disk = attempt.offloads_to_disk
        self._allows_gpu_resident = True
        """Whether units may live on the device."""

    def planners(self) -> list[Planner]:
        """Returns the planners of the plan families that the job needs (`_of_families`). On a
        small GPU, memory does more for activations, so units live there only where the job does not
        fit
        otherwise.
        """
        memory = self._sizer.memory
        is_small = size_of_device(memory.device, memory.limit) == "small"
        if is_small and not self._offloads_to_disk:  # what lives on the GPU need not go to the disk
            self._allows_gpu_resident = False
            planners = self._of_families()
            if any(planner.has_room for planner in planners):
                return planners
            self._allows_gpu_resident = True
        return self._of_families()

    def _of_families(self) -> list[Planner]:
        """Returns the usual planner where RAM suffices, else those of the first group of plan
        families that fits, or the one that comes closest.

        Where a group fits only with its block inputs on the device, the next one is looked at too:
        with less RAM for states, block inputs may go to the host, and micro-batches may be larger.
        Where the disk takes the overflow, all are looked at: the less RAM the rest takes, the fewer
        go.
        """
        planners: list[Planner] = []
        found: list[Planner] = []
        for families in plan_families(self._job, self._target, self._coarse):
            group = [self._planner(family) for family in families]
            roomy = [each for each in group if each.has_room]
            is_enough = any(each.free_after_block_inputs >= 0 for each in roomy)
            if (is_enough or found) and not self._offloads_to_disk:
                return [*found, *roomy]
            found = [*found, *roomy]
            planners += group
        if found:
            return found
        # Units that live on the GPU leave RAM free that no minimum of memory knows of.
        filled = [each for each in planners if each.fits_in_filled_ram]
        if filled:
            return filled
        on_device = [each for each in planners if each.fits_on_device()] or planners
        most = max(each.free_after_block_inputs for each in on_device)
        return [each for each in on_device if each.free_after_block_inputs == most]

    def with_kept_gradients(self, candidate: TimedCandidate) -> Planner | None:
        """Returns the planner that keeps gradients on the GPU and has the batch split of
        `candidate`; None where they are kept on the GPU already, or the settings or the device
        forbid it. Kept gradients take 2 bytes a parameter less of RAM, and those of units that the
        device updates never cross the bus. In the memory of accumulators that stay on the device
        anyway, they cost nothing.
        """
        choices = candidate.choices
        unfit = choices.gradients.gradients_on_gpu or choices.gradients.main_grad == MainGrad.HOST
        if (
            unfit
            or self._offloads_to_disk
            or self._coarse
            or keeps_gradients_on_gpu(self._job, self._target) is not None
        ):
            return None
        family = PlanChoices(
            sharding=choices.sharding,
            placement=Placement(gpu_resident_apart=choices.placement.gpu_resident_apart),
            gradients=Gradients(gradients_on_gpu=True),
        )
        return self._planner(
            family,
            BatchSplit(candidate.size, choices.batching.micro_batches, choices.batching.rounds),
        )

    def _planner(self, family: PlanChoices, only: BatchSplit | None = None) -> Planner:
        """Returns the planner of one plan family. only: it considers this batch split alone."""
        job, target, coarse = self._job, self._target, self._coarse
        free = target.host_free - state_bytes(job.shape, family) - HOST_RESERVE_BYTES
        free -= (job.ranks - 1) * WORKER_BYTES[target.device]  # each rank is a process
        elsewhere = OutsideRam(
            self._allows_gpu_resident, target.disk_free if self._offloads_to_disk else 0
        )
        filler = MemoryFiller(self._sizer, free, coarse, family, elsewhere)
        splits = list(batch_splits(job, self._sizer.device, coarse)) if only is None else [only]
        rates = with_disk(target.rates or TYPICAL[target.device], job.config)
        return Planner(filler, splits, rates, free, coarse)


def _comfortable(job: Job, target: Target) -> float:
    """Returns the share of the device's memory that automatic choices fill."""
    limit = job.config.engine.within_cap(target.gpu_limit or 0)
    return COMFORTABLE[size_of_device(target.device, limit)]


def _device_memory(job: Job, target: Target, share: float) -> DeviceMemory:
    if target.device == "cpu":
        planes = job.shape.host_bytes // job.nodes_per_replica
        limit = (target.host_free - planes) // job.ranks - CPU_RUNTIME_BYTES
        keeping = min(COMFORTABLE["cpu"] * limit, CPU_SHARE * target.host_free / job.ranks)
        return DeviceMemory("cpu", limit, share * limit, keeping)
    if target.gpu_limit is None:
        raise ValueError("gpu_limit is needed for a GPU")
    limit = job.config.engine.within_cap(target.gpu_limit)
    return DeviceMemory(target.device, limit, share * limit, share * limit)

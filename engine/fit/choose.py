"""The planner is in this file: from a job and the available memory, `choose` finds the choices of
the fastest plan that fits. Pure arithmetic, no torch: the fit report, the trainer and the app's
form all call the same function.

`choose` keeps what the user set and fills in `auto`:

- Candidates. Each way to spread a step's rows over micro-batches and rounds (`spreads`) is combined
  with kept blocks, resident blocks and update buffers in several ways, as far as the device's
  memory allows (`fill_memory`). This gives a few hundred candidates.
- Bounds. A closed form gives a lower bound on the step time of each candidate, as if the step
  waited for no update (`cost.step_seconds`). Candidates are examined in order of this bound, lowest
  first. For each, `update_placement` decides where the optimizer of each unit runs, which gives its
  time. The search stops at the first bound that is clearly above the best time so far.
- Simulation. The closed form is wrong by a few per cent where the bus limits the step, so the plans
  of the best few candidates are built and simulated (`predict`). The one with the shortest
  simulated step is returned.
- Where no candidate fits, the leanest one, which takes the least memory, is returned. The report
  then says that it does not fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

from engine.config.settings import AUTO
from engine.fit.cost import Cost, MicroBatch, step_seconds
from engine.fit.fill_memory import ON_HOST, Candidate, MemoryFiller
from engine.fit.frames import frames_of, parking
from engine.fit.job import Job, Target, refuse_contradictions
from engine.fit.memory_items import Item
from engine.fit.predict import predicted_seconds
from engine.fit.sizes import COMFORTABLE, DeviceMemory, Sizer, size_of_device, state_bytes
from engine.fit.spreads import Spread, spreads
from engine.fit.update_placement import choose_homes
from engine.machine.rates import TYPICAL, Rates
from engine.machine.read_machine import compiler_problem
from engine.plan.choices import PlanChoices
from engine.plan.ops import GradientSum
from engine.words import GIB

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
PARKING_GAIN = 0.92
"""Gradients that would take memory of their own on the device are parked for speed alone only if
the step is shorter by this factor. They leave no room for blocks that stay there, and predictions
of such plans have been up to 13 % too short (an H100, 7.6 billion parameters, 16 x 1,024 tokens).
"""

CPU_SHARE = 0.25
"""On the CPU, blocks stay resident and keep their activations while all device memory is below this
share of the free RAM.
"""
CPU_RUNTIME_BYTES = round(0.8 * GIB)
HOST_RESERVE_BYTES = 3 * GIB
"""This much RAM is left free when boundaries are kept there for speed alone."""
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
    """They are the items of device memory. On the CPU they are the same buffers, in RAM."""
    host_boundary_bytes: int

    @property
    def rounding(self) -> dict[str, Any]:
        """Returns the choices that affect how results are rounded. A resumed run passes them to
        `choose` again.
        """
        return {
            "micro_batch_size": self.micro_batch_size,
            "loss_chunk": self.loss_chunk,
            "gradient_sum": self.choices.gradient_sum.value,
            "rounds": self.choices.rounds,
            "compiled": self.choices.compiled,
            "device_homes": list(self.choices.device_homes),
        }

    def pad_up_to(self, max_seq_len: int) -> int:
        """Returns the length that rows may be padded to, since a block is compiled for few lengths;
        0 where it is not compiled.
        """
        return max_seq_len if self.choices.compiled else 0

    @property
    def gpu_bytes(self) -> int:
        return sum(item.bytes for item in self.gpu_items)


def choose(job: Job, target: Target, quick: bool = False) -> Chosen:
    """Returns the choices for one run: of those that fit, the ones with the shortest step.

    For a job that does not fit, the leanest choices are returned, and the report says that they do
    not fit. quick: fewer ways are tried and none is simulated, for a table of many models and
    machines. Raises ConfigError where settings contradict each other or the model.
    """
    over: Chosen | None = None
    # The whole limit is used where nothing fits comfortably.
    for share in (_comfortable(job, target), 1.0):
        maker = _PlannerMaker(job, target, quick, share)
        planners = maker.planners()
        least = min(planner.least_seconds for planner in planners)
        if least < math.inf:
            worth = [each for each in planners if each.least_seconds <= WORTH_SIMULATING * least]
            found = [(planner, planner.best()) for planner in worth]
            planner, best = min(found, key=lambda each: each[1].seconds)
            parked = maker.parked_like(best)
            if parked is not None and parked.has_room:
                way = parked.best()
                gain = ALIKE if way.choices.gradients_in_sums else PARKING_GAIN
                if way.seconds <= gain * best.seconds:
                    planner, best = parked, way
            candidate = Candidate(best.size, best.choices)
            chosen = planner.chosen(candidate)
            if planner.is_in_ram(candidate):
                return chosen
            over = over or chosen
    return over or planners[-1].chosen(planners[-1].leanest())


def least_choices(job: Job, target: Target) -> tuple[Chosen, ...]:
    """Returns the choices with which this job takes the least memory: with boundaries on the host,
    if settings allow that, and with boundaries on the device. Where neither fits, no choices do.
    The function is about a thousand times as fast as `choose`, and raises the same errors.
    """
    found = []
    for planner in _PlannerMaker(job, target, quick=True, share=1.0).planners():
        lean = planner.leanest()
        found.append(planner.chosen(lean))
        if lean.choices.host_boundaries and job.config.engine.save_level not in ON_HOST:
            on_device = replace(lean.choices, host_boundaries=False)
            found.append(planner.chosen(Candidate(lean.size, on_device)))
    return tuple(found)


def _kernels_compiled(job: Job, target: Target) -> bool:
    """Tells whether blocks run compiled, by the settings or by what this machine can do."""
    asked = job.config.engine.kernels
    if asked != AUTO:
        return asked == "compiled"
    if target.device != "cuda" or job.shape.dtype != "bfloat16":
        return False
    # This machine may be unable to compile; another machine is assumed to be able to.
    return not (target.here and compiler_problem())


class _PlannerMaker:
    """A `_PlannerMaker` makes the planners of one job. share: automatic choices fill this share of
    the device's memory.
    """

    def __init__(self, job: Job, target: Target, quick: bool, share: float):
        refuse_contradictions(job)
        if job.rounding:
            compiled = job.rounding.get("compiled", False)
        else:
            compiled = _kernels_compiled(job, target)
        self._job = job
        self._target = target
        self._quick = quick
        self._sizer = Sizer(job, _device_memory(job, target, share), compiled)

    def planners(self) -> list[_Planner]:
        """Returns the planners of the ways to use RAM that the job needs: the usual one where RAM
        suffices, else those of the first group that fits, or the one that comes closest.

        Where a group fits only with its boundaries on the device, the next one is looked at too:
        with less RAM for states, boundaries may go to the host, and micro-batches may be larger.
        """
        planners: list[_Planner] = []
        found: list[_Planner] = []
        for frames in frames_of(self._job, self._target, self._quick):
            group = [self._planner(frame) for frame in frames]
            roomy = [each for each in group if each.has_room]
            is_enough = any(each.free_after_boundaries >= 0 for each in roomy)
            if is_enough or found:
                return [*found, *roomy]
            found = roomy
            planners += group
        if found:
            return found
        on_device = [each for each in planners if each.fits_on_device()] or planners
        most = max(each.free_after_boundaries for each in on_device)
        return [each for each in on_device if each.free_after_boundaries == most]

    def parked_like(self, way: _Way) -> _Planner | None:
        """Returns the planner that parks gradients and has the spread of `way`; None where they are
        parked already, or the settings or the device forbid it. Parked gradients take 2 bytes a
        parameter less of RAM, and those of units that the device updates never cross the bus. In
        the memory of sums that stay on the device anyway, they cost nothing.
        """
        choices = way.choices
        unfit = choices.parked_gradients or choices.gradient_sum == GradientSum.HOST
        if unfit or self._quick or parking(self._job, self._target) is not None:
            return None
        frame = PlanChoices(parked_gradients=True)
        return self._planner(frame, Spread(way.size, choices.micro_batches, choices.rounds))

    def _planner(self, frame: PlanChoices, only: Spread | None = None) -> _Planner:
        """Returns the planner of one frame. only: it considers this spread alone."""
        job, target, quick = self._job, self._target, self._quick
        free = target.host_free - state_bytes(job.shape, frame) - HOST_RESERVE_BYTES
        filler = MemoryFiller(self._sizer, free, quick, frame)
        ways = list(spreads(job, self._sizer.device, quick)) if only is None else [only]
        return _Planner(filler, ways, target.rates or TYPICAL[target.device], free, quick)


def _comfortable(job: Job, target: Target) -> float:
    """Returns the share of the device's memory that automatic choices fill."""
    limit = job.config.engine.within_cap(target.gpu_limit or 0)
    return COMFORTABLE[size_of_device(target.device, limit)]


def _device_memory(job: Job, target: Target, share: float) -> DeviceMemory:
    if target.device == "cpu":
        limit = target.host_free - job.shape.host_bytes - CPU_RUNTIME_BYTES
        keeping = min(COMFORTABLE["cpu"] * limit, CPU_SHARE * target.host_free)
        return DeviceMemory("cpu", limit, share * limit, keeping)
    if target.gpu_limit is None:
        raise ValueError("gpu_limit is needed for a GPU")
    limit = job.config.engine.within_cap(target.gpu_limit)
    return DeviceMemory(target.device, limit, share * limit, share * limit)


@dataclass(frozen=True)
class _Way:
    """A `_Way` is a candidate with the predicted seconds of its step. `size` is the rows of a
    micro-batch.
    """

    seconds: float
    size: int
    choices: PlanChoices

    @property
    def spread(self) -> tuple[int, int]:
        """Returns the micro-batch size and the rounds, which identify the spread of a way."""
        return self.size, self.choices.rounds


class _Planner:
    """A `_Planner` compares the candidates of one job.

    free_host_bytes: bytes of RAM that may hold boundaries which would also fit on the device.
    """

    def __init__(
        self,
        filler: MemoryFiller,
        ways: list[Spread],
        rates: Rates,
        free_host_bytes: int,
        quick: bool,
    ):
        self.sizer = filler.sizer
        self._filler = filler
        self._spreads = ways
        self._rates = rates
        self._free_host_bytes = free_host_bytes
        self._quick = quick
        self._costs: dict[int, Cost] = {}

    @property
    def least_seconds(self) -> float:
        """Returns the time of the fastest way that fits, in closed form; infinity where none
        fits.
        """
        return self._found[0].seconds if self._found else math.inf

    def best(self) -> _Way:
        """Returns the fastest way that fits. There must be one."""
        return self._found[0] if self._quick else self._fastest(self._found)

    @functools.cached_property
    def _found(self) -> list[_Way]:
        return self._timed(self._spacious or self._closest)

    @property
    def has_room(self) -> bool:
        """Tells whether a candidate fits, and leaves RAM free beside the states, the program and
        the boundaries.
        """
        if self._free_host_bytes < 0:
            return False
        lean = self.leanest()
        if self.free_after_boundaries >= 0 and self.sizer.fits(*lean):  # the most common case
            return True
        return bool(self._spacious)

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
    def free_after_boundaries(self) -> int:
        """Returns the bytes of RAM that remain beside the states, the program and the boundaries of
        the leanest candidate. It is negative where RAM is short.
        """
        return self._free_host_bytes - self._filler.host_bytes(self.leanest())

    def fits_on_device(self) -> bool:
        """Tells whether the device holds the leanest candidate."""
        return self.sizer.fits(*self.leanest(), self.sizer.memory.limit)

    def leanest(self) -> Candidate:
        """Returns the candidate that takes the least memory. More rounds would take still less, but
        they round the sums once per round, which is done only on request.
        """
        ways = self._spreads
        fewest_rounds = ways[0].rounds
        smallest = min((way for way in ways if way.rounds == fewest_rounds), key=attrgetter("size"))
        return self._filler.leanest(smallest)

    def chosen(self, candidate: Candidate) -> Chosen:
        """Returns the result of `choose` for a candidate."""
        return Chosen(
            choices=candidate.choices,
            micro_batch_size=candidate.size,
            loss_chunk=self.sizer.loss_chunk,
            gpu_items=self.sizer.items(*candidate),
            host_boundary_bytes=self._filler.host_bytes(candidate),
        )

    @functools.cached_property
    def _fitting(self) -> list[Candidate]:
        """The list holds the candidates that fit on the device, by spread."""
        job = self.sizer.job
        # A sum that is rounded once per round is used only if the settings request it.
        exact = not job.rounding and job.config.engine.rounds == AUTO
        fitting: list[Candidate] = []
        for spread in self._spreads:
            lean = self._filler.leanest(spread)
            if not self.sizer.fits(*lean):
                continue
            fitting += [
                candidate
                for candidate in self._filler.filled(lean)
                if not (exact and candidate.choices.gradient_sum == GradientSum.HOST)
            ]
            if self.sizer.device == "cpu":  # sizes are tried in order of preference
                break
        return fitting

    def _timed(self, fitting: Sequence[Candidate]) -> list[_Way]:
        """Returns the candidates with their times and with the place where each optimizer runs,
        fastest first. Candidates that would be clearly slower even if they waited for no update are
        left out.
        """
        bounds = [
            (step_seconds(self._cost(size), choices, waited=0.0), (size, choices))
            for size, choices in fitting
        ]
        least = math.inf
        found = []
        for bound, (size, without_homes) in sorted(bounds, key=itemgetter(0)):
            if bound > WORTH_SIMULATING * least:
                break
            choices, waited = self._with_homes(size, without_homes)
            seconds = step_seconds(self._cost(size), choices, waited)
            found.append(_Way(seconds, size, choices))
            least = min(least, seconds)
        without_doubles = dict.fromkeys(found)
        return sorted(without_doubles, key=attrgetter("seconds"))

    def _with_homes(self, size: int, choices: PlanChoices) -> tuple[PlanChoices, float]:
        """Returns the choices with the units whose optimizer runs on the device, and how long the
        first forward pass waits for updates.
        """
        homes, waited = choose_homes(self._cost(size), choices)
        if self.sizer.job.rounding:  # a resumed run keeps each optimizer where it was
            return choices, waited
        if homes:
            return replace(choices, device_homes=homes), waited
        without_buffers = replace(
            choices, device_homes=(), update_buffers=0, spare_buffers=0, spare_blocks=0
        )
        return without_buffers, waited

    def _fastest(self, found: list[_Way]) -> _Way:
        """Returns the fastest way by simulation. It compares first the best way of each spread,
        then the ways to use memory within the best spread. `found` is sorted by time.
        """
        # In the mapping, the fastest way of each spread overwrites the slower ones, because it
        # comes last.
        by_spread = {way.spread: way for way in reversed(found)}
        best_first = sorted(by_spread.values(), key=attrgetter("seconds"))
        best_of_spreads = self._simulated(best_first[:SIMULATED])
        # Of ways that are equally fast, the one with fewer rounds is taken.
        least = min(way.seconds for way in best_of_spreads)
        equally_fast = [way for way in best_of_spreads if way.seconds <= ALIKE * least]
        spread = min(equally_fast, key=lambda way: way.choices.rounds).spread
        alike = [way for way in found if way.spread == spread]
        return min(self._simulated(alike[:SIMULATED]), key=attrgetter("seconds"))

    def _simulated(self, ways: list[_Way]) -> list[_Way]:
        """Returns the ways that are worth simulating, with simulated times. Where a plan is so long
        that simulating it would delay the app's form, the ways are returned unchanged.
        """
        worth = [way for way in ways if way.seconds <= WORTH_SIMULATING * ways[0].seconds]
        uses = max(way.choices.micro_batches for way in worth) * len(self.sizer.shape.blocks)
        if uses > SIMULATED_USES:
            return worth
        return [replace(way, seconds=self._simulated_seconds(way)) for way in worth]

    def _simulated_seconds(self, way: _Way) -> float:
        sizer = self.sizer
        micro_batch = self._micro_batch(way.size)
        return predicted_seconds(sizer.shape, way.choices, self._rates, micro_batch, sizer.device)

    def _micro_batch(self, size: int) -> MicroBatch:
        sizer = self.sizer
        varlen = sizer.shape.varlen(sizer.packed, sizer.device)
        return MicroBatch(size, sizer.row_length, varlen)

    def _cost(self, size: int) -> Cost:
        if size not in self._costs:
            sizer = self.sizer
            micro_batch = self._micro_batch(size)
            self._costs[size] = Cost(sizer.shape, self._rates, micro_batch, sizer.compiled)
        return self._costs[size]

"""From a configuration and the memory there is to the choices of a plan, with every device byte
named.

`choose` keeps what the user set and fills in `auto`. Pure arithmetic, no torch: the fit report, the
trainer and the app's form all ask the same function.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError
from engine.fit.cost import Cost, step_seconds
from engine.fit.memory_items import Item
from engine.fit.predict import predicted_seconds
from engine.fit.sizes import COMFORTABLE, Sizer, host_boundary_bytes
from engine.fit.update_placement import choose_homes
from engine.machine.rates import TYPICAL, Rates
from engine.machine.read_machine import compiler_problem
from engine.model.shape import ModelShape
from engine.plan.buffers import EMBED
from engine.plan.choices import PlanChoices
from engine.plan.ops import GradientSum
from engine.words import GIB

SATURATING_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of a micro-batch that keep the device busy; more only takes memory."""
SIMULATED, SIMULATED_USES = 3, 250
"""Candidates whose plans are simulated, if a step uses its blocks at most so often in forward: some
hundredths of a second.
"""
WORTH_SIMULATING = 1.05
"""Of the shortest step by the closed form: it is not wrong by more."""
LEAST_TOKENS, MOST_ROUNDS = 4096, 32
"""Of a round in which activations are kept, and rounds of a step."""

UPDATE_BUFFERS, SPARE_BUFFERS = (2, 4, 8), (4, 8)
"""Numbers that are tried, beside as many as lie over fp32 sums; spare ones take the place of
activations between two steps.
"""

CPU_SHARE = 0.25
"""On the CPU, blocks stay resident and keep their activations while all device memory is below this
share of the free RAM.
"""
CPU_RUNTIME_BYTES = round(0.8 * GIB)
HOST_RESERVE_BYTES = 3 * GIB
"""RAM that is left when boundaries are kept there for speed alone."""


@dataclass(frozen=True)
class Chosen:
    """`choose`'s answer: the plan's choices, the two sizes that go with them, and what they take."""

    choices: PlanChoices
    micro_batch_size: int
    loss_chunk: int
    gpu_items: tuple[Item, ...]
    """Device memory by item; on the CPU the same buffers, in RAM."""
    host_boundary_bytes: int

    @property
    def rounding(self) -> dict[str, Any]:
        """The choices that results depend on, by rounding: a resumed run gives them to `choose`
        again.
        """
        return {
            "micro_batch_size": self.micro_batch_size,
            "loss_chunk": self.loss_chunk,
            "gradient_sum": self.choices.gradient_sum.value,
            "rounds": self.choices.rounds,
            "compiled": self.choices.compiled,
            "device_homes": list(self.choices.device_homes),
        }

    @property
    def gpu_bytes(self) -> int:
        return sum(item.bytes for item in self.gpu_items)


def choose(
    shape: ModelShape,
    config: TrainConfig,
    device: Literal["cpu", "cuda"],
    gpu_limit: int | None,
    host_free: int,
    row_length: int,
    rounding: Mapping[str, Any] | None = None,
    rates: Rates | None = None,
    here: bool = True,
    quick: bool = False,
) -> Chosen:
    """Choices for one run: of those that fit, the ones with the shortest step.

    gpu_limit: bytes of GPU memory that this process may take in all, CUDA context included (`cuda`
    only; engine.gpu_memory_gib lowers it). host_free: bytes of RAM before the planes are allocated.
    row_length: tokens of the longest row. rounding: `Chosen.rounding` of the session that this one
    continues bit for bit. rates: of this machine, where they were measured. here: on this machine,
    and none of which it is assumed that kernels can be compiled. quick: fewer ways are tried and
    none is simulated, for a table of many models and machines. What does not fit is still answered,
    with the leanest choices; the report judges it. Raises ConfigError where settings contradict
    each other or the model.
    """
    planner = _planner(
        shape, config, device, gpu_limit, host_free, row_length, rounding or {}, rates, here, quick
    )
    return planner.chosen(*planner.best())


def least_choices(
    shape: ModelShape,
    config: TrainConfig,
    device: Literal["cpu", "cuda"],
    gpu_limit: int | None,
    host_free: int,
    row_length: int,
    here: bool = True,
) -> tuple[Chosen, ...]:
    """What takes least of this job: with boundaries on the host where settings allow that, and
    without. Where neither fits, no choices do. Arguments and errors as for `choose`; some thousand
    times as fast.
    """
    planner = _planner(shape, config, device, gpu_limit, host_free, row_length, {}, None, here)
    lean = planner.leanest()
    found = [lean]
    if lean[1].host_boundaries and config.engine.save_level != "boundary_host":
        found.append((lean[0], replace(lean[1], host_boundaries=False)))
    return tuple(planner.chosen(*way) for way in found)


def kernels_compiled(
    shape: ModelShape, config: TrainConfig, device: str, here: bool = True
) -> bool:
    """Whether blocks run compiled, as the settings say or as this machine can."""
    asked = config.engine.kernels
    if asked != AUTO:
        return asked == "compiled"
    return device == "cuda" and shape.dtype == "bfloat16" and not (here and compiler_problem())


def _planner(
    shape: ModelShape,
    config: TrainConfig,
    device: str,
    gpu_limit: int | None,
    host_free: int,
    row_length: int,
    rounding: Mapping[str, Any],
    rates: Rates | None,
    here: bool,
    quick: bool = False,
) -> _Planner:
    if device == "cuda" and gpu_limit is None:
        raise ValueError("gpu_limit is needed for a GPU")
    _refuse_contradictions(shape, config, row_length)
    if device == "cpu":
        limit = host_free - shape.host_bytes - CPU_RUNTIME_BYTES
        keeping = min(COMFORTABLE[device] * limit, CPU_SHARE * host_free)
    else:
        limit = config.engine.within_cap(gpu_limit)
        keeping = COMFORTABLE[device] * limit
    compiled = (
        rounding.get("compiled", False)
        if rounding
        else kernels_compiled(shape, config, device, here)
    )
    sizer = Sizer(shape, config, device, limit, keeping, row_length, compiled, rounding)
    return _Planner(
        sizer,
        config,
        rates or TYPICAL[device],
        host_free - shape.host_bytes - HOST_RESERVE_BYTES,
        quick,
    )


@dataclass(frozen=True)
class _Way:
    """A candidate, with the seconds that a step would take."""

    seconds: float
    size: int
    choices: PlanChoices


class _Planner:
    """Compares the ways to spread a step's rows over micro-batches and rounds, each with its memory
    used as well as it can be. free_host_bytes: bytes of RAM for boundaries that would also find
    space on the device.
    """

    def __init__(
        self,
        sizer: Sizer,
        config: TrainConfig,
        rates: Rates,
        free_host_bytes: int,
        quick: bool = False,
    ):
        self.sizer, self.config, self.rates, self.free_host_bytes, self.quick = (
            sizer,
            config,
            rates,
            free_host_bytes,
            quick,
        )
        self._costs: dict[int, Cost] = {}

    def best(self) -> tuple[int, PlanChoices]:
        """(rows of a micro-batch, choices)."""
        ways = list(self._ways())
        exact = not self.sizer.rounding and self.config.engine.rounds == AUTO
        fitting: list[tuple[int, PlanChoices]] = []
        for size, micro_batches, rounds in ways:
            lean = self._leanest(micro_batches, rounds)
            if self.sizer.fits(size, lean):
                # A sum that is rounded once a round is only taken where it is asked for.
                fitting += [
                    (size, choices)
                    for choices in self._filled(size, lean)
                    if not (exact and choices.gradient_sum == GradientSum.HOST)
                ]
                if self.sizer.device == "cpu":
                    break
        found = self._timed(
            [way for way in fitting if self._host_bytes(*way) <= self.free_host_bytes] or fitting
        )
        if found:
            return (found[0].size, found[0].choices) if self.quick else self._fastest(found)
        return self.leanest()

    def leanest(self) -> tuple[int, PlanChoices]:
        """The way that takes least. More rounds would take less still, but round the sums once
        each, which nobody asked for.
        """
        ways = list(self._ways())
        size, micro_batches, rounds = min(
            (way for way in ways if way[2] == ways[0][2]), key=itemgetter(0)
        )
        return size, self._leanest(micro_batches, rounds)

    def chosen(self, size: int, choices: PlanChoices) -> Chosen:
        """The answer for these choices."""
        return Chosen(
            choices,
            size,
            self.sizer.loss_chunk,
            self.sizer.items(size, choices),
            host_boundary_bytes(self.sizer.shape, choices, size * self.sizer.row_length),
        )

    def _timed(self, fitting: list[tuple[int, PlanChoices]]) -> list[_Way]:
        """With homes for the optimizers, and fastest first; what would be far slower even if it
        waited for no update is left out.
        """
        least, found = math.inf, []
        for bound, (size, choices) in sorted(
            ((self._seconds(*way, 0.0), way) for way in fitting), key=itemgetter(0)
        ):
            if bound > WORTH_SIMULATING * least:
                break
            choices, waited = self._with_homes(size, choices)
            found.append(_Way(self._seconds(size, choices, waited), size, choices))
            least = min(least, found[-1].seconds)
        return sorted(dict.fromkeys(found), key=lambda way: way.seconds)

    def _fastest(self, found: list[_Way]) -> tuple[int, PlanChoices]:
        """The closed form is wrong by some per cent where the bus is the bound, so the best by it
        are simulated: first one for each way to spread the rows, then how memory is used in the
        best of those.
        """
        spreads = list({(way.size, way.choices.rounds): way for way in reversed(found)}.values())
        spreads = self._simulated(sorted(spreads, key=lambda way: way.seconds)[:SIMULATED])
        # Of ways that are equally fast, the one with fewer rounds.
        least = min(way.seconds for way in spreads)
        best = min(
            (way for way in spreads if way.seconds <= 1.002 * least),
            key=lambda way: way.choices.rounds,
        )
        alike = [
            way
            for way in found
            if (way.size, way.choices.rounds) == (best.size, best.choices.rounds)
        ]
        best = min(self._simulated(alike[:SIMULATED]), key=lambda way: way.seconds)
        return best.size, best.choices

    def _simulated(self, ways: list[_Way]) -> list[_Way]:
        """With simulated times, or as they are where a plan is so long that a form would wait for
        it.
        """
        ways = [way for way in ways if way.seconds <= WORTH_SIMULATING * ways[0].seconds]
        if any(
            way.choices.micro_batches * len(self.sizer.shape.blocks) > SIMULATED_USES
            for way in ways
        ):
            return ways
        return [
            replace(
                way,
                seconds=predicted_seconds(
                    self.sizer.shape,
                    way.choices,
                    self.rates,
                    way.size,
                    self.sizer.row_length,
                    self.sizer.device,
                    self.sizer.packed,
                ),
            )
            for way in ways
        ]

    def _host_bytes(self, size: int, choices: PlanChoices) -> int:
        return host_boundary_bytes(self.sizer.shape, choices, size * self.sizer.row_length)

    def _with_homes(self, size: int, choices: PlanChoices) -> tuple[PlanChoices, float]:
        """And how long the first forward pass waits for updates."""
        homes, waited = choose_homes(self._cost(size), choices)
        if not self.sizer.rounding:  # otherwise the optimizers stay where they were
            choices = (
                replace(choices, device_homes=homes)
                if homes
                else replace(
                    choices, device_homes=(), update_buffers=0, spare_buffers=0, spare_blocks=0
                )
            )
        return choices, waited

    def _seconds(self, size: int, choices: PlanChoices, waited: float) -> float:
        return step_seconds(self._cost(size), choices, waited)

    def _cost(self, size: int) -> Cost:
        if size not in self._costs:
            sizer = self.sizer
            self._costs[size] = Cost(
                sizer.shape,
                self.rates,
                size,
                sizer.row_length,
                sizer.compiled,
                sizer.shape.varlen(sizer.packed, sizer.device),
            )
        return self._costs[size]

    def _ways(self) -> Iterator[tuple[int, int, int]]:
        """(rows of a micro-batch, micro-batches, rounds) to try, fewer rounds first."""
        rows, rounds = self.config.train.batch_size, self.config.engine.rounds
        given = self.sizer.rounding
        if given:
            size = given["micro_batch_size"]
            micro_batches = -(-rows // size)
            yield size, micro_batches, given.get("rounds", 1 if rounds == AUTO else rounds)
            return
        fixed = 1 if rounds == AUTO else rounds
        for size in _micro_batch_sizes(self.config, self.sizer.device, self.sizer.row_length):
            yield size, rows // size, fixed
        if rounds != AUTO or self.sizer.device == "cpu":
            return
        asked = self.config.train.micro_batch_size
        if asked != AUTO:
            micro_batches = rows // asked
            for rounds in range(2, min(micro_batches, MOST_ROUNDS) + 1):
                if micro_batches % rounds == 0:
                    yield asked, micro_batches, rounds
            return
        most = min(rows, MOST_ROUNDS)
        for micro_batches in (
            (2**k for k in range(1, most.bit_length())) if self.quick else range(2, most + 1)
        ):
            size = -(-rows // micro_batches)
            if size * self.sizer.row_length < LEAST_TOKENS:
                return
            if -(-rows // size) == micro_batches:
                yield size, micro_batches, micro_batches

    def _leanest(self, micro_batches: int, rounds: int) -> PlanChoices:
        """The choices that take least device memory among those that the settings allow."""
        e = self.config.engine
        slots = 2 if e.slots == AUTO else e.slots
        resident = 0 if e.residency == AUTO else e.residency
        kept, homes = 0, tuple(self.sizer.rounding.get("device_homes", ()))
        if e.save_level == "all":
            kept = resident or 1
        return PlanChoices(
            micro_batches=micro_batches,
            rounds=rounds,
            slots=slots,
            prefetch_depth=max(1, slots - 1),
            resident_blocks=resident,
            kept_blocks=kept,
            host_boundaries=e.save_level == "boundary_host"
            or (e.save_level in (AUTO, "all") and self.sizer.device == "cuda"),
            update_buffers=1 if homes else 0,
            device_homes=homes,
            gradient_sum=self._gradient_sum(rounds),
            compiled=self.sizer.compiled,
        )

    def _gradient_sum(self, rounds: int) -> GradientSum:
        """As it was, in a run that goes on; else the way that takes least device memory."""
        kept = self.sizer.rounding.get("gradient_sum")
        if kept:
            return GradientSum(kept)
        return GradientSum.VERTICAL if rounds == 1 else GradientSum.HOST

    def _filled(self, size: int, lean: PlanChoices) -> Iterator[PlanChoices]:
        """Use the memory that is left: fp32 sums first, then boundaries on the device or, where the
        host has space, more blocks that keep their activations, then resident blocks.
        """
        e, sizer = self.config.engine, self.sizer
        blocks, choices = len(sizer.shape.blocks), lean
        if choices.rounds > 1 and not sizer.rounding:
            choices = self._most(
                size, choices, [{"gradient_sum": GradientSum.DEVICE}], sizer.comfortable
            )
        places = [choices]
        if e.save_level != "boundary_host":
            on_device = self._most(size, choices, [{"host_boundaries": False}], sizer.comfortable)
            places = [on_device]
            fits_host = self._host_bytes(size, choices) <= self.free_host_bytes
            if choices.host_boundaries and not on_device.host_boundaries and fits_host:
                places.append(choices)
        counts = range(blocks, -1, -1) if sizer.device == "cuda" else (blocks, 0)
        given = sizer.rounding
        numbers = (
            1 if lean.device_homes else 0,
            *(UPDATE_BUFFERS[-1:] if self.quick else UPDATE_BUFFERS),
        )
        if not lean.device_homes and (given or sizer.device == "cpu"):
            numbers = (0,)
        elif (
            choices.gradient_sum == GradientSum.DEVICE
            and sizer.buffers_over_sums() > UPDATE_BUFFERS[-1]
        ):
            numbers = (*numbers, sizer.buffers_over_sums())
        for place, buffers in itertools.product(places, numbers):
            # Space for the buffers is set aside as if a unit had its home there; which ones are is
            # decided at the end.
            homes = lean.device_homes if given else (EMBED,) if buffers else ()
            place = replace(place, update_buffers=buffers, device_homes=homes)
            if not sizer.fits(size, place):
                continue
            if e.save_level in (AUTO, "all"):
                least = place.kept_blocks
                kept = [{"kept_blocks": k} for k in counts if k >= least]
                if (
                    sizer.device == "cpu" and e.residency == AUTO
                ):  # what is resident is no copy to the same memory
                    kept = [change | {"resident_blocks": change["kept_blocks"]} for change in kept]
                place = self._most(size, place, kept, sizer.keeping)
            if place.kept_blocks == blocks:  # there are no boundaries
                place = replace(place, host_boundaries=False)
            if e.residency == AUTO:
                place = self._most(
                    size,
                    place,
                    [{"resident_blocks": k} for k in counts if k >= place.resident_blocks],
                    sizer.keeping,
                )
            yield place
            for spare in SPARE_BUFFERS if buffers > 2 and not self.quick else ():
                lenders = sizer.spare_blocks(size, place, spare)
                if lenders is not None:
                    more = replace(
                        place,
                        update_buffers=buffers + spare,
                        spare_buffers=spare,
                        spare_blocks=lenders,
                    )
                    if sizer.fits(size, more):
                        yield more

    def _most(
        self, size: int, choices: PlanChoices, changes: Sequence[dict[str, Any]], limit: float
    ) -> PlanChoices:
        """`choices` with the first of `changes` that fits, most memory first; as they are where
        none does.
        """

        def fits(change: dict[str, Any]) -> bool:
            return self.sizer.fits(size, replace(choices, **change), limit)

        least = 0 if fits(changes[0]) else bisect_left(changes, True, lo=1, key=fits)
        return replace(choices, **changes[least]) if least < len(changes) else choices


# ---------------------------------------------------------------------- settings


def _micro_batch_sizes(config: TrainConfig, device: str, row_length: int) -> list[int]:
    """Rows of a micro-batch to try, most wanted first."""
    t, target = config.train, SATURATING_TOKENS[device]
    if t.micro_batch_size != AUTO:
        return [t.micro_batch_size]
    rows = t.batch_size // (1 if config.engine.rounds == AUTO else config.engine.rounds)
    divisors = [size for size in range(rows, 0, -1) if rows % size == 0]
    small = [size for size in divisors if size * row_length <= target] or [1]
    # Fewer micro-batches add up gradients less often, and batch sizes such as 148 = 4 x 37 have
    # nothing near the target below it.
    large = [size for size in divisors if target < size * row_length <= 3 * target]
    if device == "cpu":  # takes the first that fits
        large = large[-1:] if 2 * small[0] * row_length < target else []
    return large + small


def _refuse_contradictions(shape: ModelShape, config: TrainConfig, row_length: int) -> None:
    e, t, blocks = config.engine, config.train, len(shape.blocks)
    if shape.learned_positions and row_length > shape.max_position_embeddings:
        raise ConfigError(
            "data.max_seq_len",
            f"{row_length} is beyond the {shape.max_position_embeddings} positions that "
            f"this model has; lower it to {shape.max_position_embeddings} or less.",
        )
    if e.residency != AUTO and e.residency > blocks:
        raise ConfigError(
            "engine.residency",
            f"{e.residency} blocks cannot stay on the device, since this model has "
            f"{blocks}; choose 0 to {blocks} or auto.",
        )
    if e.rounds == AUTO:
        return
    if t.micro_batch_size != AUTO:
        micro_batches = t.batch_size // t.micro_batch_size
        if micro_batches % e.rounds:
            raise ConfigError(
                "engine.rounds",
                f"{e.rounds} does not divide the {micro_batches} micro-batches of a step "
                "(train.batch_size / train.micro_batch_size); choose a divisor or auto.",
            )
    elif t.batch_size % e.rounds:
        raise ConfigError(
            "engine.rounds",
            f"{e.rounds} does not divide train.batch_size {t.batch_size}; choose a divisor "
            "or auto.",
        )

"""A fit report says whether a run will fit, and how long it will take.

It lists host memory, GPU memory and disk item by item, gives a verdict with reasons and remedies,
and predicts time, energy and cost. No torch here: the caller gives the shape of the model, and how
the shape of a model with adapters is found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.config.settings import TrainConfig
from engine.machine.device import measured_rates
from engine.machine.known_machines import known_machine
from engine.machine.read_machine import Machine
from engine.planning.fit.checkpoint_sizes import best_bytes
from engine.planning.fit.disk_offload import Spill
from engine.planning.fit.memory_items import MEMORY, PartName
from engine.planning.fit.planner import Chosen
from engine.planning.fit.pool import Pool, pool_of
from engine.planning.fit.remedies import (
    AdaptedShape,
    Remedy,
    moves_in_words,
    needs_with,
    of_catalog,
    remedies_for,
)
from engine.planning.fit.requirements import (
    NOTHING_MORE,
    PART_WORDS,
    Needs,
    Part,
    SessionFacts,
    Verdict,
    least_needs,
    needs_of,
)
from engine.planning.shape.active_parameters import parameter_flops, planned_flops_formula
from engine.planning.shape.model_shape import ModelShape
from engine.words import GIB, in_gib

WORDS = {
    Verdict.FITS: "fits",
    Verdict.TIGHT: "fits, but only just",
    Verdict.DOES_NOT_FIT: "does not fit",
}
HOST_WATTS = 150.0
"""A workstation without its GPU is assumed to take this power in watts: busy processor and memory,
fans and losses.
"""


@dataclass(frozen=True)
class FitReport:
    """A `FitReport` is the result of `estimate`. Sizes are bytes throughout; `gpu` is None where
    blocks compute on the CPU. Where several GPUs compute, it is the memory of each.
    """

    verdict: Verdict
    headline: str
    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    host: Part
    gpu: Part | None
    disk: Part
    model: dict[str, Any]
    choices: dict[str, Any]
    time: dict[str, Any]
    pool: Pool
    """It says which units live where, in the same bytes."""
    chosen: Chosen
    """The needs are those of this plan. A run that gets the report trains with it."""
    spill: Spill | None = None
    """These moments and boundaries are on the disk."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that the record and the screen use."""
        return {
            "verdict": self.verdict.value,
            "headline": self.headline,
            "reasons": list(self.reasons),
            "remedies": [remedy.to_dict() for remedy in self.remedies],
            "host": self.host.to_dict(),
            "gpu": self.gpu.to_dict() if self.gpu is not None else None,
            "disk": self.disk.to_dict(),
            "model": self.model,
            "choices": self.choices,
            "time": self.time,
            "pool": self.pool.to_dict(),
            "spill": self.spill.to_dict() if self.spill is not None else None,
        }


def estimate(
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    facts: SessionFacts = NOTHING_MORE,
    adapted: AdaptedShape = of_catalog,
) -> FitReport:
    """Returns the report for `config`, a job of a model with this `shape`, on `machine`. Where
    the facts have no rates, it uses those that were measured on this machine, or those that are
    estimated for a known card. Raises ModelError or ConfigError for what no machine could run.
    """
    shape = _in_dtype(config, shape)
    needs = needs_of(config, machine, shape, facts, _lacks_memory(config, machine, shape, facts))
    verdict = needs.verdict()
    remedies = remedies_for(needs, adapted) if verdict != Verdict.FITS else ()
    measured = (
        facts.rates is not None
        or needs.device == "cpu"
        or measured_rates(config, machine) is not None
    )
    return FitReport(
        verdict=verdict,
        headline=_headline(needs, verdict),
        reasons=tuple(_reasons(needs, bool(remedies))),
        remedies=remedies,
        host=needs.parts[PartName.HOST],
        gpu=needs.parts.get(PartName.GPU),
        disk=needs.parts[PartName.DISK],
        model={
            "parameters": shape.parameter_count,
            "active_parameters": shape.active_parameters,
            "trained_parameters": shape.trained_count,
            "read_ahead": shape.read_ahead_numel,
            "blocks": len(shape.blocks),
            "backward_blocks": len(shape.blocks) - shape.forward_blocks,
            "trained_units": len(shape.units) - len(shape.frozen_units),
            "model_type": shape.model_type,
            "source": config.model.source,
            "dtype": config.model.dtype,
        },
        choices={
            "device": needs.device,
            "micro_batch_size": needs.chosen.micro_batch_size,
            "loss_chunk": needs.chosen.loss_chunk,
            **needs.chosen.choices.to_dict(),
        },
        time=_time(needs, config.train.steps or facts.steps, measured),
        pool=pool_of(needs),
        chosen=needs.chosen,
        spill=needs.spill,
    )


def with_times(
    report: FitReport,
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    quick: bool = False,
    adapted: AdaptedShape = of_catalog,
) -> FitReport:
    """Returns the report of `estimate` with the seconds of a step for each of its remedies, and
    with the units that then live elsewhere. They are those of a report of the changed job. quick:
    plans are chosen among fewer ways, which takes less time, and makes the seconds up to a tenth
    too long.
    """
    shape = _in_dtype(config, shape)
    memory = (report.host, report.gpu)
    fits = not any(part and part.verdict == Verdict.DOES_NOT_FIT for part in memory)
    now = report.time["step_seconds"] if fits else None
    before = report.chosen.choices if fits else None
    timed = []
    for remedy in report.remedies:
        # What is written does not change the plan.
        is_same = fits and all(name.startswith("output.") for name in remedy.changes)
        seconds, moves = now, ""
        if not is_same:
            then = needs_with(remedy.changes, config, machine, shape, quick, adapted)
            seconds = then.step_seconds
            moves = moves_in_words(before, then.chosen, len(shape.units), quick)
        timed.append(replace(remedy, seconds=seconds, instead_of=now, places=moves))
    return replace(report, remedies=tuple(timed))


def _in_dtype(config: TrainConfig, shape: ModelShape) -> ModelShape:
    """Returns the shape of the job's model in its dtype."""
    return shape if shape.dtype == config.model.dtype else shape.in_dtype(config.model.dtype)


def _lacks_memory(
    config: TrainConfig, machine: Machine, shape: ModelShape, facts: SessionFacts
) -> bool:
    """Tells whether no plan fits. Which plan is shown then matters little, so it may be found
    quickly. A program that is about to train needs its plan in any case.
    """
    if facts.resident is not None:
        return False
    least = least_needs(config, machine, shape, hosts=facts.hosts)
    return least.verdict(MEMORY) == Verdict.DOES_NOT_FIT


def _time(needs: Needs, steps: int | None, measured: bool) -> dict[str, Any]:
    """Returns the predicted times in seconds, and the energy and its cost, assuming that the card
    draws its board power and the host `HOST_WATTS` throughout the run. Unknown values are None.
    """
    config, seconds = needs.config, needs.step_seconds
    tokens = config.train.batch_size * needs.step_length
    known = known_machine(needs.machine) if needs.device == "cuda" else None
    watts = None
    if known is not None:
        watts = needs.hosts * (needs.ranks * known.power_watts + HOST_WATTS)
    run = seconds * steps if seconds and steps else None
    energy = run * watts / 3.6e6 if run and watts else None
    price = config.output.price_per_kwh
    return {
        "tokens_per_step": tokens,
        "flops_per_step": parameter_flops(needs.shape.counted_parameters, tokens),
        "formula": planned_flops_formula(is_whole=needs.shape.work_parameters is None),
        "step_seconds": seconds,
        "estimated": seconds is not None and not measured,
        "tokens_per_second": tokens / seconds if seconds else None,
        "steps": steps,
        "run_seconds": run,
        "watts": watts,
        "energy_kwh": energy,
        "cost": energy * price if energy and price is not None else None,
    }


# ---------------------------------------------------------------------- words


def _headline(needs: Needs, verdict: Verdict) -> str:
    taken = []
    for name, part in needs.parts.items():
        limit = "" if part.limit is None else f" ({in_gib(part.limit)} free)"
        words = PART_WORDS[name]
        if name == PartName.GPU and needs.ranks > 1:
            words = f"memory on each of {needs.ranks} GPUs"
        taken.append(f"{in_gib(part.total)} of {words}{limit}")
    said = f"Needs {', '.join(taken[:-1])} and {taken[-1]}: {WORDS[verdict]}."
    if needs.hosts == 1:
        return said
    return f"{said} Each of {needs.hosts} hosts takes so much; the disk is that of the first."


def _reasons(needs: Needs, helped: bool) -> list[str]:
    """Returns the reasons against the job, in sentences. helped: remedies were found."""
    failing = [name for name, part in needs.parts.items() if part.verdict == Verdict.DOES_NOT_FIT]
    reasons = [_short_of(name, needs.parts[name]) for name in failing]
    if failing and not helped:
        taken = [f"{in_gib(needs.parts[name].total)} of {PART_WORDS[name]}" for name in failing]
        reasons.append(
            f"No change of settings was found that makes it fit: it takes {' and '.join(taken)}, "
            "or a smaller model."
        )
    for name, part in needs.parts.items():
        if part.verdict == Verdict.TIGHT:
            largest = max(part.items, key=lambda item: item.bytes)
            percent = 100 * part.total / part.known_limit
            reasons.append(
                f"{_capital(PART_WORDS[name])} is {percent:.0f} % full, "
                f"mostly with {largest.name} ({in_gib(largest.bytes)})."
            )
    return reasons + _warnings(needs)


def _short_of(name: PartName, part: Part) -> str:
    return (
        f"{_capital(PART_WORDS[name])}: {in_gib(part.total)} needed, {in_gib(part.known_limit)} "
        f"free, {in_gib(part.total - part.known_limit)} short; {_breaking(part)}."
    )


def _warnings(needs: Needs) -> list[str]:
    """Returns what is unusual about the settings, whether the job fits or not."""
    warnings = []
    untouched = needs.shape.untouched_numel
    if untouched:
        warnings.append(
            "This model also reads images or sound. Its language model is trained on text; its "
            f"other parts ({untouched:,} parameters) stay as they are and go into the export."
        )
    stored_as = needs.shape.stored_as
    if stored_as is not None and needs.config.model.init == "pretrained":
        warnings.append(
            f"The weights of this model are stored in {stored_as.words}. They are dequantised on "
            f"loading, and exported without quantisation."
        )
    known, length = needs.shape.max_position_embeddings, needs.config.data.max_seq_len
    if known is not None and length > known:
        warnings.append(
            f"data.max_seq_len {length} is beyond the {known} positions that this model was "
            "trained for."
        )
    if needs.lacks_room_for_best:
        size = in_gib(best_bytes(needs.config, needs.shape))
        warnings.append(
            f"The disk has no room for the best weights ({size}) beside the rest, so they are not "
            "kept: the weights of the last step are exported."
        )
    cap = needs.config.engine.gpu_memory_gib
    if cap is not None and needs.device == "cuda":
        gpu = needs.machine.gpus[0]
        if cap * GIB > gpu.free:
            warnings.append(
                f"engine.gpu_memory_gib {cap:g} is more than the {in_gib(gpu.free)} free on the "
                f"{gpu.name}; the plan uses what is free."
            )
    return warnings


def _breaking(part: Part) -> str:
    """Returns the name of the item that no longer fits. Items are ordered from those that every run
    needs to those that choices add, and the one at which their sum crosses the limit is named.
    """
    filled = sum(item.bytes for item in part.items if item.kind.is_overhead)
    if filled > part.known_limit:
        return "the program alone takes more"
    for item in part.items:
        if not item.kind.is_overhead:
            filled += item.bytes
            if filled > part.known_limit:
                break
    return f"what no longer fits: {item.words} ({in_gib(item.bytes)})"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

"""A fit report says whether a run will fit, and how long it will take.

It lists host memory, GPU memory and disk item by item, gives a verdict with reasons and
suggestions, and predicts time, energy and cost. No torch here: the caller gives the shape of the
model, and how the shape of a model with adapters is found.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config.settings import TrainConfig
from engine.machine.device import measured_rates
from engine.machine.known_machines import SYSTEM_RAM_BYTES, known_machine
from engine.machine.read_machine import Machine
from engine.planning.fit.answers_memory import AnswersMemory, answers_memory
from engine.planning.fit.checkpoint_sizes import best_bytes
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.disk_offload import DiskOffload
from engine.planning.fit.memory_items import MEMORY, PartName
from engine.planning.fit.pool import Pool, pool_of
from engine.planning.fit.requirements import (
    NOTHING_MORE,
    PART_WORDS,
    FitStatus,
    Part,
    Requirements,
    SessionFacts,
    minimum_requirements,
    requirements_of,
)
from engine.planning.fit.suggestions import (
    AdaptedShape,
    Found,
    Nearest,
    Suggestion,
    lacks_of,
    moves_text,
    of_catalog,
    requirements_with,
    suggestions_for,
)
from engine.planning.shape.active_parameters import parameter_flops, planned_flops_formula
from engine.planning.shape.model_shape import ModelShape
from engine.text import GIB, in_gib

WORDS = {
    FitStatus.FITS: "fits",
    FitStatus.TIGHT: "fits, but only just",
    FitStatus.DOES_NOT_FIT: "does not fit",
}
HOST_WATTS = 150.0
"""Power in watts that a workstation without its GPU is assumed to take: busy processor and memory,
fans and losses.
"""


@dataclass(frozen=True)
class FitReport:
    """The result of `estimate`. Sizes are bytes throughout; `gpu` is None where blocks compute on
    the CPU. Where several GPUs compute, it is the memory of each.
    """

    status: FitStatus
    headline: str
    reasons: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    host: Part
    gpu: Part | None
    disk: Part
    model: dict[str, Any]
    choices: dict[str, Any]
    time: dict[str, Any]
    pool: Pool
    """Which units live where, in the same bytes."""
    chosen: Chosen
    """Plan to which the requirements belong. A run that gets the report trains with it."""
    disk_offload: DiskOffload | None = None
    """Moments and block inputs on the disk."""
    answers: AnswersMemory | None = None
    """What answers take, of the memory that training leaves free."""
    nearest: Nearest | None = None
    """The change with which a job lacks least that no change makes fit."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that the record and the screen use."""
        return {
            "verdict": self.status.value,
            "headline": self.headline,
            "reasons": list(self.reasons),
            "suggestions": [suggestion.to_dict() for suggestion in self.suggestions],
            "host": self.host.to_dict(),
            "gpu": self.gpu.to_dict() if self.gpu is not None else None,
            "disk": self.disk.to_dict(),
            "model": self.model,
            "choices": self.choices,
            "time": self.time,
            "pool": self.pool.to_dict(),
            "disk_offload": self.disk_offload.to_dict() if self.disk_offload is not None else None,
            "answers": asdict(self.answers) if self.answers is not None else None,
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
    requirements = requirements_of(
        config, machine, shape, facts, _lacks_memory(config, machine, shape, facts)
    )
    status = requirements.status()
    found = suggestions_for(requirements, adapted) if status != FitStatus.FITS else Found()
    measured = (
        facts.rates is not None
        or requirements.device == "cpu"
        or measured_rates(config, machine) is not None
    )
    return FitReport(
        status=status,
        headline=_headline(requirements, status),
        reasons=tuple(_reasons(requirements, found)),
        suggestions=found.suggestions,
        host=requirements.parts[PartName.HOST],
        gpu=requirements.parts.get(PartName.GPU),
        disk=requirements.parts[PartName.DISK],
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
            "device": requirements.device,
            "micro_batch_size": requirements.chosen.micro_batch_size,
            "loss_chunk": requirements.chosen.loss_chunk,
            **requirements.chosen.choices.to_dict(),
        },
        time=_time(requirements, config.train.steps or facts.steps, measured),
        pool=pool_of(requirements),
        chosen=requirements.chosen,
        disk_offload=requirements.disk_offload,
        answers=answers_memory(requirements),
        nearest=found.nearest,
    )


def with_times(
    report: FitReport,
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    adapted: AdaptedShape = of_catalog,
) -> FitReport:
    """Returns the report of `estimate` with the seconds of a step for each of its suggestions, the
    memory that it takes and the units that then live elsewhere. They are those of a report of the
    changed job.
    """
    shape = _in_dtype(config, shape)
    memory = (report.host, report.gpu)
    fits = not any(part and part.status == FitStatus.DOES_NOT_FIT for part in memory)
    now = report.time["step_seconds"] if fits else None
    before = report.chosen.choices if fits else None
    timed = []
    for suggestion in report.suggestions:
        # What is written does not change the plan.
        is_same = fits and all(name.startswith("output.") for name in suggestion.changes)
        seconds, moves, planned = now, "", suggestion
        if not is_same:
            then = requirements_with(suggestion.changes, config, machine, shape, adapted)
            seconds, planned = then.step_seconds, suggestion.as_planned(then)
            moves = moves_text(before, then.chosen, len(shape.units))
        timed.append(replace(planned, seconds=seconds, instead_of=now, places=moves))
    return replace(report, suggestions=tuple(timed))


def _in_dtype(config: TrainConfig, shape: ModelShape) -> ModelShape:
    """Returns the shape of the job's model in its dtype."""
    return shape if shape.dtype == config.model.dtype else shape.in_dtype(config.model.dtype)


def _lacks_memory(
    config: TrainConfig, machine: Machine, shape: ModelShape, facts: SessionFacts
) -> bool:
    """Returns whether no plan fits. Which plan is shown then matters little, so it may be found
    quickly. A program that is about to train needs its plan in any case.
    """
    if facts.resident is not None:
        return False
    least = minimum_requirements(config, machine, shape, nodes=facts.nodes)
    return least.status(MEMORY) == FitStatus.DOES_NOT_FIT


def _time(requirements: Requirements, steps: int | None, measured: bool) -> dict[str, Any]:
    """Returns the predicted times in seconds, and the energy and its cost, assuming that the card
    draws its board power and the host `HOST_WATTS` throughout the run. Unknown values are None.
    """
    config, seconds = requirements.config, requirements.step_seconds
    tokens = config.train.batch_size * requirements.step_length
    known = known_machine(requirements.machine) if requirements.device == "cuda" else None
    watts = None
    if known is not None:
        watts = requirements.nodes * (requirements.ranks * known.power_watts + HOST_WATTS)
    run = seconds * steps if seconds and steps else None
    energy = run * watts / 3.6e6 if run and watts else None
    price = config.output.price_per_kwh
    return {
        "tokens_per_step": tokens,
        "flops_per_step": parameter_flops(requirements.shape.counted_parameters, tokens),
        "formula": planned_flops_formula(is_whole=requirements.shape.work_parameters is None),
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


def _headline(requirements: Requirements, status: FitStatus) -> str:
    taken = []
    for name, part in requirements.parts.items():
        limit = "" if part.limit is None else f" ({in_gib(part.limit)} free)"
        words = PART_WORDS[name]
        if name == PartName.GPU and requirements.ranks > 1:
            words = f"memory on each of {requirements.ranks} GPUs"
        taken.append(f"{in_gib(part.total)} of {words}{limit}")
    said = f"Needs {', '.join(taken[:-1])} and {taken[-1]}: {WORDS[status]}."
    if requirements.nodes == 1:
        return said
    return (
        f"{said} Each of {requirements.nodes} nodes takes so much; the disk is that of the first."
    )


def _reasons(requirements: Requirements, found: Found) -> list[str]:
    """Returns the reasons against the job, in sentences. found: what would help it."""
    failing = [
        name for name, part in requirements.parts.items() if part.status == FitStatus.DOES_NOT_FIT
    ]
    reasons = [_short_of(name, requirements.parts[name]) for name in failing]
    if failing and not found.suggestions:
        nearest = found.nearest
        told = (
            _no_setting(requirements) if nearest is None else _nearest_text(requirements, nearest)
        )
        reasons.append(told)
    for name, part in requirements.parts.items():
        if part.status == FitStatus.TIGHT:
            reasons.append(_almost_full(name, part))
    return reasons + _warnings(requirements, bool(failing))


def _no_setting(requirements: Requirements) -> str:
    """Returns how much is missing where no setting helps, and what to do about it."""
    lacks = dict(lacks_of(requirements))
    said = f"No setting makes this model fit here: it needs {_more(lacks)}."
    return f"{said} {_way_out(requirements.machine, lacks)}"


def _nearest_text(requirements: Requirements, nearest: Nearest) -> str:
    """Returns how much is missing with the change of settings that helps most."""
    lacks = dict(nearest.lacks)
    title = f"{nearest.title[0].lower()}{nearest.title[1:]}"
    said = f"The nearest is to {title}, which needs {_more(lacks)}."
    return f"{said} {_way_out(requirements.machine, lacks)}"


def _more(lacks: dict[PartName, int]) -> str:
    return " and ".join(f"{in_gib(size)} more {PART_WORDS[name]}" for name, size in lacks.items())


def _way_out(machine: Machine, lacks: dict[PartName, int]) -> str:
    """Returns what to free, where that suffices: what other programs hold, or disk space."""
    others = machine.ram_limit - machine.ram_available
    if [*lacks] == [PartName.HOST] and lacks[PartName.HOST] <= others - SYSTEM_RAM_BYTES:
        return f"Other programs use {in_gib(others)} of RAM: close some of them."
    if [*lacks] == [PartName.DISK]:
        return "Free some disk space."
    return "Choose a smaller model or another machine."


def _almost_full(name: PartName, part: Part) -> str:
    """Returns how full a tight part will be, and of what. The planes of weights count as one."""
    largest = max(part.items, key=lambda item: item.bytes)
    words, size = f"“{largest.words}”", largest.bytes
    if largest.kind.is_weights:
        words = "the model's weights"
        size = sum(item.bytes for item in part.items if item.kind.is_weights)
    share = "most of it is" if 2 * size > part.total else "the largest part is"
    percent = 100 * part.total / part.known_limit
    return (
        f"{_capital(PART_WORDS[name])} will be {percent:.0f} % full; {share} {words} "
        f"({in_gib(size)})."
    )


def _short_of(name: PartName, part: Part) -> str:
    return (
        f"{_capital(PART_WORDS[name])}: {in_gib(part.total)} needed, {in_gib(part.known_limit)} "
        f"free, {in_gib(part.total - part.known_limit)} short; {_breaking(part)}."
    )


def _warnings(requirements: Requirements, fails: bool) -> list[str]:
    """Returns what is unusual about the settings. fails: the job does not fit, and what its export
    would be does not matter.
    """
    warnings = []
    non_text = requirements.shape.untouched_numel
    if non_text:
        warnings.append(
            "This model also reads images or sound. Its language model is trained on text; its "
            f"other parts ({non_text:,} parameters) stay as they are and go into the export."
        )
    stored_as = requirements.shape.stored_as
    if stored_as is not None and requirements.config.model.init == "pretrained":
        warnings.append(
            f"The weights of this model are stored in {stored_as.words}. They are dequantized on "
            f"loading, and exported without quantization."
        )
    known, length = requirements.shape.max_position_embeddings, requirements.config.data.max_seq_len
    if known is not None and length > known:
        warnings.append(
            f"data.max_seq_len {length} is beyond the {known} positions that this model was "
            "trained for."
        )
    if requirements.lacks_room_for_best and not fails:
        size = in_gib(best_bytes(requirements.config, requirements.shape))
        warnings.append(
            f"The disk has no room for the best weights ({size}) beside the rest, so they are not "
            "kept: the weights of the last step are exported."
        )
    cap = requirements.config.engine.gpu_memory_gib
    if cap is not None and requirements.device == "cuda":
        gpu = requirements.machine.gpus[0]
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

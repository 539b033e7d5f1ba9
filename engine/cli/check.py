"""The fit report of a preset or a model is printed by the command `launch.py check`.

Without either, it prints what a machine can train; with ``--table``, it prints a table of models
and machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.cli.check_data import checked_data
from engine.cli.pool_text import pool_as_text
from engine.config.doubts import doubts
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.fit.buffer_sizes import buffers_in_words
from engine.fit.memory_items import PartName
from engine.fit.model_table import (
    BEST,
    HERE,
    LEGEND,
    OPTIMIZERS,
    SHOWN,
    Column,
    as_dicts,
    as_text,
    cell,
    cell_in_words,
    columns,
    counts_in_words,
    csv_parts,
    rows_of,
)
from engine.fit.needs import Part, Verdict
from engine.fit.offers import machines_for
from engine.fit.pool_times import costs_of, gains
from engine.fit.report import FitReport, estimate, with_times
from engine.machine.known_machines import known_name, machines, with_figures
from engine.machine.read_machine import Machine, read_machine
from engine.machine.several_gpus import named_with_several
from engine.machine.spill_folder import check_spill_folder
from engine.model.find_shape import shape_from_source
from engine.model.shape import ModelShape
from engine.planes.moments import KINDS
from engine.trackers.known_trackers import destinations
from engine.words import counted, in_gib, in_hours, in_seconds

TITLES = ((PartName.HOST, "RAM"), (PartName.GPU, "GPU memory"), (PartName.DISK, "Disk"))


@dataclass(frozen=True)
class CheckedJob:
    """The command line names the job to check.

    A `model` without a preset is checked with the default settings; with a preset, it replaces the
    preset's model. `overrides` are settings such as ``train.steps=10``. An `optimizer` replaces
    that of the settings; with `BEST`, each cell of a table is about the first that fits.
    """

    preset: str | Path | None = None
    model: str | None = None
    overrides: Sequence[str] = ()
    optimizer: str | None = None

    @property
    def any_optimizer(self) -> bool:
        """Returns whether each cell of a table is about the first optimizer that fits."""
        return self.optimizer == BEST

    def config(self) -> TrainConfig:
        """Returns the configuration of the job. Raises ConfigError for bad input."""
        if self.preset is None:
            config = TrainConfig.from_dict(
                {
                    "name": self.model or "check",
                    "model": {"source": "any model" if self.model is None else self.model},
                    "data": {"source": "any data set"},
                }
            )
        else:
            config = TrainConfig.load(self.preset)
            if self.model is not None:
                config = config.with_values({"model.source": self.model})
        config = config.with_overrides(tuple(self.overrides))
        if self.optimizer is None or self.any_optimizer:
            return config
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ConfigError(
                "--optimizer", f"{self.optimizer!r} is unknown; give {known} or best."
            )
        return config.with_values({"train.optimizer": self.optimizer})


@dataclass(frozen=True)
class NamedMachine:
    """The command line names the machine to check: a known one or, without a `name`, this one.

    Figures given in GiB replace those of the machine.
    """

    name: str | None = None
    ram_gib: float | None = None
    gpu_gib: float | None = None
    disk_gib: float | None = None
    gpus: int | None = None
    """A known machine is taken to have so many of its card. This machine has those that it has."""

    def machine(self, runs_dir: str | Path) -> Machine:
        """Returns the machine. Raises RamstreamError for an unknown name."""
        if self.name is None:
            found = read_machine(runs_dir)
        else:
            found = named_with_several(self.name, self.ram_gib)
            if self.gpus is not None and len(found.gpus) < self.gpus:
                found = named_with_several(f"{self.gpus} x {self.name}", self.ram_gib)
        return with_figures(found, self.ram_gib, self.gpu_gib, self.disk_gib)


def check(
    job: CheckedJob, machine: NamedMachine, runs_dir: str | Path, as_json: bool = False
) -> tuple[str, int]:
    """Returns the text and the exit code of a check, like `run_check`.

    Without a preset and a model, the text says what the machine can train. Raises RamstreamError
    for bad input.
    """
    chosen = machine.machine(runs_dir)
    config = job.config()
    if job.preset is None and job.model is None:
        return what_it_trains(config, chosen, as_json, job.any_optimizer), 0
    if job.any_optimizer:
        raise ConfigError(
            "--optimizer",
            "best is for tables of models; leave it out, since a report of one job offers smaller "
            "moments where they help.",
        )
    data = "" if job.preset is None else checked_data(config)
    return run_check(config, chosen, as_json, data, runs_dir)


def check_table(
    job: CheckedJob, runs_dir: str | Path, names: Sequence[str], form: str
) -> Iterator[str]:
    """Yields the table of models and machines in one of the forms text, json and csv: csv row by
    row, as they are found, the others whole.

    `names` are known machines to show in addition to this one. By default, these are a few in the
    text form, and all supported ones in the other forms. The job's model is not used. Raises
    RamstreamError for bad input.
    """
    config = replace(job, model=None).config()
    if not names and form == "text":
        names = SHOWN
    elif not names:
        names = [known.name for known in machines() if known.supported]
    shown = columns([known_name(name) for name in names], read_machine(runs_dir))
    found = rows_of(config, shown, any_optimizer=job.any_optimizer)
    if form == "csv":
        yield from csv_parts(found, shown)
        return
    rows = list(found)
    if form == "json":
        shown_machines = {column.name: column.machine.to_dict() for column in shown}
        yield json.dumps({"machines": shown_machines, "models": as_dicts(rows, shown)}, indent=2)
        return
    legend = f"\n{LEGEND}" if job.any_optimizer else ""
    yield (
        f"{as_text(rows, shown)}\n\n{counts_in_words(rows, shown)}\n{config.train.batch_size} x "
        f"{config.data.max_seq_len:,} tokens a step, {config.model.dtype}, "
        f"{_moments_in_words(config, job.any_optimizer)}; known machines have their typical "
        "RAM, and speeds of machines that were not measured come from the card's specification."
        f"{legend}"
    )


def _moments_in_words(config: TrainConfig, any_optimizer: bool) -> str:
    """Returns a text that says how the moments of a table are kept."""
    if not any_optimizer:
        return f"AdamW's moments in {KINDS[config.train.optimizer]}"
    *kinds, last = KINDS.values()
    return f"AdamW's moments in the first of {', '.join(kinds)} and {last} that fits"


def what_it_trains(
    config: TrainConfig, machine: Machine, as_json: bool, any_optimizer: bool = False
) -> str:
    """Returns the models of the catalog that fit `machine`, largest first."""
    column = Column(HERE, machine)
    rows = [
        row
        for row in rows_of(config, (column,), any_optimizer=any_optimizer)
        if row.cells[0].verdict != Verdict.DOES_NOT_FIT
    ]
    rows.sort(key=lambda row: -row.parameters)
    if as_json:
        return json.dumps(
            {"machine": machine.to_dict(), "models": as_dicts(rows, (column,))}, indent=2
        )
    card = machine.gpus[0].name if machine.gpus else "the CPU, since there is no GPU"
    lines = [f"{in_gib(machine.ram_available)} of RAM free, computing on {card}."]
    if rows:
        largest, found = rows[0], rows[0].cells[0]
        lines += [
            f"The largest model of the catalog that fits is {largest.entry.title}, "
            f"{_billions(largest.parameters)} parameters, in "
            f"{in_gib(found.host_bytes)} of RAM, with AdamW's moments in "
            f"{KINDS[found.optimizer]}.",
            "",
            as_text(rows, (column,)),
        ]
        if any_optimizer:
            lines += ["", LEGEND]
    else:
        lines += ["No model of the catalog fits; the starter (presets/starter.yaml) does."]
    return "\n".join([*lines, *_notes(machine)])


def run_check(
    config: TrainConfig, machine: Machine, as_json: bool, data: str, runs_dir: str | Path
) -> tuple[str, int]:
    """Returns the report as text or JSON, and the exit code: 1 when the job does not fit. `data` is
    a sentence on the data, or empty. Runs are kept in `runs_dir`.
    """
    if config.engine.disk is not None and machine.here:
        check_spill_folder(config.engine.disk)
    shape = shape_from_source(config.model, config.train.parts)
    report = with_times(estimate(config, machine, shape), config, machine, shape)
    tracked = destinations(config.output.trackers, runs_dir)
    fits = report.verdict != Verdict.DOES_NOT_FIT
    gained = gains(config, machine, shape) if fits else {}
    costs = costs_of(report.chosen, config, machine, shape) if fits else None
    if as_json:
        saved = {name.value: seconds for name, seconds in gained.items()}
        added = {"machine": machine.to_dict(), "data": data, "trackers": tracked, "gains": saved}
        spent = {"costs": None if costs is None else costs.to_dict()}
        text = json.dumps(report.to_dict() | added | spent, indent=2)
    else:
        about_data = ["", data] if data else []
        about_trackers = ["", *tracked] if tracked else []
        offers = _offers(config, shape, report)
        doubted = [f"  ? {doubt.field}: {doubt.text}" for doubt in doubts(config)]
        if doubted:
            doubted = ["", "Look at this", *doubted]
        pool = pool_as_text(report.pool, costs, gained) if fits else []
        told = [*(["", *pool] if pool else []), *doubted, *about_data, *about_trackers, *offers]
        text = "\n".join([report_as_text(report, machine), *told])
    return text, 1 if report.verdict == Verdict.DOES_NOT_FIT else 0


def _offers(config: TrainConfig, shape: ModelShape, report: FitReport) -> list[str]:
    """Returns lines about two machines that could train a job that lacks memory here.

    These are the machine with the least memory and the fastest one.
    """
    memories = [part for part in (report.host, report.gpu) if part is not None]
    if not any(part.verdict == Verdict.DOES_NOT_FIT for part in memories):
        return []
    offers = machines_for(config, shape, timed=False)
    if not offers:
        return [
            "",
            "No known machine holds this job; fewer or shorter rows, or a smaller model would "
            "help.",
        ]
    smallest = min(offers, key=lambda offer: (offer.ram_gib, offer.known.memory_mib))
    fastest = max(offers, key=lambda offer: (offer.known.rates().matmul, -offer.ram_gib))
    lines = ["", "Machines that would train it"]
    for offer in dict.fromkeys((smallest, fastest)):
        machine = offer.known.machine(offer.ram_gib)
        lines.append(
            f"  {offer.known.name} with {offer.ram_gib:,} GiB of RAM: "
            f"{cell_in_words(cell(config, shape, machine))}, estimated"
        )
    return lines


def report_as_text(report: FitReport, machine: Machine) -> str:
    """Returns the report as text for people.

    It contains the verdict, then what would help, every item, the plan, and the time.
    """
    model = report.model
    active = ""
    if model["active_parameters"] != model["parameters"]:
        active = f" ({_billions(model['active_parameters'])} active)"
    trained = ""
    if model["trained_parameters"] != model["parameters"]:
        trained = f", {_billions(model['trained_parameters'])} of them trained"
    lines = [
        f"{model['source']}: {model['model_type']}, {_billions(model['parameters'])} "
        f"parameters{active} in {model['blocks']} blocks{trained}, {model['dtype']}",
        report.headline,
    ]
    lines += [f"  - {reason}" for reason in report.reasons]
    if report.remedies:
        lines += ["", "What would help"]
        for remedy in report.remedies:
            changes = [f"--set {name}={_yaml(value)}" for name, value in remedy.changes.items()]
            said = remedy.exactness_in_words
            if remedy.places:
                said = f"{remedy.places} {said}"
            if remedy.time_in_words:
                said = f"{remedy.time_in_words}. {said}"
            lines += [f"  * {remedy.text}", f"      {said}", "      " + " ".join(changes)]
    for name, title in TITLES:
        part = getattr(report, name)
        if part is not None:
            each = name == PartName.GPU and report.choices["ranks"] > 1
            words = f"{title} of each of {report.choices['ranks']} GPUs" if each else title
            lines += ["", *_part_as_text(words, part)]
    lines += ["", "Plan", *_plan_as_text(report.choices, model)]
    time = report.time
    lines.append(
        f"  {time['tokens_per_step']:,} tokens and {time['flops_per_step'] / 1e12:,.3g} TFLOP a "
        f"step ({time['formula']})"
    )
    lines += _time_in_words(time)
    if report.spill is not None:
        lines += [
            "",
            "What goes to engine.disk",
            *(f"  {said}" for said in report.spill.sentences()),
        ]
    return "\n".join([*lines, *_notes(machine)])


def _notes(machine: Machine) -> list[str]:
    return ["", *machine.notes] if machine.notes else []


def _plan_as_text(choices: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Returns the choices of the plan as lines of text. `model` is that of the report."""
    blocks, back = model["blocks"], model["backward_blocks"]
    which = "blocks" if back == blocks else "blocks with a backward"
    boundaries = "on the host" if choices["host_boundaries"] else "on the device"
    if choices.get("boundary_blocks") == 2:
        boundaries += ", of every second block"
    if choices.get("parked_gradients"):
        boundaries += ", gradients parked on the device"
    rows = (
        f"  {choices['device']}: {choices['micro_batches']} x {choices['micro_batch_size']} rows a "
        f"step, {counted(choices.get('rounds', 1), 'round')}, gradient sum "
        f"{choices['gradient_sum']}, slots {choices['slots']}"
    )
    if choices.get("ranks", 1) > 1:
        device = "GPUs" if choices["device"] == "cuda" else "processes"
        rows = f"  {choices['ranks']} {device}, and on each of them\n{rows}"
    if choices.get("compiled") is not None:
        rows += f", {kernels_in_words(choices)}"
    lines = [
        rows,
        f"  {choices.get('kept_blocks', 0)} of {back} {which} keep their activations, boundaries "
        f"{boundaries}, logits of {choices['loss_chunk']} positions at once",
    ]
    if choices.get("spilled_units"):
        lines.append(f"  {choices['spilled_units']} of {blocks + 2} units have moments on the disk")
    if choices.get("spilled_boundaries"):
        lines.append(f"  {choices['spilled_boundaries']:,} boundaries of a step are on the disk")
    if choices.get("device_homes") is not None:
        # The embedding and the head are units as well.
        lines += [f"  {line}" for line in _updates_in_words(choices, blocks + 2, model)]
    return lines


def _time_in_words(time: Mapping[str, Any]) -> list[str]:
    """Returns lines that say how long a step and the run take, or no lines if no rates are
    known.
    """
    seconds = time.get("step_seconds")
    if not seconds:
        return []
    rate = float(f"{time['tokens_per_step'] / seconds:.3g}")
    how = "estimated from the card's specification" if time.get("estimated") else "predicted"
    lines = [f"  about {in_seconds(seconds)} a step, {rate:,.0f} tokens/s, {how}"]
    if time.get("run_seconds"):
        run = f"  {counted(time['steps'], 'step')}: about {in_hours(time['run_seconds'])}"
        if time.get("energy_kwh") is not None:
            run += f", about {time['energy_kwh']:,.3g} kWh at {time['watts']:,.0f} W"
            if time.get("cost") is not None:
                run += f", which cost {time['cost']:,.2f}"
        lines.append(run)
    return lines


def kernels_in_words(choices: Mapping[str, Any]) -> str:
    """Returns a text that says whether the blocks are compiled, and how they are launched."""
    kernels = "compiled kernels" if choices["compiled"] else "eager kernels"
    return f"{kernels}, launched as CUDA graphs" if choices.get("graphs") else kernels


def _updates_in_words(
    choices: Mapping[str, Any], units: int, model: Mapping[str, Any]
) -> list[str]:
    """Returns a line that says where optimizers of units that live in RAM run, and none if the
    whole model lives on the GPU. `units` counts the blocks, embedding and head.
    """
    homes, settled = len(choices["device_homes"]), choices.get("settled_units", 0)
    if settled == units:
        return []
    all_units = "all units that live in RAM" if settled else "all units"
    trained = model["trained_units"]
    if trained < units:
        where = f"{homes} of them on the GPU" if homes else "on the host"
        where = "where they live" if settled else where
        return [f"{trained} of {units} units are trained, and updated {where}"]
    if not homes:
        return [f"{all_units} are updated on the host"]
    pieces = choices.get("update_buffers")
    through = ""
    if pieces:
        buffers = buffers_in_words(pieces, choices.get("spare_buffers", 0))
        through = f", their states there in pieces, {buffers}"
    return [f"updated on the GPU: {homes} of {units - settled} units{through}"]


def _part_as_text(title: str, part: Part) -> list[str]:
    limit = "" if part.limit is None else f" of {in_gib(part.limit)} free"
    share = f", {100 * part.total / part.limit:.0f} %" if part.limit else ""
    width = max(len(item.name) for item in part.items)
    lines = [f"{title}: {in_gib(part.total)}{limit}{share}"]
    for item in part.items:
        if item.bytes:
            line = f"  {item.name:<{width}}  {in_gib(item.bytes):>10}  {item.note}"
            lines.append(line.rstrip())
    return lines


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.2f} million"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

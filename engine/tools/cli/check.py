"""The command `launch.py check`: the fit report of a preset or a model.

Without either, it prints what a machine can train; with ``--table``, it prints a table of models
and machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config.optimizers import OPTIMIZERS
from engine.config.setting_warnings import setting_warnings
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.known_machines import known_name, machines, with_figures
from engine.machine.offload_folder import check_offload_folder
from engine.machine.read_machine import Machine, read_machine
from engine.machine.several_gpus import named_with_several
from engine.model.build.find_shape import adapted_shape
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.fitting_machines import machines_for
from engine.planning.fit.model_table import (
    BEST,
    HERE,
    LEGEND,
    SHOWN,
    TRIED,
    Column,
    as_details,
    as_dicts,
    as_text,
    cell,
    cell_text,
    columns,
    counts_text,
    csv_parts,
    method_text,
    rows_of,
)
from engine.planning.fit.pool_costs import costs_of
from engine.planning.fit.report import FitReport, estimate, with_times
from engine.planning.fit.requirements import FitStatus, SessionFacts
from engine.planning.shape.model_shape import ModelShape
from engine.runs.trackers.known_trackers import destinations
from engine.text import billions, in_gib
from engine.tools.cli.check_data import checked_data
from engine.tools.cli.check_nodes import check_nodes
from engine.tools.cli.check_report import notes, report_as_text
from engine.tools.cli.pool_text import pool_as_text
from engine.training.weights.usable_start import refuse_unusable


@dataclass(frozen=True)
class CheckedJob:
    """The job to check, as the command line names it.

    A `model` without a preset is checked with the default settings; with a preset, it replaces the
    preset's model. `overrides` are settings such as ``train.steps=10``. An `optimizer` replaces
    that of the settings; with `BEST`, each cell of a table is about the first that fits. A `method`
    replaces `train.method`.
    """

    preset: str | Path | None = None
    model: str | None = None
    overrides: Sequence[str] = ()
    optimizer: str | None = None
    method: str | None = None

    @property
    def any_optimizer(self) -> bool:
        """Whether each cell of a table is about the first optimizer that fits."""
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
        if self.method is not None:
            config = config.with_values({"train.method": self.method})
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
    """The machine to check, as the command line names it: a known one or, without a `name`, this
    one.

    Figures given in GiB replace those of the machine.
    """

    name: str | None = None
    ram_gib: float | None = None
    gpu_gib: float | None = None
    disk_gib: float | None = None
    gpus: int | None = None
    """Number of cards of a known machine. This machine has those that it has."""
    nodes: int = 1
    """Number of nodes like the machine that compute the job."""
    network_gbits: float | None = None
    """Gbit/s that the network brings to each node; None stands for what was measured, or is
    assumed.
    """

    @property
    def facts(self) -> SessionFacts:
        """Number of nodes, and the rate of the network between them."""
        return SessionFacts(nodes=self.nodes, network=(self.network_gbits or 0.0) * 1e9 / 8)

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

    Without a preset and a model, the text lists what the machine can train. Raises RamstreamError
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
    refuse_unusable(config)
    if machine.nodes > 1 or machine.network_gbits is not None:
        if job.preset is not None:
            checked_data(config)  # bad data end here, as without nodes
        return check_nodes(config, chosen, machine.facts, as_json)
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
        f"{as_text(rows, shown)}\n\n{counts_text(rows, shown)}\n{config.train.batch_size} x "
        f"{config.data.max_seq_len:,} tokens a step, {method_text(config)}, "
        f"{config.model.dtype}, {_moments_text(config, job.any_optimizer)}; known machines have"
        " their typical RAM, and speeds of machines that were not measured come from the card's "
        "specification."
        f"{legend}"
    )


def _moments_text(config: TrainConfig, any_optimizer: bool) -> str:
    """Returns a text on how the moments of a table are kept."""
    if not any_optimizer:
        return OPTIMIZERS[config.train.optimizer].states_text
    *formats, last = (OPTIMIZERS[optimizer].format for optimizer in TRIED)
    return f"AdamW's moments in the first of {', '.join(formats)} and {last} that fits"


def what_it_trains(
    config: TrainConfig, machine: Machine, as_json: bool, any_optimizer: bool = False
) -> str:
    """Returns the models of the catalog that fit `machine`, largest first."""
    column = Column(HERE, machine)
    rows = [
        row
        for row in rows_of(config, (column,), any_optimizer=any_optimizer)
        if row.cells[0].status != FitStatus.DOES_NOT_FIT
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
        trained = method_text(config)
        lines += [
            f"The largest model of the catalog that fits is {largest.entry.title}, "
            f"{billions(largest.parameters)} parameters, in "
            f"{in_gib(found.host_bytes)} of RAM: {trained}, with "
            f"{OPTIMIZERS[found.optimizer].states_text}.",
            "",
            as_details(rows),
        ]
        if any_optimizer:
            lines += ["", LEGEND]
    else:
        lines += ["No model of the catalog fits; the starter (presets/starter.yaml) does."]
    return "\n".join([*lines, *notes(machine)])


def run_check(
    config: TrainConfig, machine: Machine, as_json: bool, data: str, runs_dir: str | Path
) -> tuple[str, int]:
    """Returns the report as text or JSON, and the exit code: 1 when the job does not fit. `data` is
    a sentence on the data, or empty. Runs are kept in `runs_dir`.
    """
    if config.engine.disk is not None and machine.here:
        check_offload_folder(config.engine.disk)
    shape = shape_of_run(config)
    report = estimate(config, machine, shape, adapted=adapted_shape)
    report = with_times(report, config, machine, shape, adapted=adapted_shape)
    tracked = destinations(config.output.trackers, runs_dir)
    fits = report.status != FitStatus.DOES_NOT_FIT
    costs = costs_of(report.chosen, config, machine, shape) if fits else None
    if as_json:
        added = {"machine": machine.to_dict(), "data": data, "trackers": tracked}
        spent = {"costs": None if costs is None else costs.to_dict()}
        text = json.dumps(report.to_dict() | added | spent, indent=2)
    else:
        about_data = ["", data] if data else []
        about_trackers = ["", *tracked] if tracked else []
        offers = _offers(config, shape, report)
        doubted = [f"  ? {warning.field}: {warning.text}" for warning in setting_warnings(config)]
        if doubted:
            doubted = ["", "Look at this", *doubted]
        pool = pool_as_text(report.pool, costs) if fits else []
        lines = [*(["", *pool] if pool else []), *doubted, *about_data, *about_trackers, *offers]
        text = "\n".join([report_as_text(report, machine), *lines])
    return text, 1 if report.status == FitStatus.DOES_NOT_FIT else 0


def _offers(config: TrainConfig, shape: ModelShape, report: FitReport) -> list[str]:
    """Returns lines about two machines that could train a job that lacks memory here.

    These are the machine with the least memory and the fastest one.
    """
    memories = [part for part in (report.host, report.gpu) if part is not None]
    if not any(part.status == FitStatus.DOES_NOT_FIT for part in memories):
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
            f"{cell_text(cell(config, shape, machine))}, estimated"
        )
    return lines

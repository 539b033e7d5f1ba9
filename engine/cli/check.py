"""`launch.py check`: the fit report of a preset or a model in the terminal, for this machine or
another; what a machine can train, and the table of models and machines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.settings import TrainConfig
from engine.data.sources import refuse_missing_file
from engine.fit.memory_items import PartName
from engine.fit.model_table import (
    HERE,
    SHOWN,
    Column,
    as_csv,
    as_dicts,
    as_text,
    cell,
    cell_in_words,
    columns,
    machines_for,
    table,
)
from engine.fit.needs import Part, Verdict
from engine.fit.report import FitReport, estimate
from engine.fit.sizes import buffers_in_words
from engine.machine.known_machines import known_name, machines, named_machine, with_figures
from engine.machine.read_machine import Machine, read_machine
from engine.model.find_shape import shape_from_source
from engine.model.shape import ModelShape
from engine.words import counted, in_gib, in_hours, in_seconds

TITLES = ((PartName.HOST, "RAM"), (PartName.GPU, "GPU memory"), (PartName.DISK, "Disk"))


def check(
    preset: str | Path | None,
    model: str | None,
    overrides: Sequence[str],
    runs_dir: str | Path,
    *,
    machine: str | None = None,
    ram_gib: float | None = None,
    gpu_gib: float | None = None,
    disk_gib: float | None = None,
    as_json: bool = False,
) -> tuple[str, int]:
    """What the command line asks for: (text, exit code), as `run_check`. `model` alone is checked
    with the default settings, beside a preset it replaces the preset's; without either, the text
    says what the machine can train. Raises RamstreamError for bad input.
    """
    asked = read_machine(runs_dir) if machine is None else named_machine(machine, ram_gib)
    asked = with_figures(asked, ram_gib, gpu_gib, disk_gib)
    config = _config(preset, model, overrides)
    if preset is None and model is None:
        return what_it_trains(config, asked, as_json), 0
    if preset is not None:
        for part, _ in config.data.parts():
            refuse_missing_file(part.only_source)
    return run_check(config, asked, as_json)


def check_table(
    preset: str | Path | None,
    overrides: Sequence[str],
    runs_dir: str | Path,
    names: Sequence[str],
    form: str,
) -> str:
    """Models x machines as `form` says: text, json or csv. names: of known machines beside this
    one; by default a few in text, and all that are supported in the other forms. Raises
    RamstreamError for bad input.
    """
    config = _config(preset, None, overrides)
    if not names:
        names = SHOWN if form == "text" else [known.name for known in machines() if known.supported]
    shown = columns([known_name(name) for name in names], read_machine(runs_dir))
    rows = table(config, shown)
    if form == "csv":
        return as_csv(rows, shown).rstrip("\n")
    if form == "json":
        return json.dumps(
            {
                "machines": {column.name: column.machine.to_dict() for column in shown},
                "models": as_dicts(rows, shown),
            },
            indent=2,
        )
    t = config.train
    return (
        f"{as_text(rows, shown)}\n\n{t.batch_size} x {config.data.max_seq_len:,} tokens a step, "
        f"{config.model.dtype}; known machines have their typical RAM, and speeds of machines that "
        "were not measured come from the card's specification."
    )


def what_it_trains(config: TrainConfig, machine: Machine, as_json: bool) -> str:
    """The models of the catalog that fit `machine`, largest first."""
    column = Column(HERE, machine)
    rows = [row for row in table(config, (column,)) if row.cells[0].verdict != Verdict.DOES_NOT_FIT]
    rows.sort(key=lambda row: -row.parameters)
    if as_json:
        return json.dumps(
            {"machine": machine.to_dict(), "models": as_dicts(rows, (column,))}, indent=2
        )
    card = machine.gpus[0].name if machine.gpus else "the CPU, since there is no GPU"
    lines = [f"{in_gib(machine.ram_available)} of RAM free, computing on {card}."]
    if rows:
        largest = rows[0]
        lines += [
            f"The largest model of the catalog that fits is {largest.entry.title}, "
            f"{_billions(largest.parameters)} parameters, in "
            f"{in_gib(largest.cells[0].host_bytes)} of RAM.",
            "",
            as_text(rows, (column,)),
        ]
    else:
        lines += ["No model of the catalog fits; the starter (presets/starter.yaml) does."]
    return "\n".join([*lines, *(["", *machine.notes] if machine.notes else [])])


def _config(preset: str | Path | None, model: str | None, overrides: Sequence[str]) -> TrainConfig:
    config = (
        TrainConfig.from_dict(
            {
                "name": model or "check",
                "model": {"source": model or "any model"},
                "data": {"source": "any data set"},
            }
        )
        if preset is None
        else TrainConfig.load(preset)
    )
    if preset is not None and model is not None:
        config = config.with_values({"model.source": model})
    return config.with_overrides(overrides)


def run_check(config: TrainConfig, machine: Machine, as_json: bool) -> tuple[str, int]:
    """The report as text or JSON, and 1 when the job does not fit, else 0."""
    shape = shape_from_source(config.model)
    report = estimate(config, machine, shape)
    text = (
        json.dumps(report.to_dict() | {"machine": machine.to_dict()}, indent=2)
        if as_json
        else "\n".join([report_as_text(report, machine), *_offers(config, shape, report)])
    )
    return text, 1 if report.verdict == Verdict.DOES_NOT_FIT else 0


def _offers(config: TrainConfig, shape: ModelShape, report: FitReport) -> list[str]:
    """Where memory is what fails: what machines would train this, the one with the least GPU memory
    and the fastest.
    """
    if not any(
        part is not None and part.verdict == Verdict.DOES_NOT_FIT
        for part in (report.host, report.gpu)
    ):
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
    """The report for people: verdict first, then every item, the plan, and what would help."""
    m, c, t = report.model, report.choices, report.time
    active = (
        ""
        if m["active_parameters"] == m["parameters"]
        else f" ({_billions(m['active_parameters'])} active)"
    )
    lines = [
        f"{m['source']}: {m['model_type']}, {_billions(m['parameters'])} parameters{active} in "
        f"{m['blocks']} blocks, {m['dtype']}",
        report.headline,
    ]
    lines += [f"  - {reason}" for reason in report.reasons]
    if report.remedies:
        lines += ["", "What would help"]
        for remedy in report.remedies:
            lines += [
                f"  * {remedy.text}",
                "      "
                + " ".join(
                    f"--set {name}={_yaml(value)}" for name, value in remedy.changes.items()
                ),
            ]
    for name, title in TITLES:
        part = getattr(report, name)
        if part is not None:
            lines += ["", *_part_as_text(title, part)]
    boundaries = "on the host" if c["host_boundaries"] else "on the device"
    on_device = (
        f"{c['resident_blocks']} of {m['blocks']} blocks stay on the device"
        if c["resident_blocks"]
        else "all blocks are streamed"
    )
    lines += [
        "",
        "Plan",
        f"  {c['device']}: {c['micro_batches']} x {c['micro_batch_size']} rows a step, "
        f"{counted(c.get('rounds', 1), 'round')}, gradient sum {c['gradient_sum']}, slots "
        f"{c['slots']}" + (f", {kernels_in_words(c)}" if c.get("compiled") is not None else ""),
        f"  {on_device}, {c.get('kept_blocks', 0)} keep their activations, boundaries "
        f"{boundaries}, logits of {c['loss_chunk']} positions at once",
        *(
            [f"  {_updates_in_words(c, m['blocks'] + 2)}"]
            if c.get("device_homes") is not None
            else []
        ),
        f"  {t['tokens_per_step']:,} tokens and {t['flops_per_step'] / 1e12:,.3g} TFLOP a step "
        f"({t['formula']})",
    ]
    lines += _time_in_words(t)
    return "\n".join([*lines, *(["", *machine.notes] if machine.notes else [])])


def _time_in_words(t: Mapping[str, Any]) -> list[str]:
    seconds = t.get("step_seconds")
    if not seconds:
        return []
    rate = float(f"{t['tokens_per_step'] / seconds:.3g}")
    how = "estimated from the card's specification" if t.get("estimated") else "predicted"
    lines = [f"  about {in_seconds(seconds)} a step, {rate:,.0f} tokens/s, {how}"]
    if t.get("run_seconds"):
        cost = "" if t.get("cost") is None else f", which cost {t['cost']:,.2f}"
        energy = (
            ""
            if t.get("energy_kwh") is None
            else f", about {t['energy_kwh']:,.3g} kWh at {t['watts']:,.0f} W{cost}"
        )
        lines.append(f"  {counted(t['steps'], 'step')}: about {in_hours(t['run_seconds'])}{energy}")
    return lines


def kernels_in_words(choices: Mapping[str, Any]) -> str:
    return "compiled kernels" if choices["compiled"] else "eager kernels"


def _updates_in_words(choices: Mapping[str, Any], units: int) -> str:
    """Where the optimizer runs; `units` are the blocks, the embedding and the head."""
    homes = len(choices["device_homes"])
    if not homes:
        return "all units are updated on the host"
    pieces = choices.get("update_buffers")
    through = (
        ", their states there in pieces, "
        f"{buffers_in_words(pieces, choices.get('spare_buffers', 0))}"
        if pieces
        else ""
    )
    return f"updated on the GPU: {homes} of {units} units{through}"


def _part_as_text(title: str, part: Part) -> list[str]:
    limit = "" if part.limit is None else f" of {in_gib(part.limit)} free"
    share = f", {100 * part.total / part.limit:.0f} %" if part.limit else ""
    width = max(len(item.name) for item in part.items)
    return [
        f"{title}: {in_gib(part.total)}{limit}{share}",
        *(
            f"  {item.name:<{width}}  {in_gib(item.bytes):>10}  {item.note}".rstrip()
            for item in part.items
            if item.bytes
        ),
    ]


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.2f} million"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

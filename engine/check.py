"""`launch.py check`: the fit report of a preset or a model in the terminal, for this machine or another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config import TrainConfig
from engine.data.sources import refuse_missing_file
from engine.errors import ConfigError
from engine.fit import DOES_NOT_FIT, FitReport, Part, estimate, in_gib
from engine.machine import Machine, read_machine
from engine.machines import named_machine, with_figures
from engine.sizes import buffers_in_words

TITLES = (("host", "RAM"), ("gpu", "GPU memory"), ("disk", "Disk"))


def check(preset: str | Path | None, model: str | None, overrides: Sequence[str], runs_dir: str | Path, *,
          machine: str | None = None, ram_gib: float | None = None, gpu_gib: float | None = None,
          disk_gib: float | None = None, as_json: bool = False) -> tuple[str, int]:
    """What the command line asks for: (text, exit code), as `run_check`. `model` alone is checked with the default
    settings, beside a preset it replaces the preset's. Raises RamstreamError for bad input."""
    if preset is not None:
        config = TrainConfig.load(preset)
        if model is not None:
            config = config.with_values({"model.source": model})
    elif model is not None:
        config = TrainConfig.from_dict({"name": model, "model": {"source": model}, "data": {"source": "any data set"}})
    else:
        raise ConfigError("check", "nothing to check is given; name a YAML preset or use --model ID_OR_FOLDER.")
    asked = read_machine(runs_dir) if machine is None else named_machine(machine, ram_gib)
    config = config.with_overrides(overrides)
    if preset is not None:
        for part, _ in config.data.parts():
            refuse_missing_file(part.source)
    return run_check(config, with_figures(asked, ram_gib, gpu_gib, disk_gib), as_json)


def run_check(config: TrainConfig, machine: Machine, as_json: bool) -> tuple[str, int]:
    """The report as text or JSON, and 1 when the job does not fit, else 0."""
    report = estimate(config, machine)
    text = json.dumps(report.to_dict() | {"machine": machine.to_dict()}, indent=2) if as_json else \
        report_as_text(report, machine)
    return text, 1 if report.verdict == DOES_NOT_FIT else 0


def report_as_text(report: FitReport, machine: Machine) -> str:
    """The report for people: verdict first, then every item, the plan, and what would help."""
    m, c, t = report.model, report.choices, report.time
    active = "" if m["active_parameters"] == m["parameters"] else f" ({_billions(m['active_parameters'])} active)"
    lines = [f"{m['source']}: {m['model_type']}, {_billions(m['parameters'])} parameters{active} in {m['blocks']} blocks, "
             f"{m['dtype']}", report.headline]
    lines += [f"  - {reason}" for reason in report.reasons]
    if report.remedies:
        lines += ["", "What would help"]
        for remedy in report.remedies:
            lines += [f"  * {remedy.text}",
                      "      " + " ".join(f"--set {name}={_yaml(value)}" for name, value in remedy.changes.items())]
    for name, title in TITLES:
        part = getattr(report, name)
        if part is not None:
            lines += ["", *_part_as_text(title, part)]
    boundaries = "on the host" if c["host_boundaries"] else "on the device"
    on_device = f"{c['resident_blocks']} of {m['blocks']} blocks stay on the device" if c["resident_blocks"] else \
        "all blocks are streamed"
    lines += ["", "Plan",
              f"  {c['device']}: {c['micro_batches']} x {c['micro_batch_size']} rows a step, "
              f"{counted(c.get('rounds', 1), 'round')}, gradient sum {c['gradient_sum']}, slots {c['slots']}"
              + (f", {kernels_in_words(c)}" if c.get("compiled") is not None else ""),
              f"  {on_device}, {c.get('kept_blocks', 0)} keep their activations, boundaries {boundaries}, logits of "
              f"{c['loss_chunk']} positions at once",
              *([f"  {_updates_in_words(c, m['blocks'] + 2)}"] if c.get("device_homes") is not None else []),
              f"  {t['tokens_per_step']:,} tokens and {t['flops_per_step'] / 1e12:,.3g} TFLOP a step ({t['formula']})"]
    seconds = t.get("step_seconds")
    if seconds:
        rate = float(f"{t['tokens_per_step'] / seconds:.3g}")
        lines.append(f"  about {in_seconds(seconds)} a step, {rate:,.0f} tokens/s, predicted")
    return "\n".join([*lines, *(["", *machine.notes] if machine.notes else [])])


def counted(count: int, thing: str) -> str:
    """1 round, 2 rounds, 3 micro-batches."""
    return f"{count:,} {thing}" + ("" if count == 1 else "es" if thing.endswith("ch") else "s")


def in_seconds(seconds: float) -> str:
    """0.034 s, 2.41 s, 11.5 s, 1,234 s."""
    return f"{seconds:,.0f} s" if seconds >= 99.95 else f"{seconds:.1f} s" if seconds >= 9.995 else f"{seconds:.3g} s"


def kernels_in_words(choices: Mapping[str, Any]) -> str:
    return "compiled kernels" if choices["compiled"] else "eager kernels"


def _updates_in_words(choices: Mapping[str, Any], units: int) -> str:
    """Where the optimizer runs; `units` are the blocks, the embedding and the head."""
    homes = len(choices["device_homes"])
    if not homes:
        return "all units are updated on the host"
    pieces = choices.get("update_buffers")
    through = f", their states there in pieces, {buffers_in_words(pieces, choices.get('spare_buffers', 0))}" if pieces else ""
    return f"updated on the GPU: {homes} of {units} units{through}"


def _part_as_text(title: str, part: Part) -> list[str]:
    limit = "" if part.limit is None else f" of {in_gib(part.limit)} free"
    share = f", {100 * part.total / part.limit:.0f} %" if part.limit else ""
    width = max(len(item.name) for item in part.items)
    return [f"{title}: {in_gib(part.total)}{limit}{share}",
            *(f"  {item.name:<{width}}  {in_gib(item.bytes):>10}  {item.note}".rstrip()
              for item in part.items if item.bytes)]


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.2f} million"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

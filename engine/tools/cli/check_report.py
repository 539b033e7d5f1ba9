"""A fit report as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.machine.read_machine import Machine
from engine.planning.fit.answers_memory import AnswersMemory
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.report import FitReport
from engine.planning.fit.requirements import Part
from engine.text import billions, counted, in_gib, in_hours, in_percent, in_seconds

TITLES = ((PartName.HOST, "RAM"), (PartName.GPU, "GPU memory"), (PartName.DISK, "Disk"))


def report_as_text(report: FitReport, machine: Machine) -> str:
    """Returns the report as text for people.

    It contains whether the job fits, then what would help, every item, the plan, and the time.
    """
    model = report.model
    active = ""
    if model["active_parameters"] != model["parameters"]:
        active = f" ({billions(model['active_parameters'])} active)"
    trained = ""
    if model["trained_parameters"] != model["parameters"]:
        trained = f", {billions(model['trained_parameters'])} of them trained"
    lines = [
        f"{model['source']}: {model['model_type']}, {billions(model['parameters'])} "
        f"parameters{active} in {model['blocks']} blocks{trained}, {model['dtype']}",
        report.headline,
    ]
    lines += [f"  - {reason}" for reason in report.reasons]
    if report.suggestions:
        lines += ["", "What would help"]
        for suggestion in report.suggestions:
            changes = [f"--set {name}={_yaml(value)}" for name, value in suggestion.changes.items()]
            text = suggestion.exactness_text
            if suggestion.places:
                text = f"{suggestion.places} {text}"
            if suggestion.time_text:
                text = f"{suggestion.time_text}. {text}"
            lines += [f"  * {suggestion.text}", f"      {text}", "      " + " ".join(changes)]
    ranks = report.chosen.choices.sharding.ranks_per_node
    for name, title in TITLES:
        part = getattr(report, name)
        if part is not None:
            sentence = (
                f"{title} of each of {ranks} GPUs" if name == PartName.GPU and ranks > 1 else title
            )
            lines += ["", *_part_as_text(sentence, part)]
    lines += ["", "Plan", *_plan_as_text(report.choices, model)]
    time = report.time
    lines.append(
        f"  {time['tokens_per_step']:,} tokens and {time['flops_per_step'] / 1e12:,.3g} TFLOP a "
        f"step ({time['formula']})"
    )
    lines += _time_text(time)
    if report.answers is not None:
        lines += ["", "Answers, of what training leaves free", *_answers_as_text(report.answers)]
    if report.disk_offload is not None:
        lines += [
            "",
            "What goes to engine.disk",
            *(f"  {text}" for text in report.disk_offload.sentences()),
        ]
    return "\n".join([*lines, *notes(machine)])


def notes(machine: Machine) -> list[str]:
    """Returns the notes on a machine, and what was found there, as lines."""
    lines = [*machine.notes, *(found.sentence for found in machine.findings)]
    return ["", *lines] if lines else []


def _answers_as_text(answers: AnswersMemory) -> list[str]:
    rows = answers.rows(in_gib)
    width = max(len(name) for name, _, _ in rows)
    told = [", ".join(filter(None, each)) for _, *each in rows]
    return [f"  {name:<{width}}  {text}" for (name, *_), text in zip(rows, told)]


def _plan_as_text(choices: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Returns the choices of the plan as lines of text. `model` is that of the report."""
    blocks, back = model["blocks"], model["backward_blocks"]
    which = "blocks" if back == blocks else "blocks with a backward"
    block_inputs = block_inputs_text(choices)
    if choices.get("blocks_per_saved_input") == 2:
        block_inputs += ", of every second block"
    if choices.get("gradients_on_gpu"):
        block_inputs += ", gradients kept on the device"
    rows = (
        f"  {choices['device']}: {choices['micro_batches']} x {choices['micro_batch_size']} rows a "
        f"step, {counted(choices.get('rounds', 1), 'round')}, main_grad "
        f"{choices['main_grad']}, slots {choices['slots']}"
    )
    ranks, nodes_per_replica = (
        choices["ranks"] // choices["nodes_per_replica"],
        choices["nodes_per_replica"],
    )
    nodes = choices["replicas"] * nodes_per_replica
    if ranks * nodes > 1:
        device = "GPUs" if choices["device"] == "cuda" else "processes"
        how = "shares" if nodes_per_replica > 1 else "copies"
        where = f"{nodes} nodes, with {how} of weights and moments, of " if nodes > 1 else ""
        rows = f"  {where}{ranks} {device}, and on each of them\n{rows}"
    if choices.get("compiled") is not None:
        rows += f", {kernels_text(choices)}"
    lines = [
        rows,
        f"  {choices.get('blocks_without_recompute', 0)} of {back} {which} keep their activations, "
        f"{block_inputs}, logits of {choices['loss_chunk']} positions at once",
    ]
    if choices.get("disk_offloaded_units"):
        lines.append(
            f"  {choices['disk_offloaded_units']} of {blocks + 2} units have moments on the disk"
        )
    if choices.get("disk_offloaded_block_inputs"):
        lines.append(
            f"  {choices['disk_offloaded_block_inputs']:,} block inputs of a step are on the disk"
        )
    if choices.get("device_updated_units") is not None:
        # The embedding and the head are units as well.
        lines += [f"  {line}" for line in _updates_text(choices, blocks + 2, model)]
    return lines


def _time_text(time: Mapping[str, Any]) -> list[str]:
    """Returns lines on how long a step and the run take, or no lines if no rates are known."""
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


def block_inputs_text(choices: Mapping[str, Any]) -> str:
    """Returns a text on where block inputs are kept, and the outputs of attention."""
    text = f"block inputs on the {'host' if choices['offloaded_block_inputs'] else 'device'}"
    if choices.get("attention_blocks"):
        text += f" with the attention of {counted(choices['attention_blocks'], 'block')}"
    return text


def kernels_text(choices: Mapping[str, Any]) -> str:
    """Returns a text on whether the blocks are compiled, and how they are launched."""
    kernels = "compiled kernels" if choices["compiled"] else "eager kernels"
    if choices.get("tile_tokens"):
        return f"{kernels}, but blocks in sequence chunks of {choices['tile_tokens']:,} tokens"
    return f"{kernels}, launched as CUDA graphs" if choices.get("graphs") else kernels


def _updates_text(choices: Mapping[str, Any], units: int, model: Mapping[str, Any]) -> list[str]:
    """Returns a line on where optimizers of units that live in RAM run, and none if the whole model
    lives on the GPU. `units` counts the blocks, embedding and head.
    """
    device_updated, gpu_resident = (
        len(choices["device_updated_units"]),
        choices.get("gpu_resident_units", 0),
    )
    if gpu_resident == units:
        return []
    all_units = "all units that live in RAM" if gpu_resident else "all units"
    trained = model["trained_units"]
    if trained < units:
        where = f"{device_updated} of them on the GPU" if device_updated else "on the host"
        where = "where they live" if gpu_resident else where
        return [f"{trained} of {units} units are trained, and updated {where}"]
    if not device_updated:
        late = ", the moments after all weights" if choices.get("moments_after_weights") else ""
        return [f"{all_units} are updated on the host{late}"]
    chunks = choices.get("update_buffers")
    through = ""
    if chunks:
        through = f", their states there in pieces, {chunks} at a time"
    return [f"updated on the GPU: {device_updated} of {units - gpu_resident} units{through}"]


def _part_as_text(title: str, part: Part) -> list[str]:
    limit = "" if part.limit is None else f" of {in_gib(part.limit)} free"
    share = f", {in_percent(part.total, part.limit)}" if part.limit else ""
    width = max(len(item.words) for item in part.items)
    lines = [f"{title}: {in_gib(part.total)}{limit}{share}"]
    for item in part.items:
        if item.bytes:
            line = f"  {item.words:<{width}}  {in_gib(item.bytes):>10}  {item.note}"
            lines.append(line.rstrip())
    return lines


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

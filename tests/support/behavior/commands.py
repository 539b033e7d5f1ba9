"""Command lines that are right: help, check in all its forms, tables, runs, traces, exports and a
bench.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.behavior.plain import digest, each_text, lines_of, shape_of, unmeasured
from tests.support.behavior.sides import Ended, Side
from tests.support.behavior.small import recorded_runs, small_place

HERE = "This machine"
FIGURES = ("--ram-gib", "96", "--gpu-gib", "20", "--disk-gib", "300")
MACHINES = ("RTX 4090", "H100 SXM", "A100 40GB", "B200")


def told(side: Side, ended: Ended, measured: bool = False) -> dict[str, Any]:
    """What a command did, as facts."""

    def plain(text: str) -> list[str]:
        return [
            unmeasured(side.plain(line)) if measured else side.plain(line)
            for line in lines_of(text)
        ]

    return {"code": ended.code, "out": plain(ended.out), "err": plain(ended.err)}


def gather(side: Side) -> dict[str, Any]:
    facts: dict[str, Any] = {}

    def run(*arguments: str, measured: bool = False, cwd: Path | None = None) -> Ended:
        ended = side.launch(*arguments, cwd=cwd)
        name = side.plain(" ".join(arguments)) + (
            "" if cwd is None else " (in a folder of its own)"
        )
        facts[name] = told(side, ended, measured)
        return ended

    for command in ((), ("train",), ("check",), ("export",), ("runs",), ("trace",), ("bench",)):
        run(*command, "--help")
    _checks(side, run, facts)
    _tables(side, facts)
    _records(side, run, facts)
    _bench(side, facts)
    return facts


def _checks(side: Side, run: Any, facts: dict[str, Any]) -> None:
    presets = sorted(path.name for path in (side.program / "presets").glob("*.yaml"))
    facts["presets"] = presets
    for number, preset in enumerate(presets):
        run("check", f"presets/{preset}", "--machine", MACHINES[number % len(MACHINES)])
    for preset in ("llama-3.3-70b.yaml", "starter.yaml"):
        run("check", f"presets/{preset}", *FIGURES, measured=True)
        _as_json(
            side,
            facts,
            "check",
            f"presets/{preset}",
            "--machine",
            "RTX 4090",
            "--ram-gib",
            "128",
            "--json",
        )
    run(
        "check",
        "presets/qwen3-4b.yaml",
        "--machine",
        "RTX 3090",
        "--ram-gib",
        "64",
        "--set",
        "train.batch_size=8",
        "--set",
        "data.max_seq_len=512",
        "--set",
        "engine.activation_checkpointing=full",
        "--set",
        "output.price_per_kwh=0.3",
        "--set",
        "train.epochs=null",
        "--set",
        "train.steps=100",
    )
    run(
        "check",
        "presets/llama-3.1-8b.yaml",
        "--machine",
        "H200",
        "--set",
        "engine.device=cuda",
        "--set",
        "engine.rounds=2",
        "--set",
        "engine.blocks_kept_in_slots=3",
        "--set",
        "engine.slots=3",
        "--set",
        "engine.kernels=eager",
        "--set",
        "engine.gpu_memory_gib=30",
        "--set",
        "train.micro_batch_size=1",
        "--set",
        "model.dtype=float32",
    )
    run("check", "--model", "Qwen/Qwen2.5-7B", "--machine", "L40S")
    run(
        "check",
        "presets/starter.yaml",
        "--model",
        "meta-llama/Llama-3.1-8B",
        "--machine",
        "RTX 5090",
    )
    run("check", "--machine", "RTX 4090")
    run("check", "--machine", "V100 32GB", "--ram-gib", "512", "--set", "train.batch_size=4")
    _as_json(side, facts, "check", "--machine", "H100 PCIe", "--json")
    run("check", "presets/starter.yaml", measured=True)
    run("check", "presets/starter.yaml", cwd=side.work, measured=True)
    run("check", "presets/starter.yaml", "--ram-gib", "0.01", measured=True)
    facts["check, of this machine"] = shape_of(
        json.loads(side.launch("check", "presets/starter.yaml", "--json").out)
    )


def _as_json(side: Side, facts: dict[str, Any], *arguments: str) -> None:
    """The answer in JSON of a command about a known machine: nothing in it is measured."""
    ended = side.launch(*arguments)
    facts[side.plain(" ".join(arguments))] = {
        "code": ended.code,
        "err": lines_of(ended.err),
        "out": each_text(json.loads(ended.out), side.plain),
    }


def _tables(side: Side, facts: dict[str, Any]) -> None:
    """Models x machines. The column of this machine depends on what is free just now, and is left
    out.
    """
    text = side.launch("check", "--table", "--set", "train.batch_size=16")
    columns = [re.split(r" {2,}", line) for line in text.out.splitlines()]
    facts["check --table"] = {
        "code": text.code,
        "err": text.err,
        "out": [cells[:1] + cells[2:] for cells in columns],
    }
    csv = side.launch(
        "check", "--table", "--csv", *(part for name in MACHINES for part in ("--machine", name))
    )
    rows = csv.out.splitlines()
    facts["check --table --csv"] = {
        "code": csv.code,
        "err": csv.err,
        "out": [row for row in rows if f",{HERE}," not in row],
    }
    some = side.launch(
        "check",
        "presets/starter.yaml",
        "--table",
        "--json",
        "--machine",
        "RTX 4090",
        "--machine",
        "H200",
    )
    found = json.loads(some.out)
    here = found["machines"].pop(HERE)
    for row in found["models"]:
        row["cells"] = {name: cell for name, cell in row["cells"].items() if name != HERE}
    facts["check --table --json"] = {
        "code": some.code,
        "err": some.err,
        "out": each_text(found, side.plain),
        "here": shape_of(here),
    }


def _records(side: Side, run: Any, facts: dict[str, Any]) -> None:
    """Lists, traces and exports of runs whose records are given."""
    place = small_place(side, "commands")
    runs = place / "runs"
    runs.mkdir()
    ids = recorded_runs(runs)
    folder = ("--runs-dir", str(runs))
    run("runs", *folder)
    run("--runs-dir", str(runs), "runs")
    _as_json(side, facts, "runs", "--json", *folder)
    run("runs", "--runs-dir", str(place / "none"))
    run("runs", "--json", "--runs-dir", str(place / "none"))
    for name, step in (
        ("finished", None),
        ("finished", 1),
        ("finished", 5),
        ("cut", None),
        ("damaged", 1),
        ("newer", 10),
    ):
        out = place / f"{name}-{step}.json"
        run(
            "trace",
            ids[name],
            *folder,
            "--out",
            str(out),
            *(() if step is None else ("--step", str(step))),
        )
        facts[f"trace of {name}, step {step}"] = each_text(
            json.loads(out.read_text(encoding="utf-8")), side.plain
        )
    run("trace", ids["finished"], "--runs-dir", "runs", cwd=place)
    facts["trace, name of its file"] = sorted(
        side.plain(path.name) for path in place.glob("*.trace.json")
    )
    for name, options in (
        ("finished", ()),
        ("finished", ("--checkpoint", "6")),
        ("odd-checkpoint", ()),
    ):
        target = place / f"export-{name}-{len(options)}"
        run("export", ids[name], str(target), *options, "--runs-dir", "runs", cwd=place)
        facts[f"export of {name} {' '.join(options)}"] = {
            file.name: digest(file.read_bytes()) for file in sorted(target.iterdir())
        }


def _bench(side: Side, facts: dict[str, Any]) -> None:
    """Its figures are measured; what it says of them, and in which form, is not. It keeps the rates
    that it has measured, by which later runs are predicted, and so has a cache of its own.
    """
    ended = side.launch(
        "bench",
        "presets/starter.yaml",
        "--seconds",
        "0.2",
        "--streamed-only",
        "--set",
        "train.batch_size=2",
        "--set",
        "train.micro_batch_size=2",
        "--json",
        environment={"RAMSTREAM_CACHE": str(side.work / "bench-cache")},
    )
    titles = [re.split(r" {2,}|\d", line.strip())[0] for line in lines_of(ended.err)]
    facts["bench --json"] = {
        "code": ended.code,
        "err": titles,
        "out": shape_of(json.loads(ended.out)),
        "kept": sorted(path.name for path in (side.work / "bench-cache").rglob("*")),
    }

"""A run from the command line: its events, its files, its tokens, its checkpoints, its export, and
how it goes on.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.behavior.commands import told
from tests.support.behavior.plain import digest, each_text, shape_of, unmeasured, without
from tests.support.behavior.sides import Side
from tests.support.behavior.small import recorded_runs, small_place

SETTINGS = (
    "train.steps=6",
    "output.checkpoint_every=3",
    "output.eval_every=3",
    "output.timeline_every=2",
    "output.exact_match_samples=8",
    "output.sample_prompts=['And 12?', 'In Roman numerals: 1994?']",
    "output.sample_tokens=6",
    "train.warmup_steps=2",
    "train.micro_batch_size=4",
    "output.price_per_kwh=0.3",
)
MEASURED = {
    "step_finished": {"seconds", "tokens_per_second", "tflops", "exposed", "data_seconds"},
    "eval_finished": {"seconds"},
    "checkpoint_written": {"seconds"},
    "run_started": {"pid", "device_name"},
    "forecast_checked": {"predicted", "measured", "error"},
    "memory_sampled": {"host_rss", "host_total", "host_pinned", "power"},
}
"""By kind of event: the names of values that are measured. Those of `fit_reported` are taken out
one by one.
"""
EVERY = {"run_id", "time", "elapsed", "seq"}
THINNED = ("job_progressed", "memory_sampled")
"""Kinds of which as many are written as there was time for."""


def gather(side: Side) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    runs = side.work / "record-runs"
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    facts["train"] = told(
        side,
        side.launch("train", "presets/starter.yaml", "--runs-dir", str(runs), *settings),
        measured=True,
    )
    (run,) = runs.iterdir()
    facts |= run_facts(side, run)
    facts |= tokens_facts(side.cache / "tokens")
    trace = side.work / "record.trace.json"
    facts["trace"] = told(
        side,
        side.launch("trace", run.name, "--runs-dir", str(runs), "--step", "4", "--out", str(trace)),
    )
    facts["trace, its rows"] = _trace(json.loads(trace.read_text(encoding="utf-8")))
    facts["list"] = without(
        each_text(
            json.loads(side.launch("runs", "--runs-dir", str(runs), "--json").out), side.plain
        ),
        {"created", "seconds", "predicted", "measured", "error"},
    )
    again = side.launch(
        "train",
        "presets/starter.yaml",
        "--runs-dir",
        str(runs),
        "--set",
        "train.steps=1",
        "--set",
        "output.export=false",
        "--set",
        "output.exact_match_samples=0",
        "--set",
        "model.init=random",
        "--set",
        "model.dtype=bfloat16",
        "--set",
        "train.seed=5",
        "--set",
        "engine.blocks_kept_in_slots=1",
        "--set",
        "engine.activation_checkpointing=offload",
        "--set",
        "train.micro_batch_size=2",
    )
    facts["train with random weights, in bfloat16, streamed"] = told(side, again, measured=True)
    other = next(path for path in runs.iterdir() if path != run)
    facts |= {f"streamed: {name}": fact for name, fact in run_facts(side, other).items()}
    facts |= _resumed(side)
    return facts


def run_facts(side: Side, run: Path) -> dict[str, Any]:
    """The folder of a run: what is in it, and what the record says."""
    facts: dict[str, Any] = {
        "settings": side.plain((run / "config.yaml").read_text(encoding="utf-8")).splitlines(),
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
    }
    for path in sorted((*run.glob("checkpoints/*/*"), *run.glob("export/*"))):
        name = str(path.relative_to(run))
        facts[name] = [path.stat().st_size, digest(path.read_bytes())]
        if path.name == "manifest.json" or (
            path.parent.name == "export" and path.suffix == ".json"
        ):
            facts[f"{name}, as values"] = each_text(
                json.loads(path.read_text(encoding="utf-8")), side.plain
            )
    return facts | events_facts(side, run / "events.jsonl")


def events_facts(side: Side, record: Path) -> dict[str, Any]:
    """The sequence of kinds, and each event with its keys in their order; what is measured has
    become a word.
    """
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    facts: dict[str, Any] = {
        "seq counts on": [line["seq"] for line in lines] == list(range(1, len(lines) + 1)),
        "kinds": [line["kind"] for line in lines if line["kind"] not in THINNED],
        "keys by kind": {},
    }
    for line in lines:
        known = facts["keys by kind"].setdefault(line["kind"], [])
        if list(line) not in known:
            known.append(list(line))
    facts["jobs"] = sorted(
        {
            json.dumps([line["job"], line["total"], line["message"]])
            for line in lines
            if line["kind"] == "job_progressed" and line["total"]
        }
    )
    numbers: dict[str, int] = {}
    for line in lines:
        kind = line["kind"]
        numbers[kind] = numbers.get(kind, 0) + 1
        if kind not in THINNED:
            facts[f"event {kind} {numbers[kind]}"] = _event(side, line)
    return facts


def _event(side: Side, line: dict[str, Any]) -> Any:
    kind = line["kind"]
    if kind == "step_timeline":
        return {
            "step": line["step"],
            "spans": lanes(line["spans"]),
            "keys of waits": shape_of(line["waits"][:1]),
            "keys of spans": shape_of(line["spans"]),
        }
    if kind == "fit_reported":
        return _fit(side, line["report"])
    return each_text(
        without(line, EVERY | MEASURED.get(kind, set())), lambda text: unmeasured(side.plain(text))
    )


def lanes(spans: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By lane: what was done there, in the order in which the lane did it."""
    found: dict[str, list[str]] = {}
    for span in spans:
        found.setdefault(span["lane"], []).append(
            f"{span['op']} {span['unit']} {span.get('micro_batch')}"
        )
    return dict(sorted(found.items()))


def _fit(side: Side, report: dict[str, Any]) -> Any:
    """The report with its exact figures; what a process takes and what is free is measured."""
    measured = ("Runtime", "Libraries")
    for part in ("host", "gpu", "disk"):
        if report.get(part):
            for item in report[part]["items"]:
                if item["name"] in measured:
                    item["bytes"] = "<measured>"
            report[part] |= {"total": "<measured>", "limit": "<measured>"}
            if "least" in report[part]:
                report[part]["least"] = "<measured>"
    return each_text(report, lambda text: unmeasured(side.plain(text)))


def tokens_facts(folder: Path) -> dict[str, Any]:
    """The cache of tokens. The name of each folder tells which code made it, and is not compared;
    what is in it is.
    """
    found = {}
    for tokens in folder.iterdir():
        manifest = json.loads((tokens / "manifest.json").read_text(encoding="utf-8"))
        manifest["body"]["key"] = manifest["checksum"] = "..."
        files = {
            path.name: [path.stat().st_size, digest(path.read_bytes())]
            for path in sorted(tokens.iterdir())
            if path.name != "manifest.json"
        }
        found[json.dumps(files)] = {
            "files": files,
            "manifest": manifest,
            "letters of its name": len(tokens.name),
        }
    return {f"tokens {number}": found[key] for number, key in enumerate(sorted(found))}


def _trace(trace: dict[str, Any]) -> Any:
    """The rows of a trace and what stands in them, without times."""
    events = [
        without(event, {"ts", "dur"})
        for event in trace["traceEvents"]
        if event.get("cat") != "wait"
    ]
    order = sorted(
        events, key=lambda event: (event["pid"], event["tid"])
    )  # of a row, in the order of its events
    return {
        "events": order,
        "the rest": {
            key: value for key, value in trace.items() if key not in ("traceEvents", "otherData")
        },
    }


def _resumed(side: Side) -> dict[str, Any]:
    """Runs of before that go on: cut off, stopped, with a checkpoint that is damaged, and without
    one.
    """
    place = small_place(side, "resumed")
    runs = place / "runs"
    runs.mkdir()
    ids = recorded_runs(runs)
    facts: dict[str, Any] = {}
    for name in ("stopped", "odd-checkpoint", "without-checkpoints"):
        if name == "stopped":
            shutil.rmtree(runs / ids[name] / "checkpoints" / "step-12")
        facts[f"resume a run that is {name}"] = told(
            side,
            side.launch("train", "--resume", ids[name], "--runs-dir", "runs", cwd=place),
            measured=True,
        )
        found = run_facts(side, runs / ids[name])
        facts |= {f"{name}: {thing}": fact for thing, fact in found.items()}
    return facts

"""The bundled starter, all of it: every figure of every step, equal to the bit."""

from __future__ import annotations

import json
from typing import Any

from tests.support.behavior.commands import told
from tests.support.behavior.plain import digest
from tests.support.behavior.record import events_facts
from tests.support.behavior.sides import Side

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "loss_tokens")


def gather(side: Side) -> dict[str, Any]:
    runs = side.work / "starter-runs"
    ended = side.launch("train", "presets/starter.yaml", "--runs-dir", str(runs))
    (run,) = runs.iterdir()
    facts: dict[str, Any] = {"train": told(side, ended, measured=True)}
    lines = [
        json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for line in lines:
        if line["kind"] == "step_finished":
            facts[f"step {line['step']}"] = {name: line[name] for name in EXACT}
    found = events_facts(side, run / "events.jsonl")
    facts |= {
        name: fact for name, fact in found.items() if not name.startswith("event step_finished")
    }
    for path in sorted((*run.glob("checkpoints/*/*"), *run.glob("export/*"))):
        facts[str(path.relative_to(run))] = [path.stat().st_size, digest(path.read_bytes())]
    return facts

"""Predicted against measured on a GPU, through whole runs: `python -m tests.gpu.forecasts [MODEL
ROWS TOKENS STEPS]`.

Random weights in the shape of a catalog model, the starter's conversations and tokenizer, a few
steps; then the run is discarded, so that no checkpoint is written. Prints a line for each run and
quantity, and the items of the predictions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from shutil import copy, rmtree

from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.planning.shape.catalog import entry_of
from engine.runs.record.events import FitReported
from engine.runs.record.following import replay
from engine.text import in_gib
from engine.tools.cli.runs import prediction_check_of
from engine.training.loop import planning
from engine.training.loop.run import start_run
from tests.support.trained_runs import execute

RUNS = (
    ("Qwen/Qwen2.5-0.5B", 64, 1024, 50),
    ("Qwen/Qwen2.5-0.5B", 16, 512, 50),
    ("Qwen/Qwen2.5-3B", 96, 1024, 8),
    ("Qwen/Qwen2.5-3B", 16, 1024, 12),
    ("Qwen/Qwen2.5-7B", 148, 1024, 6),
    ("Qwen/Qwen2.5-7B", 32, 1024, 9),
    ("allenai/OLMoE-1B-7B-0924", 64, 1024, 9),
)
"""Rows and tokens of a step, and steps: the more, the shorter they are, since kernels of the loss
are made for each of 16 sizes as they come.
"""
STARTER_TOKENS = 78_000
"""Of its conversations, by its own tokenizer."""


def folder_of(model: str, place: Path) -> Path:
    """A folder with the configuration of a catalog model and the starter's tokenizer, whose
    vocabulary is smaller.
    """
    place.mkdir(parents=True)
    entry = entry_of(model)
    config = entry.config_of(model)
    (place / "config.json").write_text(json.dumps(config))
    for file in (PROGRAM_ROOT / "assets" / "starter-model").iterdir():
        if "token" in file.name or "template" in file.name:
            copy(file, place)
    return place


def prediction_check(
    model: str, rows: int, tokens: int, steps: int, place: Path, **changes
) -> tuple[str, dict, list[str]]:
    """How a run of a few steps ended, what it recorded, and what its predictions were made of."""
    lines = (PROGRAM_ROOT / "assets" / "starter.jsonl").read_text().splitlines()
    data = place / "data.jsonl"
    folder = folder_of(model, place / "model")
    data.write_text("\n".join(lines * (1 + 2 * rows * tokens // STARTER_TOKENS)) + "\n")
    config = TrainConfig.from_dict(
        {
            "name": model,
            "model": {"source": str(folder), "init": "random"},
            "data": {"source": str(data), "max_seq_len": tokens, "eval_fraction": 0.0},
            "train": {"steps": 1000, "batch_size": rows, "learning_rate": 1e-6},
            "output": {"export": False, "eval_every": 0},
        }
    ).with_values(changes)
    run = start_run(config, place / "runs")
    ended = execute(run, {steps: "discard"})
    reports = [
        record.event.report
        for record in replay(run.folder.events_path)
        if isinstance(record.event, FitReported)
    ]
    items = [
        f"{part}: "
        + ", ".join(f"{item['name']} {in_gib(item['bytes'])}" for item in reports[0][part]["items"])
        for part in ("host", "gpu")
        if reports and reports[0].get(part)
    ]
    return ended.reason, prediction_check_of(run.folder.path), items


def main(asked: list[str]) -> None:
    read_machine = planning.read_machine
    # Of checkpoints that are not written.
    planning.read_machine = lambda path: replace(read_machine(path), disk_free=1 << 50)
    if not asked:
        for run in RUNS:  # each in a program of its own, as a person starts one
            subprocess.run(
                [sys.executable, "-m", "tests.gpu.forecasts", *map(str, run)], check=True
            )
        return
    model, rows, tokens, steps = asked[0], int(asked[1]), int(asked[2]), int(asked[3])
    place = Path(tempfile.mkdtemp())
    ended, found, items = prediction_check(model, rows, tokens, steps, place)
    rmtree(place)
    print(f"{model} {rows} x {tokens}: {ended}", *items, sep="\n  ")
    for name, values in found.items():
        predicted, measured, error = (values[key] for key in ("predicted", "measured", "error"))
        print(
            f"  {name:20} predicted {predicted!s:>20} measured {measured!s:>20}"
            + ("" if error is None else f"  {100 * error:+.1f} %"),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])

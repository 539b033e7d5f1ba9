"""A small run as material: a working directory with its model, data and
preset, and folders of runs in every state, made from its record without the program. All times in
them are fixed, so that what the program says of them can be compared to the last digit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.behavior.sides import Side

SMALL = Path(__file__).resolve().parents[2] / "fixtures" / "small_run"
DAY = "20260102"
MOMENT = 1_767_312_000

Lines = list[dict[str, Any]]


def small_place(side: Side, name: str) -> Path:
    """A new working directory with the small model, its data and its preset."""
    folder = side.work / name
    shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("runs"))
    return folder


def run_ids() -> dict[str, str]:
    """The ids of the runs that `recorded_runs` makes, by their names."""
    return {name: f"{DAY}-{number:06d}-{name}" for number, name in enumerate(EDITED)}


def recorded_runs(folder: Path) -> dict[str, str]:
    """Fill the folder with runs; their ids by name."""
    (source,) = (SMALL / "runs").iterdir()
    ids = run_ids()
    for number, (name, run_id) in enumerate(ids.items()):
        target = folder / run_id
        shutil.copytree(source, target)
        text = (source / "events.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) | {"run_id": run_id} for line in text.splitlines()]
        edited = EDITED[name](lines, target)
        if isinstance(edited, list):
            edited = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in edited)
        if edited is None:
            (target / "events.jsonl").unlink()
        else:
            (target / "events.jsonl").write_text(edited, encoding="utf-8")
        for path in (*target.rglob("*"), target):
            os.utime(path, (MOMENT + number, MOMENT + number))
    return ids


def set_values(target: Path, old: str, new: str) -> None:
    """Replace a line of the settings of a run."""
    path = target / "config.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text, old
    path.write_text(text.replace(old, new), encoding="utf-8")


def until(lines: Lines, kind: str, step: int) -> Lines:
    """The record up to this line."""
    last = next(
        place
        for place, line in enumerate(lines)
        if (line["kind"], line.get("step")) == (kind, step)
    )
    return lines[: last + 1]


def _ended(lines: Lines, state: str, reason: str, error: str = "") -> Lines:
    cut = until(lines, "checkpoint_written", 6)
    last = cut[-1]
    return [
        *cut,
        {
            "kind": "run_ended",
            "run_id": last["run_id"],
            "seq": last["seq"] + 1,
            "time": last["time"] + 0.5,
            "state": state,
            "reason": reason,
            "error_type": error,
        },
    ]


def _damaged(lines: Lines, target: Path) -> str:
    texts = [json.dumps(line, separators=(",", ":")) for line in lines]
    places = [place for place, line in enumerate(lines) if line["kind"] == "step_timeline"]
    texts[places[1]] = texts[places[1]].replace('"op":"forward"', '"op":7')
    texts.insert(places[1], "this is no record")
    texts.insert(places[1], '{"kind":"step_finished","run_id":"x","seq":-4}')
    return "\n".join(texts) + '\n{"kind":"torn'


def _newer(lines: Lines, target: Path) -> Lines:
    """A record of a later version: kinds and fields that nobody knows yet."""
    later = {
        "kind": "moon_phase",
        "run_id": lines[0]["run_id"],
        "seq": 900,
        "time": lines[-1]["time"],
        "phase": "full",
    }
    return [line | {"color": "blue"} for line in lines] + [later]


def _changed(lines: Lines, target: Path) -> Lines:
    set_values(target, "learning_rate: 0.01", "learning_rate: 0.02")
    set_values(target, "name: Small run", "name: <b>Changed</b> & told")
    for line in lines:
        if line["kind"] == "step_finished":
            line["loss"] *= 0.75
            line["seconds"] *= 3
            line["exposed"] = {
                "h2d": line["seconds"] / 2,
                "d2h": 0.001,
                "optimizer": 0.002,
                "moon": 0.003,
            }
    return lines


def _broken_settings(lines: Lines, target: Path) -> Lines:
    (target / "config.yaml").write_text("train: {steps: many}\n", encoding="utf-8")
    return lines


def _odd_checkpoint(lines: Lines, target: Path) -> Lines:
    block = target / "checkpoints" / "step-12" / "0001-block-0.planes"
    content = bytearray(block.read_bytes())
    content[100] ^= 1
    block.write_bytes(content)
    return until(lines, "checkpoint_written", 12)


def _without_checkpoints(lines: Lines, target: Path) -> Lines:
    shutil.rmtree(target / "checkpoints")
    return until(lines, "step_finished", 5)


def _described(lines: Lines, target: Path) -> Lines:
    about = {"name": "What a person calls it", "note": "Two lines\nof a note"}
    (target / "about.json").write_text(json.dumps(about), encoding="utf-8")
    return lines


def _other_data(lines: Lines, target: Path) -> Lines:
    set_values(target, "source: data.jsonl", "source: other.jsonl")
    return until(lines, "checkpoint_written", 6)


def _fewer_steps(lines: Lines, target: Path) -> Lines:
    set_values(target, "steps: 12", "steps: 3")
    return until(lines, "checkpoint_written", 6)


def _failed(lines: Lines, target: Path) -> Lines:
    return _ended(lines, "failed", "The loss of step 7 is not a finite number.", "NonFiniteError")


EDITED: dict[str, Callable[[Lines, Path], Lines | str | None]] = {
    "finished": lambda lines, target: lines,
    "cut": lambda lines, target: until(lines, "step_finished", 8),
    "failed": _failed,
    "stopped": lambda lines, target: _ended(lines, "stopped", "Stopped and saved at step 6."),
    "discarded": lambda lines, target: _ended(lines, "discarded", "Discarded at step 6."),
    "preparing": lambda lines, target: lines[:3],
    "empty": lambda lines, target: None,
    "damaged": _damaged,
    "newer": _newer,
    "changed": _changed,
    "broken-settings": _broken_settings,
    "odd-checkpoint": _odd_checkpoint,
    "without-checkpoints": _without_checkpoints,
    "described": _described,
    "other-data": _other_data,
    "fewer-steps": _fewer_steps,
}

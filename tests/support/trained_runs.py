"""Runs that really train, on the CPU, and what they leave on the disk."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config.settings import TrainConfig
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.runs.record.events import RunEnded, StepFinished
from engine.runs.record.following import replay
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import Run, resume_run, start_run


def execute(run: Run, at_step: dict[int, str] | None = None) -> RunEnded:
    """Runs to the end; `at_step` gives the request to make when a step has finished."""

    def react(record):
        if isinstance(record.event, StepFinished) and at_step and record.event.step in at_step:
            run.request(at_step[record.event.step])

    run.recorder.subscribe(react)
    return run.execute()


def trained(config: TrainConfig, runs: Path, at_step: dict[int, str] | None = None) -> Run:
    """Returns a run of these settings that has finished, or was stopped as `at_step` says."""
    run = start_run(config, runs)
    ended = execute(run, at_step)
    assert ended.state == ("stopped" if at_step else "finished"), ended.reason
    return run


def resumed_to_the_end(stopped: Run) -> Run:
    """Returns the run that goes on where `stopped` was stopped, and has finished."""
    again = resume_run(stopped.folder.path.parent, stopped.folder.id)
    ended = execute(again)
    assert ended.state == "finished", ended.reason
    return again


def events_of(run: Run, kind: type) -> list:
    """Returns the events of one kind in the run's record."""
    return [r.event for r in replay(run.folder.events_path) if isinstance(r.event, kind)]


def files_of(run: Run) -> dict[int, dict[str, bytes]]:
    """Returns the unit files of all checkpoints of a run, by step and name."""
    found = {}
    for path in run.folder.checkpoints_path.glob("step-*"):
        files = [file for file in path.iterdir() if file.suffix in (".planes", ".frozen")]
        found[int(path.name[5:])] = {file.name: file.read_bytes() for file in files}
    return found


def planes_on_disk(run: Run) -> dict[str, bytes]:
    """Returns the bytes of the newest checkpoint's files by name, and its step."""
    info = newest_checkpoint(run.folder.checkpoints_path)
    files = [path for path in sorted(info.path.iterdir()) if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in files} | {"step": str(info.step).encode()}


def weights_in(checkpoint: Path) -> dict[tuple[str, str], bytes]:
    """Returns the planes of weights in a checkpoint, by unit and plane."""
    found = {}
    for unit in json.loads((checkpoint / "manifest.json").read_text())["units"]:
        held = (checkpoint / unit["file"]).read_bytes()
        for plane, entry in unit["planes"].items():
            if plane in WEIGHT_PLANES:
                begin = entry["offset"]
                found[unit["unit"], plane] = held[begin : begin + entry["bytes"]]
    return found

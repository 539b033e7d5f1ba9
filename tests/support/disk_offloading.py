"""Runs in which moments are on the disk, on a machine whose RAM would hold them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from engine.planning.fit import requirements
from engine.planning.layout import disk_chunks
from engine.training.loop import planning
from engine.training.loop.run import Run, start_run
from tests.support.folders import make_config
from tests.support.trained_runs import execute

UNITS = 5
"""The model has an embedding, three blocks and a head."""
PIECE = 256
"""A piece has so few elements that a unit of the tiny model has many of them."""


def offload_to_disk(count: int, patch: Any) -> None:
    """Makes the planner keep the moments of this many units on the disk, from now on. `patch` is
    pytest's `monkeypatch`, or anything with its `setattr`.
    """
    plain = getattr(requirements.choose, "plain", requirements.choose)

    def chosen(job, target, *coarse):
        found = plain(job, target, *coarse)
        choices = found.choices.changed(disk_offloaded_units=count)
        return dataclasses.replace(found, choices=choices)

    chosen.plain = plain
    for planner in (requirements, planning):
        patch.setattr(planner, "choose", chosen)
    patch.setattr(disk_chunks, "DISK_CHUNK_NUMEL", PIECE)


def train(tmp_path: Path, name: str, at_step=None, **values: Any) -> Run:
    """Trains the tiny model for eight steps, with a folder for moments on the disk."""
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    every = {"output.checkpoint_every": 1, "output.keep_checkpoints": 9, "engine.disk": str(disk)}
    run = start_run(make_config(tmp_path, **every | values), tmp_path / name)
    execute(run, at_step)
    return run

"""Runs that keep all planes of some units on the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from engine.planning.fit import requirements
from engine.runs.record.events import EvalFinished, StepFinished
from engine.training.loop import planning
from engine.training.loop.run import Run
from tests.support.trained_runs import events_of, files_of

UNITS = 4
"""The model has an embedding, two blocks and a head."""


@pytest.fixture
def keep_on_gpu(monkeypatch):
    """Makes the planner let this many units live on the device, a CPU, from now on."""
    plain = requirements.choose

    def use(count: int) -> None:
        def chosen(job, target, *coarse):
            found = plain(job, target, *coarse)
            blocks = max(0, UNITS - 1 - max(1, count))
            resident = min(found.choices.placement.blocks_kept_in_slots, blocks)
            choices = found.choices.changed(gpu_resident_units=count, blocks_kept_in_slots=resident)
            return dataclasses.replace(found, choices=choices)

        for planner in (requirements, planning):
            monkeypatch.setattr(planner, "choose", chosen)

    return use


def exported(run: Run) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(run.folder.export_path.iterdir())
        if path.suffix == ".safetensors"
    }


def figures(run: Run) -> list[tuple]:
    steps = [(event.step, event.loss, event.grad_norm) for event in events_of(run, StepFinished)]
    return steps + [(each.step, each.loss) for each in events_of(run, EvalFinished)]


@dataclass(frozen=True)
class Written:
    """What a run wrote: its checkpoints, its figures and the model that it exported."""

    files: dict[int, dict[str, bytes]]
    figures: list[tuple]
    exported: dict[str, bytes]

    @classmethod
    def by(cls, run: Run) -> Written:
        model = exported(run) if run.folder.export_path.exists() else {}
        return cls(files_of(run), figures(run), model)

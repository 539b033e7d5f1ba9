"""The curves in Weights & Biases, online or offline according to its own settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import wandb

from engine.runs.trackers.known_trackers import project_of
from engine.runs.trackers.points import Point
from engine.runs.trackers.tracker import TrackedRun

STEP = "step"
"""Value over which all curves are drawn. Weights & Biases' own step cannot go back, as it must for
answers that were asked of earlier weights.
"""


class ToWandb:
    """A run of Weights & Biases, whose id is that of the run."""

    def __init__(self, run: TrackedRun):
        # Code, the output of the program and measurements of the machine are not sent.
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            silent=True,
        )
        self._run = wandb.init(
            project=project_of(os.environ, "WANDB_PROJECT"),
            id=run.id,
            name=run.name,
            config=dict(run.parameters),
            resume="allow",
            dir=str(run.folder),
            settings=quiet,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self.run = str(self._run.id)
        self.where = str(self._run.url or run.folder / "wandb")

    def held(self) -> Mapping[str, int]:
        return {}

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({STEP: point.step, **point.values})

    def close(self, state: str) -> None:
        self._run.summary.update({"state": state})
        # A run whose export failed is finished.
        self._run.finish(exit_code=0 if state.split(",")[0] in ("finished", "stopped") else 1)

"""The curves in MLflow: on its server, or in a database beside the runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from engine.runs.trackers.known_trackers import mlflow_address, project_of
from engine.runs.trackers.points import CURVES, Point
from engine.runs.trackers.tracker import TrackedRun

STATES = {"finished": "FINISHED", "stopped": "KILLED", "discarded": "KILLED"}
"""States there by those of a run; any other state is FAILED."""
METRICS_AT_ONCE = 900
PARAMETERS_AT_ONCE = 90
"""Number of parameters in one message: MLflow refuses more than 1,000 values and 100 parameters."""
LONGEST = 500
"""Number of characters of a parameter, at most: every version takes as many."""


class ToMlflow:
    """A run of MLflow, in the experiment that MLFLOW_EXPERIMENT_NAME names."""

    def __init__(self, run: TrackedRun):
        self.where = mlflow_address(os.environ, run.folder.parent)
        self._client = MlflowClient(tracking_uri=self.where)
        if run.known_as:
            self.run = run.known_as
            self._client.update_run(self.run, status="RUNNING")
        else:
            self.run = self._create(run)

    def _create(self, run: TrackedRun) -> str:
        """Creates the run with its parameters; returns its id."""
        name = project_of(os.environ, "MLFLOW_EXPERIMENT_NAME")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"ramstream.run": run.id}
        made: str = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        parameters = [Param(name, str(value)[:LONGEST]) for name, value in run.parameters.items()]
        for part in _parts(parameters, PARAMETERS_AT_ONCE):
            self._client.log_batch(made, params=part)
        return made

    def held(self) -> Mapping[str, int]:
        last = {}
        for name in CURVES:
            steps = [value.step for value in self._client.get_metric_history(self.run, name)]
            if steps:
                last[name] = max(steps)
        return last

    def log(self, points: Sequence[Point]) -> None:
        metrics: list[Any] = []
        for point in points:
            at = int(point.time * 1000)
            metrics += [Metric(name, value, at, point.step) for name, value in point.values.items()]
        for part in _parts(metrics, METRICS_AT_ONCE):
            self._client.log_batch(self.run, metrics=part)

    def close(self, state: str) -> None:
        self._client.set_tag(self.run, "ramstream.state", state)
        # A run whose export failed is finished.
        self._client.set_terminated(self.run, status=STATES.get(state.split(",")[0], "FAILED"))


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

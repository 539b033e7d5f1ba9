"""Runs of several ranks, and how near their results are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from engine.runs.record.events import PlanBuilt
from engine.training.loop.run import Run, resume_run, start_run
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, execute, files_of
from tests.support.worker_groups import workers_of

CLOSE = dict(rtol=2e-4, atol=2e-6)
"""Sums of other ranks are added in another order, and rounded to fp32 differently."""


def on(ranks: int, **values) -> dict:
    """Returns the settings of a run with so many ranks."""
    return {"engine.gpus": ranks, "train.micro_batch_size": 1} | values


def train(folder: Path, name: str, values: dict, at_step=None) -> Run:
    run = start_run(make_config(folder, **values), folder / name)
    ended = execute(run, at_step)
    assert ended.state in ("finished", "stopped"), ended.reason
    assert not workers_of(os.getpid())
    return run


def again(folder: Path, run: Run, ranks: int, at_step=None) -> Run:
    resumed = resume_run(folder, run.id, [f"engine.gpus={ranks}"])
    ended = execute(resumed, at_step)
    assert ended.state in ("finished", "stopped"), ended.reason
    assert events_of(resumed, PlanBuilt)[-1].choices["ranks"] == ranks
    return resumed


def planes(run: Run, step: int) -> dict[str, np.ndarray]:
    """Returns the float32 planes of a checkpoint, by file."""
    return {name: np.frombuffer(held, np.float32) for name, held in files_of(run)[step].items()}


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, held in ours.items():
        np.testing.assert_allclose(held, theirs[name], **CLOSE, err_msg=name)

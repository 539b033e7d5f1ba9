"""Snapshots of made-up runs for the tests of the verdict."""

from __future__ import annotations

import math

from engine.config.settings import TrainConfig
from engine.runs.record.events import (
    EvalFinished,
    MemorySampled,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot
from tests.support.synthetic_run import GIB, records

CONFIG = TrainConfig.from_dict(
    {
        "model": {"source": "m"},
        "data": {"source": "d"},
        "train": {"batch_size": 16, "steps": 100, "learning_rate": 3e-4},
    }
)


def fold(*events, total=100, device="cpu"):
    """Returns the snapshot of a run with these events."""
    snapshot = RunSnapshot()
    begun = [RunStarted(device=device, total_steps=total), StateChanged("running")]
    for record in records([*begun, *events]):
        snapshot.apply(record)
    return snapshot


def falling(step):
    """Returns a loss that falls from 4 to almost nothing, with noise."""
    return 0.01 + 4 * math.exp(-step / 12) + 0.02 * math.sin(1.7 * step)


def steps(count=100, loss=falling, first=1, **exposed):
    """Returns steps of a second each, at an even rate."""
    return [
        StepFinished(step=step, loss=loss(step), learning_rate=3e-4, seconds=1.0, exposed=exposed)
        for step in range(first, count + 1)
    ]


def evaluated(*losses, tokens=2000, every=None):
    """Returns evaluations, spread over a hundred steps."""
    every = every or 100 // len(losses)
    return [
        EvalFinished(step=every * (place + 1), loss=loss, loss_tokens=tokens)
        for place, loss in enumerate(losses)
    ]


def growing(count=60, limit=100, per_step=1.0):
    """Returns samples of host memory that grow by so many GiB a step from 10 GiB on."""
    return [
        MemorySampled(step=step, host_rss=int(GIB * (10 + per_step * step)), host_total=limit * GIB)
        for step in range(1, count + 1)
    ]


OVERFIT = evaluated(1.67, 1.9, 2.4, 2.9, 3.25)

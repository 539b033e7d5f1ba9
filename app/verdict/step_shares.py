"""The time of steps, divided into compute and the causes for which compute waited. All functions
are pure and take a snapshot's columns.
"""

from __future__ import annotations

import numpy as np

from engine.runs.record.event_tables import EXPOSED_CAUSES, StepTable
from engine.runs.record.snapshot import RECENT_STEPS, RunSnapshot

PART_LABELS = {
    "compute": "compute",
    "data": "putting rows together",
    "h2d": "weights in",
    "d2h": "gradients out",
    "optimizer": "optimizer",
    "disk": "moments on the disk",
    "exchange": "the other GPUs",
    "other": "launches and the rest",
}
"""Parts of a step, from the bottom of their drawing to the top."""


def step_parts(steps: StepTable, first: int = 0) -> dict[str, np.ndarray]:
    """Returns seconds[steps] of each of `PART_LABELS` from row `first` on, which add up to the
    duration of the step. The disk and the other GPUs are among them only where a step waited for
    them. Causes that this version does not know are counted as `other`.
    """
    causes = [*EXPOSED_CAUSES, *(cause for cause in ("disk", "exchange") if cause in steps.exposed)]
    parts = {cause: np.array(steps.exposed[cause][first:]) for cause in causes}
    for cause in steps.exposed:
        if cause not in parts:
            parts["other"] = parts["other"] + np.array(steps.exposed[cause][first:])
    # Records count the seconds spent putting rows together as part of `other`.
    data = np.minimum(np.array(steps.data_seconds[first:]), parts["other"])
    parts["data"] = data
    parts["other"] = parts["other"] - data
    seconds = np.array(steps.seconds[first:])
    parts["compute"] = np.maximum(0.0, seconds - sum(parts.values()))
    return {name: parts[name] for name in PART_LABELS if name in parts}


def recent_shares(snapshot: RunSnapshot) -> dict[str, float]:
    """Returns the share of each of `PART_LABELS` in the time of the latest steps, or nothing before
    the first step. A session's first step includes one-time work, so it counts only while it is
    the only step.
    """
    steps = snapshot.steps
    first = max(0, len(steps) - RECENT_STEPS)
    kept = np.array(steps.step[first:]) != (snapshot.resumed_step or 0) + 1
    return shares(steps, first, kept if kept.any() else ~kept)


def shares(steps: StepTable, first: int, kept: np.ndarray) -> dict[str, float]:
    """Returns the share of each of `PART_LABELS` in the time of the kept[steps] from row `first`
    on, or nothing if they took no time.
    """
    parts = step_parts(steps, first)
    seconds = float(np.array(steps.seconds[first:])[kept].sum())
    if not seconds:
        return {}
    return {name: float(values[kept].sum()) / seconds for name, values in parts.items()}

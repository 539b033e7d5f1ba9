"""The time of steps is divided here into compute and the causes for which compute waited. All
functions are pure and take a snapshot's columns.
"""

from __future__ import annotations

import numpy as np

from app.view.drawing import BLUE, GREEN, GREY, ORANGE, PINK, TEAL
from engine.runs.event_tables import EXPOSED_CAUSES, StepTable
from engine.runs.snapshot import RECENT_STEPS, RunSnapshot

PARTS = {
    "compute": ("compute", GREEN),
    "data": ("putting rows together", TEAL),
    "h2d": ("weights coming in (H2D)", BLUE),
    "d2h": ("gradients going out (D2H)", ORANGE),
    "optimizer": ("the optimizer", PINK),
    "other": ("launches and the rest", GREY),
}
"""These are the parts of a step from the bottom of the drawing to the top. Each has its words and a
colour, which is the same as in the timeline.
"""


def step_parts(steps: StepTable) -> dict[str, np.ndarray]:
    """Returns seconds[steps] of each of `PARTS`, which add up to the duration of the step. Causes
    that this version does not know are counted as `other`.
    """
    parts = {cause: np.asarray(steps.exposed[cause], dtype=float) for cause in EXPOSED_CAUSES}
    for cause in steps.exposed:
        if cause not in parts:
            parts["other"] = parts["other"] + np.asarray(steps.exposed[cause], dtype=float)
    # Records count the seconds spent putting rows together as part of `other`.
    data = np.minimum(np.asarray(steps.data_seconds, dtype=float), parts["other"])
    parts["data"] = data
    parts["other"] = parts["other"] - data
    seconds = np.asarray(steps.seconds, dtype=float)
    parts["compute"] = np.maximum(0.0, seconds - sum(parts.values()))
    return {name: parts[name] for name in PARTS}


def recent_shares(snapshot: RunSnapshot) -> dict[str, float]:
    """Returns the share of each of `PARTS` in the time of the latest steps, or nothing before the
    first step. A session's first step includes one-time work, so it counts only while it is the
    only step.
    """
    steps = snapshot.steps
    if not len(steps):
        return {}
    first_of_session = (snapshot.resumed_step or 0) + 1
    latest = range(max(0, len(steps) - RECENT_STEPS), len(steps))
    kept = [index for index in latest if steps.step[index] != first_of_session]
    if not kept:
        kept = [len(steps) - 1]
    seconds = sum(steps.seconds[index] for index in kept)
    if not seconds:
        return {}
    return {name: float(values[kept].sum()) / seconds for name, values in step_parts(steps).items()}

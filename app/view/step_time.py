"""Where the time of steps went: compute, and what compute waited for. Pure functions of a
snapshot's columns.
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
"""Parts of a step from the bottom of the drawing to its top: what they are called, and their
colours, as in the timeline.
"""


def step_parts(steps: StepTable) -> dict[str, np.ndarray]:
    """Seconds of each of `PARTS` by step, which add up to the step's. Data's share is taken out of
    other, where it was counted; causes that this version does not know are other.
    """
    parts = {cause: np.asarray(steps.exposed[cause], dtype=float) for cause in EXPOSED_CAUSES}
    for cause in steps.exposed:
        if cause not in parts:
            parts["other"] = parts["other"] + np.asarray(steps.exposed[cause], dtype=float)
    data = np.minimum(np.asarray(steps.data_seconds, dtype=float), parts["other"])
    parts |= {"data": data, "other": parts["other"] - data}
    parts["compute"] = np.maximum(0.0, np.asarray(steps.seconds, dtype=float) - sum(parts.values()))
    return {name: parts[name] for name in PARTS}


def recent_shares(snapshot: RunSnapshot) -> dict[str, float]:
    """Share of each of `PARTS` in the time of the latest steps; empty before the first. A session's
    first step, in which much is done once, counts only while it is the only one.
    """
    steps = snapshot.steps
    first = (snapshot.resumed_step or 0) + 1
    kept = [
        k for k in range(max(0, len(steps) - RECENT_STEPS), len(steps)) if steps.step[k] != first
    ] or [len(steps) - 1]
    seconds = sum(steps.seconds[k] for k in kept) if len(steps) else 0.0
    if not seconds:
        return {}
    return {name: float(values[kept].sum()) / seconds for name, values in step_parts(steps).items()}

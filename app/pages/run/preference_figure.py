"""`preference_figure` shows what a run learns from pairs of answers: their rewards, and how often
the chosen answer has the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.labels import in_digits, in_share
from app.shared.charts.axes import Axis, Line, curve, figure, places, two_rows
from app.shared.charts.curve_points import downsample, smooth, smoothing_window
from app.shared.charts.drawing import BLUE, GREEN, ORANGE, RED, VIOLET, Figure
from engine.runs.record.event_tables import EvalTable, StepTable
from engine.runs.record.snapshot import RunSnapshot

ACCURACY, MARGIN = "rewards/accuracies", "rewards/margins"
_CURVES = (
    ("rewards/chosen", "chosen", GREEN),
    ("rewards/rejected", "rejected", RED),
    (MARGIN, "margin", BLUE),
)


def preference_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the rewards of chosen and rejected answers and their margin above, and the share of
    pairs with a margin above 0 below, in percent, each as a mean over some steps and for validation
    pairs. The figure `is_absent` for a run without pairs.
    """
    steps, evals = snapshot.steps, snapshot.evals
    rows = two_rows("reward", "%")
    if not steps.preference and not evals.preference:
        return figure([], axis, rows, "No pairs are learned from.") | {"is_absent": True}
    x, held = places(snapshot, steps, axis), places(snapshot, evals, axis)
    data = []
    for name, words, color in _CURVES:
        if name in steps.preference:
            data.append(_smoothed(words, x, steps.preference[name], Line(color)))
    if MARGIN in evals.preference:
        values = np.asarray(evals.preference[MARGIN], dtype=float)
        data.append(curve("margin, validation", held, values, Line(ORANGE, markers=True)))
    if ACCURACY in steps.preference:
        shares = 100 * np.asarray(steps.preference[ACCURACY], dtype=float)
        data.append(_smoothed("chosen ahead", x, shares, Line(VIOLET, row=2)))
    if ACCURACY in evals.preference:
        values = 100 * np.asarray(evals.preference[ACCURACY], dtype=float)
        data.append(curve("ahead, validation", held, values, Line(ORANGE, row=2, markers=True)))
    rows["yaxis2"] |= {"range": [0, 105], "autorange": False}
    return figure(data, axis, rows)


def _smoothed(
    name: str, x: np.ndarray, values: Sequence[float] | np.ndarray, line: Line
) -> dict[str, Any]:
    """Returns the moving mean of values[n] over x[n] as a trace. Values that are no finite number
    are left out: a step of KTO may have no good or no bad answers.
    """
    each = np.asarray(values, dtype=float)
    known = np.isfinite(each)
    mean = smooth(each[known], smoothing_window(len(each[known])))
    return curve(name, *downsample(x[known], mean), line)


def preference_summary(snapshot: RunSnapshot) -> str:
    """Returns a sentence for the figure, about validation pairs if there are any; it is empty for a
    run without pairs.
    """
    tables: tuple[tuple[EvalTable | StepTable, str], ...] = (
        (snapshot.evals, "validation: "),
        (snapshot.steps, ""),
    )
    for table, of in tables:
        margins, shares = (table.preference.get(name) for name in (MARGIN, ACCURACY))
        known = np.flatnonzero(np.isfinite(np.asarray(margins or (), dtype=float)))
        if margins and len(known):
            at = int(known[-1])
            ahead = f", chosen ahead in {in_share(shares[at])}" if shares else ""
            return f"{of}margin {in_digits(margins[at])}{ahead} at step {table.step[at]:,}"
    return ""

"""How a run learns: loss, learning rate, gradient norm, and the gradient norm of every unit."""

from __future__ import annotations

import math

import numpy as np

from app.axes import Axis, curve, figure, one_row, places, two_rows
from app.drawing import BLUE, GREEN, ORANGE, VIOLET, Figure, escaped, rounded
from app.view import SMOOTH_STEPS, downsample, smooth
from engine.snapshot import RunSnapshot

MAP_COLUMNS, MAP_CELLS = 200, 6_000
"""Of the map of norms, at most: what a page draws in a few milliseconds."""


def loss_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Loss of each step, its mean over the latest steps, and the loss on held-out rows."""
    steps, evals = snapshot.steps, snapshot.evals
    x, loss = places(snapshot, steps, axis), np.asarray(steps.loss, dtype=float)
    window = min(SMOOTH_STEPS, max(1, len(loss) // 20))
    data = [
        curve("each step", *downsample(x, loss), BLUE, opacity=0.35, width=1),
        curve(f"mean of {window}", *downsample(x, smooth(loss, window)), BLUE, width=2),
        curve("held out", places(snapshot, evals, axis), np.asarray(evals.loss, dtype=float), ORANGE, width=2,
              markers=True),
    ]
    return figure(data, axis, {"yaxis": one_row()}) | {"log_axes": ["yaxis"]}


def optimizer_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Learning rate above, gradient norm before clipping below."""
    steps = snapshot.steps
    x = places(snapshot, steps, axis)
    data = [
        curve("learning rate", *downsample(x, np.asarray(steps.learning_rate, dtype=float)), GREEN, width=2),
        curve("gradient norm", *downsample(x, np.asarray(steps.grad_norm, dtype=float)), VIOLET, row=2, width=1.5),
    ]
    rows = two_rows("learning rate", "gradient norm")
    rows["yaxis"]["tickformat"] = ".2~e"
    return figure(data, axis, rows) | {"log_axes": ["yaxis2"]}


def norms_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Gradient norm of every unit in the sampled steps, by colour on a log scale; the first unit on top.

    At most `MAP_COLUMNS` samples and, where there is more than one, about `MAP_CELLS` cells: evenly left out. What is 0 has no
    colour.
    """
    norms = snapshot.norms
    units = [escaped(name) for name in snapshot.units[:len(norms.norms)]]
    units += [f"unit {k}" for k in range(len(units), len(norms.norms))]
    most = min(MAP_COLUMNS, max(1, MAP_CELLS // max(1, len(units))))
    kept = np.unique(np.linspace(0, len(norms) - 1, min(most, len(norms))).astype(int)) if len(norms) else np.zeros(0, int)
    rows = np.array([np.asarray(values, dtype=float)[kept] for values in norms.norms.values()]).reshape(len(units), len(kept))
    powers = np.log10(rows, where=rows > 0, out=np.full(rows.shape, math.nan))
    trace = {"type": "heatmap", "x": rounded(places(snapshot, norms, axis)[kept], 12), "y": units,
             "z": [rounded(row, 3) for row in powers], "customdata": [rounded(row, 3) for row in rows],
             "colorscale": "Viridis", "hoverongaps": False, "hovertemplate": "%{y}, %{x}: %{customdata:.3~g}<extra></extra>",
             "colorbar": {"thickness": 10, "outlinewidth": 0, "x": 1.01, "xpad": 0} | _powers_of_ten(powers)}
    drawn = figure([trace], axis, {"yaxis": one_row() | {
        "type": "category", "categoryorder": "array", "categoryarray": units, "autorange": "reversed", "nticks": 12,
        "automargin": True, "fixedrange": True, "rangemode": "normal"}}, "Appears with the first sampled step.")
    drawn["layout"] |= {"hovermode": "closest", "margin": {"l": 58, "r": 64, "t": 10, "b": 38}}
    return drawn


def _powers_of_ten(powers: np.ndarray) -> dict[str, list]:
    """Ticks of the colour bar: 1, 2 and 5 times the powers of ten that the map spans; the powers alone where they are many."""
    seen = powers[np.isfinite(powers)]
    if not len(seen):
        return {}
    low, high = math.floor(seen.min()), math.ceil(seen.max())
    mantissas = (1, 2, 5) if seen.max() - seen.min() < 1.5 else (1,)
    values = [mantissa * 10.0 ** power for power in range(low, high + 1) for mantissa in mantissas]
    return {"tickvals": [round(math.log10(value), 4) for value in values], "ticktext": [f"{value:g}" for value in values]}

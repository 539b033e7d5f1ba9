"""How a run learns: loss, learning rate, gradient norm, and the gradient norm of every unit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from app.view.axes import Axis, curve, figure, one_row, places, two_rows
from app.view.curve_points import SMOOTH_STEPS, downsample, smooth
from app.view.drawing import BLUE, GREEN, ORANGE, VIOLET, Figure, escaped, rounded
from engine.runs.snapshot import RunSnapshot

MAP_COLUMNS, MAP_CELLS = 200, 6_000
"""Of the map of norms, at most: what a page draws in a few milliseconds."""
NAME_LETTER, WIDEST_NAMES = 7, 160
"""px of a letter of the units' names, and of all of them at most."""
NEAREST_TICK = 0.08
"""Of the scale of colours, that lies between two values at least."""


def loss_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Loss of each step, its mean over the latest steps, and the loss on held-out rows."""
    steps, evals = snapshot.steps, snapshot.evals
    x, loss = places(snapshot, steps, axis), np.asarray(steps.loss, dtype=float)
    window = min(SMOOTH_STEPS, max(1, len(loss) // 20))
    data = [
        curve("each step", *downsample(x, loss), BLUE, opacity=0.35, width=1),
        curve(f"mean of {window}", *downsample(x, smooth(loss, window)), BLUE, width=2),
        curve(
            "held out",
            places(snapshot, evals, axis),
            np.asarray(evals.loss, dtype=float),
            ORANGE,
            width=2,
            markers=True,
        ),
    ]
    return figure(data, axis, {"yaxis": one_row()}) | {"log_axes": ["yaxis"]}


def optimizer_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Learning rate above, gradient norm before clipping below."""
    steps = snapshot.steps
    x = places(snapshot, steps, axis)
    data = [
        curve(
            "learning rate",
            *downsample(x, np.asarray(steps.learning_rate, dtype=float)),
            GREEN,
            width=2,
        ),
        curve(
            "gradient norm",
            *downsample(x, np.asarray(steps.grad_norm, dtype=float)),
            VIOLET,
            row=2,
            width=1.5,
        ),
    ]
    rows = two_rows("learning rate", "gradient norm")
    rows["yaxis"]["tickformat"] = ".2~e"
    return figure(data, axis, rows) | {"log_axes": ["yaxis2"]}


def norms_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Gradient norm of every unit in the sampled steps, by colour on a log scale; the first unit on
    top.

    At most `MAP_COLUMNS` samples and, where there is more than one, about `MAP_CELLS` cells: evenly
    left out. What is 0 has no colour.
    """
    norms = snapshot.norms
    units = [escaped(name) for name in snapshot.units[: len(norms.norms)]]
    units += [f"unit {k}" for k in range(len(units), len(norms.norms))]
    most = min(MAP_COLUMNS, max(1, MAP_CELLS // max(1, len(units))))
    kept = (
        np.unique(np.linspace(0, len(norms) - 1, min(most, len(norms))).astype(int))
        if len(norms)
        else np.zeros(0, int)
    )
    rows = np.array(
        [np.asarray(values, dtype=float)[kept] for values in norms.norms.values()]
    ).reshape(len(units), len(kept))
    powers = np.log10(rows, where=rows > 0, out=np.full(rows.shape, math.nan))
    trace = {
        "type": "heatmap",
        "x": rounded(places(snapshot, norms, axis)[kept], 12),
        "y": units,
        "z": [rounded(row, 3) for row in powers],
        "customdata": [rounded(row, 3) for row in rows],
        "colorscale": "Viridis",
        "showscale": False,
        "hoverongaps": False,
        "hovertemplate": "%{y}, %{x}: %{customdata:.3~g}<extra></extra>",
    }
    seen = powers[np.isfinite(powers)]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 0.0)
    if len(seen):
        trace |= {"zmin": round(low, 4), "zmax": round(high, 4)}
    drawn = figure(
        [trace],
        axis,
        {
            "yaxis": one_row()
            | {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": units,
                "autorange": "reversed",
                "nticks": 12,
                "fixedrange": True,
                "rangemode": "normal",
            }
        },
        "Appears with the first sampled step.",
    )
    # Measuring each name, as Plotly would, takes about a fifth of the drawing.
    left = min(WIDEST_NAMES, max(58, 16 + NAME_LETTER * max(map(len, units), default=0)))
    drawn["layout"] |= {"hovermode": "closest", "margin": {"l": left, "r": 64, "t": 10, "b": 38}}
    return drawn | {"scale": _scale(low, high) if len(seen) else []}


def _scale(low: float, high: float) -> list[dict[str, Any]]:
    """Values beside the colours, `at` which share of the way from the least to the most: both ends
    (powers of ten) and, where they are not too near, 1, 2 and 5 times the powers of ten between;
    the powers alone where they are many.
    """

    def said(value: float) -> str:
        """7.2e-7, not 7.2e-07: there is little space."""
        digits, _, power = f"{float(f'{value:.2g}'):g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits

    ends = [{"at": 0.0, "text": said(10**low)}]
    if high - low < 1e-3:
        return ends
    mantissas = (1, 2, 5) if high - low < 1.5 else (1,)
    between = [
        mantissa * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for mantissa in mantissas
    ]
    placed = [((math.log10(value) - low) / (high - low), said(value)) for value in between]
    ends += [
        {"at": round(at, 4), "text": text}
        for at, text in placed
        if NEAREST_TICK < at < 1 - NEAREST_TICK
    ]
    return [*ends, {"at": 1.0, "text": said(10**high)}]

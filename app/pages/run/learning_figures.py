"""Figures of how a run learns: loss, learning rate, gradient norm, and the gradient norm of every
unit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from app.labels import in_digits
from app.pages.run.best import best_of
from app.shared.charts.axes import (
    Axis,
    Line,
    curve,
    figure,
    one_row,
    places,
    places_of_steps,
    two_rows,
)
from app.shared.charts.curve_points import downsample, smooth, smoothing_window
from app.shared.charts.drawing import BLUE, GREEN, ORANGE, VIOLET, Figure, escaped, rounded
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import Best

MAP_COLUMNS = 200
MAP_CELLS = 6_000
"""Largest number of columns, and of cells, in the map of norms. A page draws that many in a few
milliseconds.
"""
NAME_LETTER = 7
"""Approximate width of a character of a unit's name, in pixels."""
NARROWEST_NAMES = 58
WIDEST_NAMES = 160
"""Least and largest width of the column of unit names, in pixels."""
NEAREST_TICK = 0.08
"""Share of the color scale by which values between its ends are farther than this from both."""


def loss_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the loss of each step, its smoothed mean, and the loss on validation rows, with its
    best.
    """
    steps = snapshot.steps
    evals = snapshot.evals
    x = places(snapshot, steps, axis)
    loss = np.asarray(steps.loss, dtype=float)
    window = smoothing_window(len(loss))
    each, mean = downsample(x, loss), downsample(x, smooth(loss, window))
    validation = np.asarray(evals.loss, dtype=float)
    data = [
        curve("each step", *each, Line(BLUE, opacity=0.55, width=1)),
        curve("smoothed", *mean, Line(BLUE)),
        curve("validation", places(snapshot, evals, axis), validation, Line(ORANGE, markers=True)),
    ]
    best = best_of(snapshot)
    at = np.flatnonzero(np.asarray(evals.step) == best.step) if best is not None else ()
    if best is not None and len(at):
        place = places(snapshot, evals, axis)[at[-1:]]
        data.append(_mark(_best_name(best), place, best.loss))
    return figure(data, axis, {"yaxis": one_row()}) | {"log_axes": ["yaxis"]}


def _best_name(best: Best) -> str:
    by = "" if best.by == "loss" else " by answers right"
    return f"best{by}: step {best.step:,}"


def _mark(name: str, x: np.ndarray, height: float) -> dict[str, Any]:
    """Returns a star at x[1], at this height."""
    star = curve(name, x, np.array([height]), Line(GREEN, markers=True))
    star["marker"] = {"size": 13, "color": GREEN, "symbol": "star"}
    return star | {"mode": "markers"}


def accuracy_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the share of validation prompts that were answered exactly as expected, in percent,
    with the best where the run chooses by it. The figure `is_absent` if none were asked.
    """
    matches = sorted(
        (match for match in snapshot.exact_matches if match.total), key=lambda match: match.step
    )
    y = one_row("%", from_zero=True) | {"range": [-4, 105], "autorange": False}
    if not matches:
        return figure([], axis, {"yaxis": y}, "No prompts were asked.") | {"is_absent": True}
    x = places_of_steps(snapshot, [match.step for match in matches], axis)
    shares = np.array([100 * match.correct / match.total for match in matches])
    data = [curve("answers right", x, shares, Line(GREEN, markers=True))]
    best = best_of(snapshot)
    if best is not None and best.share is not None:
        place = places_of_steps(snapshot, [best.step], axis)
        data.append(_mark(_best_name(best), place, 100 * best.share))
    return figure(data, axis, {"yaxis": y})


def optimizer_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the learning rate above and the gradient norm before clipping below."""
    steps = snapshot.steps
    x = places(snapshot, steps, axis)
    rate = downsample(x, np.asarray(steps.learning_rate, dtype=float))
    norm = downsample(x, np.asarray(steps.grad_norm, dtype=float))
    data = [
        curve("learning rate", *rate, Line(GREEN)),
        curve("gradient norm", *norm, Line(VIOLET, row=2, width=1.5)),
    ]
    rows = two_rows("learning rate", "gradient norm")
    return figure(data, axis, rows) | {"log_axes": ["yaxis2"]}


def norms_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns a map of the gradient norm of every unit in the sampled steps, as colors on a log
    scale; the first unit is on top. A norm of 0 has no color.

    At most `MAP_COLUMNS` samples are drawn and, if there is more than one, about `MAP_CELLS` cells.
    The samples are selected at even intervals.
    """
    norms = snapshot.norms
    units = [escaped(name) for name in snapshot.units[: len(norms.norms)]]
    units += [f"unit {number}" for number in range(len(units), len(norms.norms))]
    kept = _columns(samples=len(norms), units=len(units))
    rows = np.zeros((len(units), len(kept)))
    for index, values in enumerate(norms.norms.values()):
        rows[index] = np.asarray(values, dtype=float)[kept]
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
    scale = []
    if len(seen):
        low, high = float(seen.min()), float(seen.max())
        trace["zmin"] = round(low, 4)
        trace["zmax"] = round(high, 4)
        scale = _scale(low, high)
    names = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": units,
        "autorange": "reversed",
        "nticks": 12,
        "fixedrange": True,
        "rangemode": "normal",
    }
    empty = "Appears with the first sampled step."
    drawn = figure([trace], axis, {"yaxis": one_row() | names}, empty)
    # If Plotly measured each name, that would take about a fifth of the drawing time.
    width = 16 + NAME_LETTER * max(map(len, units), default=0)
    left = min(WIDEST_NAMES, max(NARROWEST_NAMES, width))
    drawn["layout"] |= {"hovermode": "closest", "margin": {"l": left, "r": 64, "t": 10, "b": 38}}
    return drawn | {"scale": scale}


def _columns(samples: int, units: int) -> np.ndarray:
    """Returns the indices[columns] of the samples that the map shows, at even intervals."""
    if not samples:
        return np.zeros(0, int)
    most = min(MAP_COLUMNS, max(1, MAP_CELLS // max(1, units)))
    return np.unique(np.linspace(0, samples - 1, min(most, samples)).astype(int))


def _scale(low: float, high: float) -> list[dict[str, Any]]:
    """Returns the values next to the color scale. `at` is the position of each, as a share of the
    scale from its lowest to its highest value. `low` and `high` are the powers of ten of both ends.

    Between the ends, the values are 1, 2 and 5 times the powers of ten, or only the powers if there
    are many. Values too close to an end are left out.
    """
    lowest = {"at": 0.0, "text": _short(10**low)}
    if high - low < 1e-3:
        return [lowest]
    mantissas = (1, 2, 5) if high - low < 1.5 else (1,)
    ticks = [lowest]
    for power in range(math.floor(low), math.ceil(high) + 1):
        for mantissa in mantissas:
            at = (power + math.log10(mantissa) - low) / (high - low)
            if NEAREST_TICK < at < 1 - NEAREST_TICK:  # otherwise the value may be no float
                ticks.append({"at": round(at, 4), "text": _short(mantissa * 10.0**power)})
    return [*ticks, {"at": 1.0, "text": _short(10**high)}]


def _short(value: float) -> str:
    """Returns a number with two digits, since space is short."""
    return in_digits(float(f"{value:.2g}"))

"""Runs side by side, as plain data: curves on shared axes, their key figures, and the settings in
which they differ.

All functions are pure and take `Compared` values. Names are plain text; they are escaped before
they go to Plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from app.labels import GIB, STATE_TONES
from app.pages.runs.key_figures import NOTHING_YET, is_same_data, key_figures, summaries
from app.pages.runs.setting_differences import differing_settings
from app.shared.charts.axes import FEW_POINTS, FEWEST_IN_LINE, THOUSANDS, places_of_steps, x_ticks
from app.shared.charts.curve_points import downsample, smooth, smoothing_window
from app.shared.charts.drawing import (
    AMBER,
    BLUE,
    GREEN,
    PINK,
    TEAL,
    VIOLET,
    Figure,
    escaped,
    rounded,
    write_empty,
)
from app.shared.run_bar import shown_tone, shown_word
from app.shared.run_names import distinct_names
from engine.runs.record.event_tables import EventTable
from engine.runs.record.snapshot import RunSnapshot

COLORS = (BLUE, AMBER, GREEN, VIOLET, PINK, TEAL)
CURVE_POINTS = 500
OTHER_DATA = "Their data may differ, so neither the best loss nor the best answers are marked."
NAME_SHOWN = 48
"""Number of characters of a run's name in the label of a curve; the table next to it shows the
whole name.
"""

Axis = Literal["step", "time"]


@dataclass(frozen=True)
class Compared:
    """One of the runs that are compared."""

    id: str
    name: str
    state: str
    snapshot: RunSnapshot
    settings: dict[str, Any]
    """Settings by dotted name; empty if the configuration cannot be read."""


def comparison(runs: Sequence[Compared], axis: Axis, baseline: str = "") -> dict[str, Any]:
    """Returns the `runs` (id, name, color, state), `figures` by name, a sentence on each figure
    (`caption`), `rows` of key figures, the `settings` that differ, as text, and a `caution` for
    runs that cannot be ranked. `baseline` is the id of the run that others are compared with.
    """
    ids = [run.id for run in runs]
    base = ids.index(baseline) if baseline in ids else None
    names = distinct_names([(run.name, run.snapshot.started_time or 0.0) for run in runs])
    settings = [run.settings for run in runs]
    same_data = is_same_data(settings)
    rows = key_figures([run.snapshot for run in runs], same_data, base)
    shown = [
        {
            "id": run.id,
            "is_baseline": run.id == baseline,
            "name": name,
            "color": color,
            "word": shown_word(run.snapshot, run.state),
            "tone": shown_tone(run.snapshot, run.state),
        }
        for run, name, color in zip(runs, names, COLORS)
    ]
    return {
        "runs": shown,
        "figures": {name: build(runs, names, axis) for name, build in FIGURES.items()},
        "caption": summaries(names, rows),
        "rows": rows,
        "settings": differing_settings(settings),
        "caution": "" if same_data else OTHER_DATA,
        "unread": [name for run, name in zip(runs, names) if not run.settings],
        "going_on": any(STATE_TONES[run.state] == "busy" for run in runs),
    }


# ------------------------------------------------------------------ curves


def loss_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns each run's smoothed loss as a curve, and its validation loss as points."""
    data = []
    for run, name, color in zip(runs, names, COLORS):
        steps, evals = run.snapshot.steps, run.snapshot.evals
        x, loss = _x(run, steps, axis), _smoothed(steps.loss)
        data.append(_curve(name, x, loss, color))
        if len(evals):
            validation = np.asarray(evals.loss, dtype=float)
            points = _trace(f"{name}, validation", _x(run, evals, axis), validation, color, "dot")
            data.append(points | _dots(color, len(evals)))
    return _figure(data, axis, {"yaxis": _y("loss")}) | {"log_axes": ["yaxis"]}


def accuracy_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns the share of validation prompts that each run answered exactly, in percent."""
    data = []
    for run, name, color in zip(runs, names, COLORS):
        asked = sorted(
            (match for match in run.snapshot.exact_matches if match.total),
            key=lambda match: match.step,
        )
        if asked:
            shares = np.array([100 * match.correct / match.total for match in asked])
            x = places_of_steps(run.snapshot, [match.step for match in asked], axis)
            data.append(_trace(name, x, shares, color, "solid") | _dots(color, len(asked)))
    drawn = _figure(data, axis, {"yaxis": _y("%") | {"range": [0, 105], "autorange": False}})
    return drawn | {"is_absent": not data}


def rate_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns a curve of each run's learning rate."""
    data = []
    for run, name, color in zip(runs, names, COLORS):
        steps = run.snapshot.steps
        rates = np.asarray(steps.learning_rate, dtype=float)
        data.append(_curve(name, _x(run, steps, axis), rates, color))
    return _figure(data, axis, {"yaxis": _y("learning rate")})


def throughput_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns a smoothed curve of each run's tokens per second."""
    data = []
    for run, name, color in zip(runs, names, COLORS):
        steps = run.snapshot.steps
        x, rates = _x(run, steps, axis), _smoothed(steps.tokens_per_second)
        data.append(_curve(name, x, rates, color) | {"hovertemplate": THOUSANDS})
    y = _y("tokens/s") | {"rangemode": "tozero", "tickformat": "~s"}
    return _figure(data, axis, {"yaxis": y})


def memory_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns the RAM of each run in GiB and, in a lower row, the GPU memory of runs that
    used a GPU.
    """
    data = []
    has_gpu = False
    for run, name, color in zip(runs, names, COLORS):
        memory = run.snapshot.memory
        x = _x(run, memory, axis)
        host = np.asarray(memory.host_rss, dtype=float) / GIB
        data.append(_curve(name, x, host, color))
        if any(memory.gpu_total):
            has_gpu = True
            gpu = np.asarray(memory.gpu_allocated, dtype=float) / GIB
            data.append(_curve(name, x, gpu, color) | {"yaxis": "y2"})
    axes = {"yaxis": _y("RAM GiB") | {"rangemode": "tozero"}}
    if has_gpu:
        axes["yaxis"]["domain"] = [0.56, 1.0]
        axes["yaxis2"] = _y("GPU GiB") | {"rangemode": "tozero", "domain": [0.0, 0.44]}
    return _figure(data, axis, axes)


FIGURES = {
    "loss": loss_figure,
    "accuracy": accuracy_figure,
    "rate": rate_figure,
    "throughput": throughput_figure,
    "memory": memory_figure,
}


def _smoothed(column: Sequence[float]) -> np.ndarray:
    """Returns the smoothed values[steps] of a column."""
    values = np.asarray(column, dtype=float)
    return smooth(values, smoothing_window(len(values)))


def _x(run: Compared, table: EventTable, axis: Axis) -> np.ndarray:
    """Returns x[rows]: the steps of a table, or milliseconds since the run was started."""
    if axis == "step":
        return np.asarray(table.step, dtype=float)
    return 1000 * (np.asarray(table.time, dtype=float) - (run.snapshot.started_time or 0.0))


def _curve(name: str, x: np.ndarray, y: np.ndarray, color: str) -> dict[str, Any]:
    """Returns a curve x[n], y[n], thinned to few enough points to draw."""
    return _trace(name, *downsample(x, y, CURVE_POINTS), color, "solid")


def _trace(name: str, x: np.ndarray, y: np.ndarray, color: str, dash: str) -> dict[str, Any]:
    is_long = len(name) > NAME_SHOWN
    shown = f"{name[: NAME_SHOWN - 1]}…" if is_long else name
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escaped(shown),
        "x": rounded(x, 12),
        "y": rounded(y, 5),
        "line": {"color": color, "width": 2, "dash": dash},
        "hovertemplate": "%{text}",  # the page writes it
    } | (_dots(color, len(x)) if len(x) < FEW_POINTS else {})


def _dots(color: str, count: int) -> dict[str, Any]:
    """Returns the dot at each point of a curve. So few points make no line."""
    mode = "markers" if count < FEWEST_IN_LINE else "lines+markers"
    return {"mode": mode, "marker": {"size": 6, "color": color}}


def _figure(data: list[dict[str, Any]], axis: Axis, axes: dict[str, Any]) -> Figure:
    """Returns a figure of traces on the shared axis; `axes` are the y axes."""
    title = "step" if axis == "step" else "time since the start"
    x = {"title": {"text": title}, "zeroline": False} | x_ticks(axis, data)
    if "yaxis2" in axes:
        x["anchor"] = "y2"
    layout = {
        "xaxis": x,
        "uirevision": "kept",
        "hovermode": "x unified",
        "showlegend": False,
        "margin": {"l": 58, "r": 10, "t": 12, "b": 38},
    } | axes
    if not any(trace["x"] for trace in data):
        write_empty(layout, NOTHING_YET)
    return {"data": data, "layout": layout}


def _y(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 6},
        "zeroline": False,
        "nticks": 5,
        "exponentformat": "power",
    }

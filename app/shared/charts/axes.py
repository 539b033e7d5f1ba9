"""The axis that a run's curves share, and the curves themselves. A figure is a plain `{"data": ...,
"layout": ...}`.

x is the step, or milliseconds since the run was started, or the tokens trained on so far.
`uirevision` is constant, so that a redraw keeps the zoom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from app.shared.charts.drawing import Figure, rounded, write_empty
from engine.runs.record.event_tables import EventTable
from engine.runs.record.snapshot import RunSnapshot

Axis = Literal["step", "time", "tokens"]
AXES: tuple[Axis, ...] = get_args(Axis)
TITLES = {"step": "step", "time": "time since the start", "tokens": "tokens so far"}
THOUSANDS = "%{y:,.4~r}"
"""Hover label of curves of large numbers, as in 16,430."""
MINUTE = 60_000
DAY = 86_400_000
"""A day in milliseconds, the unit of the time axis."""
FEWEST_IN_LINE = 3
"""Number of points from which a line is drawn through them."""
FEW_POINTS = 12
"""Number of points below which each of them has a dot."""
FEW_STEPS = 8
"""Number of steps up to which each has a tick: there is no half a step."""
LIMIT_SHARE = 0.05
"""Share of a limit that the curve must reach for the limit to be drawn: a line far above would
compress the curve into a flat line.
"""


def places(snapshot: RunSnapshot, table: EventTable, axis: Axis) -> np.ndarray:
    """Returns the positions x[rows] of the rows of `table` on the axis."""
    steps = np.asarray(table.step, dtype=float)
    if axis == "step":
        return steps
    if axis == "time":
        return 1000 * (np.asarray(table.time, dtype=float) - (snapshot.started_time or 0.0))
    # Tables of other events have rows for only some steps; tokens are counted at every step.
    return _tokens_at(snapshot, steps)


def places_of_steps(snapshot: RunSnapshot, steps: Sequence[int], axis: Axis) -> np.ndarray:
    """Returns the positions x[steps] of `steps` on the axis. On the axis of time, they are those of
    the ends of the steps.
    """
    wanted = np.asarray(steps, dtype=float)
    if axis == "step":
        return wanted
    if axis == "tokens":
        return _tokens_at(snapshot, wanted)
    known = np.asarray(snapshot.steps.step, dtype=float)
    times = places(snapshot, snapshot.steps, "time")
    return np.interp(wanted, known, times) if len(known) else np.zeros(len(wanted))


def _tokens_at(snapshot: RunSnapshot, steps: np.ndarray) -> np.ndarray:
    """Returns how many tokens were trained on up to each of steps[n]."""
    known = np.asarray(snapshot.steps.step, dtype=float)
    tokens = np.asarray(snapshot.steps.tokens_so_far, dtype=float)
    return np.interp(steps, np.concatenate([[0.0], known]), np.concatenate([[0.0], tokens]))


@dataclass(frozen=True)
class Line:
    """How a curve is drawn, and in which row."""

    color: str
    width: float = 2
    """Width of the line in pixels."""
    row: int = 1
    """The upper row is 1, the lower is 2."""
    opacity: float = 1.0
    dash: str = "solid"
    markers: bool = False
    """Whether a dot is drawn at each point, however many there are."""


def curve(name: str, x: np.ndarray, y: np.ndarray, line: Line) -> dict[str, Any]:
    """Returns the curve x[n], y[n] as a trace. A few points have dots, and one or two have no line,
    since it would say more than they do.
    """
    has_dots = line.markers or (len(x) < FEW_POINTS and line.dash == "solid")
    with_dots = "markers" if len(x) < FEWEST_IN_LINE else "lines+markers"
    trace = {
        "type": "scatter",
        "mode": with_dots if has_dots else "lines",
        "name": name,
        "x": rounded(x, 12),
        "y": rounded(y, 5),
        "line": {"color": line.color, "width": line.width, "dash": line.dash},
        "opacity": line.opacity,
        "hovertemplate": "%{text}",  # the page writes it
    }
    if has_dots:
        trace["marker"] = {"size": 6, "color": line.color}
    if line.row == 2:
        trace["yaxis"] = "y2"
    return trace


def level(name: str, x: np.ndarray, height: float, color: str, row: int = 1) -> dict[str, Any]:
    """Returns a dotted line at the given height, across the x range of the curves over x[n]."""
    ends = x[[0, -1]] if len(x) else x
    dotted = Line(color, width=1.2, row=row, dash="dot")
    return curve(name, ends, np.full(len(ends), height), dotted)


def figure(
    data: list[dict[str, Any]],
    axis: Axis,
    axes: dict[str, Any],
    empty: str = "Appears with the first step.",
) -> Figure:
    """Returns a figure of traces on the shared axis; `axes` are the y axes. If no trace has a
    point, the figure shows the sentence `empty` instead of axes.
    """
    x: dict[str, Any] = {
        "title": {"text": TITLES[axis]},
        "zeroline": False,
        "showspikes": True,
        "spikemode": "across",
        "spikethickness": 1,
        "spikedash": "solid",
        "spikesnap": "data",
    }
    x |= x_ticks(axis, data)
    layout = {
        "xaxis": x,
        "uirevision": "kept",
        "hovermode": "x unified",
        "showlegend": len(data) > 2,
        "legend": {
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
        },
        "margin": {"l": 58, "r": 10, "t": 22, "b": 38},
    } | axes
    if "yaxis2" in layout:
        x["anchor"] = "y2"
    if not any(trace["x"] for trace in data):
        write_empty(layout, empty)
    return {"data": data, "layout": layout}


def x_ticks(axis: Axis, data: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the ticks of the x axis for these traces: times of day, or numbers."""
    if axis == "time":
        return {
            "type": "date",
            "hoverformat": "%H:%M:%S",
            "tickformat": "%H:%M:%S",
            "tickformatstops": [
                {"dtickrange": [MINUTE, DAY], "value": "%H:%M"},
                {"dtickrange": [DAY, None], "value": "day %-j"},
            ],
        }
    furthest = max((trace["x"][-1] for trace in data if trace["x"]), default=0.0)
    whole = {"dtick": 1} if axis == "step" and furthest <= FEW_STEPS else {}
    return whole | {
        "rangemode": "tozero",
        "tickformat": ",~r" if furthest < 1e5 else "~s",
        "hoverformat": ",d",
    }


def two_rows(upper: str, lower: str, from_zero: bool = False) -> dict[str, Any]:
    """Returns the y axes of a figure with two rows, which share their x axis."""
    return {
        "yaxis": one_row(upper, from_zero) | {"domain": [0.56, 1.0]},
        "yaxis2": one_row(lower, from_zero) | {"domain": [0.0, 0.44]},
    }


def one_row(title: str = "", from_zero: bool = False) -> dict[str, Any]:
    """Returns the y axis of a figure with a single row."""
    return {
        "title": {"text": title, "standoff": 6},
        "zeroline": False,
        "nticks": 5,
        "exponentformat": "power",
        "showspikes": False,
        "rangemode": "tozero" if from_zero else "normal",
    }

"""The axis that the curves of a run share, and what they are drawn with: a figure is plain
`{"data": ..., "layout": ...}`.

`uirevision` is constant, so that a redraw keeps the zoom. x is the step, milliseconds since the run
was started, or the tokens that were trained on so far.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from app.view.drawing import Figure, rounded, say_empty
from engine.runs.event_tables import EventTable
from engine.runs.snapshot import RunSnapshot

Axis = Literal["step", "time", "tokens"]
AXES: tuple[Axis, ...] = get_args(Axis)
TITLES = {"step": "step", "time": "time since the start", "tokens": "tokens so far"}
DAY = 86_400_000
LIMIT_SHARE = 0.05
"""Of a limit, that a curve must reach for the limit to be drawn: a line far above would press the
curve flat.
"""


def places(snapshot: RunSnapshot, table: EventTable, axis: Axis) -> np.ndarray:
    """Where the rows of `table` lie on the axis."""
    steps = np.asarray(table.step, dtype=float)
    if axis == "step":
        return steps
    if axis == "time":
        return 1000 * (np.asarray(table.time, dtype=float) - (snapshot.started_time or 0.0))
    known, tokens = (
        np.asarray(snapshot.steps.step, dtype=float),
        np.asarray(snapshot.steps.tokens_so_far, dtype=float),
    )
    return np.interp(steps, np.concatenate([[0.0], known]), np.concatenate([[0.0], tokens]))


def curve(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    colour: str,
    row: int = 1,
    width: float = 2,
    opacity: float = 1.0,
    dash: str = "solid",
    markers: bool = False,
) -> dict[str, Any]:
    """A line in the upper (1) or lower (2) row."""
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": name,
        "x": rounded(x, 12),
        "y": rounded(y, 5),
        "line": {"color": colour, "width": width, "dash": dash},
        "opacity": opacity,
        "hovertemplate": "%{y:.5~g}",
    }
    if markers:
        trace["marker"] = {"size": 6, "color": colour}
    if row == 2:
        trace["yaxis"] = "y2"
    return trace


def level(name: str, x: np.ndarray, height: float, colour: str, row: int = 1) -> dict[str, Any]:
    """A dotted line at one height, as long as the curves."""
    ends = x[[0, -1]] if len(x) else x
    return curve(name, ends, np.full(len(ends), height), colour, row=row, width=1.2, dash="dot")


def figure(
    data: list[dict[str, Any]],
    axis: Axis,
    axes: dict[str, Any],
    empty: str = "Appears with the first step.",
) -> Figure:
    """Traces on the shared axis; `axes` are the y axes. `empty` stands in place of axes without a
    point.
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
    if axis == "time":
        x |= {
            "type": "date",
            "hoverformat": "%H:%M:%S",
            "tickformat": "%H:%M:%S",
            "tickformatstops": [
                {"dtickrange": [60_000, DAY], "value": "%H:%M"},
                {"dtickrange": [DAY, None], "value": "day %-j"},
            ],
        }
    else:
        x |= {
            "rangemode": "tozero",
            "tickformat": ",~r" if _last(data) < 1e5 else "~s",
            "hoverformat": ",d",
        }
    layout = {
        "xaxis": x,
        "uirevision": "kept",
        "hovermode": "x unified",
        "showlegend": len(data) > 2,
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
        "margin": {"l": 58, "r": 10, "t": 22, "b": 38},
    } | axes
    if "yaxis2" in layout:
        x["anchor"] = "y2"
    if not any(trace["x"] for trace in data):
        say_empty(layout, empty)
    return {"data": data, "layout": layout}


def two_rows(upper: str, lower: str, from_zero: bool = False) -> dict[str, Any]:
    """Two y axes, one above the other, on the same x axis."""
    return {
        "yaxis": one_row(upper, from_zero) | {"domain": [0.56, 1.0]},
        "yaxis2": one_row(lower, from_zero) | {"domain": [0.0, 0.44]},
    }


def one_row(title: str = "", from_zero: bool = False) -> dict[str, Any]:
    """A y axis."""
    return {
        "title": {"text": title, "standoff": 6},
        "zeroline": False,
        "nticks": 5,
        "exponentformat": "e",
        "showspikes": False,
        "rangemode": "tozero" if from_zero else "normal",
    }


def _last(data: list[dict[str, Any]]) -> float:
    return max((trace["x"][-1] for trace in data if trace["x"]), default=0.0)

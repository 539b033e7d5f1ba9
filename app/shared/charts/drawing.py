"""Colors that all figures share, and the form in which Plotly takes numbers, names and lines. A
figure is a plain `{"data": ..., "layout": ...}`.

The page fills in colors that follow the theme (text, grid, background); the colors below are the
same in light and dark.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np

Figure = dict[str, Any]

BLUE = "#3b7de0"
GREEN = "#2f9e6e"
AMBER = "#d19a1f"
VIOLET = "#8f63d8"
ORANGE = "#d96f32"
RED = "#d64550"
GRAY = "#8a93a3"
TEAL = "#1496ab"
PINK = "#c05a94"
OLIVE = "#7f8a1a"


def rounded(values: np.ndarray, digits: int) -> list[float | int | None]:
    """Returns values[n] as short JSON numbers with at most `digits` significant digits, as many as
    a screen can show. They are integers if all of them are whole; a value that is not finite
    becomes None.

    The work is done on whole arrays: every figure of an active run is processed here once a second,
    and competes with the Python code of the engine.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    exact = np.where(finite, values, 0.0)
    magnitude = np.floor(np.log10(np.abs(exact), out=np.zeros_like(exact), where=exact != 0))
    decimals = digits - 1 - magnitude
    # The scale is a whole power of ten, which is exact: the quotient is then the float nearest to
    # the decimal number, and prints as that number.
    up = 10.0 ** np.clip(decimals, 0, 300)
    down = 10.0 ** np.clip(-decimals, 0, 300)
    short = np.rint(exact * up / down) / up * down
    # Above 2 ** 53, floats cannot represent every integer.
    are_whole = np.all(short == np.rint(short)) and np.all(np.abs(short) < 2.0**53)
    listed: list[float | int | None] = (short.astype(np.int64) if are_whole else short).tolist()
    if not finite.all():
        for index in np.flatnonzero(~finite):
            listed[index] = None
    return listed


def escaped(text: str) -> str:
    """Returns a name with HTML escaped, since Plotly interprets some HTML tags in labels."""
    return html.escape(text, quote=False)


def vertical_line(x: float | None, line: dict[str, Any]) -> dict[str, Any]:
    """Returns a shape: a vertical line over the full height of the figure."""
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "line": line,
    }


def is_empty(drawn: Figure) -> bool:
    """Returns whether no trace of a figure has a point."""
    return not any(len(trace["x"]) for trace in drawn["data"])


def write_empty(layout: dict[str, Any], text: str) -> None:
    """Shows a sentence instead of axes that would have no data."""
    for name in layout:
        if name.startswith(("xaxis", "yaxis")):
            layout[name]["visible"] = False
    layout["showlegend"] = False
    layout["annotations"] = [
        {"text": text, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    ]

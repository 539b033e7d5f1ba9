"""What all figures share: colours, numbers and names as Plotly takes them. A figure is plain
`{"data": ..., "layout": ...}`.

Colours that follow the theme (text, grid, background) are filled in by the page; these are the same
in light and dark.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Figure = dict[str, Any]

BLUE, GREEN, AMBER, VIOLET, ORANGE, RED, GREY, TEAL, PINK = (
    "#3b7de0",
    "#2f9e6e",
    "#d19a1f",
    "#8f63d8",
    "#d96f32",
    "#d64550",
    "#8a93a3",
    "#1496ab",
    "#c05a94",
)


def rounded(values: np.ndarray, digits: int) -> list[float | int | None]:
    """Short JSON: significant digits that a screen can show, whole numbers without a point, None
    for what is not finite.

    In whole arrays: every figure of a run that goes on passes here once a second, beside the
    engine's own Python.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    exact = np.where(finite, values, 0.0)
    magnitude = np.floor(np.log10(np.abs(exact), out=np.zeros_like(exact), where=exact != 0))
    decimals = digits - 1 - magnitude
    # By a whole power of ten, which is exact: the quotient is then the number nearest to the
    # decimal one, and prints as it.
    up, down = 10.0 ** np.clip(decimals, 0, 300), 10.0 ** np.clip(-decimals, 0, 300)
    short = np.rint(exact * up / down) / up * down
    listed = short.tolist()
    if np.all(short == np.rint(short)) and np.all(np.abs(short) < 2.0**53):
        listed = short.astype(np.int64).tolist()
    if not finite.all():
        listed = [value if known else None for value, known in zip(listed, finite.tolist())]
    return listed


def escaped(text: str) -> str:
    """Plotly reads a few HTML tags in labels; names are text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def say_empty(layout: dict[str, Any], text: str) -> None:
    """A sentence in place of axes that would count nothing."""
    for name in layout:
        if name.startswith(("xaxis", "yaxis")):
            layout[name]["visible"] = False
    layout["showlegend"] = False
    layout["annotations"] = [
        {"text": text, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    ]

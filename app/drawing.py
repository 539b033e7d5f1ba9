"""What all figures share: colours, numbers and names as Plotly takes them. A figure is plain `{"data": ..., "layout": ...}`.

Colours that follow the theme (text, grid, background) are filled in by the page; these are the same in light and dark.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Figure = dict[str, Any]

BLUE, GREEN, AMBER, VIOLET, ORANGE, RED, GREY, TEAL, PINK = (
    "#3b7de0", "#2f9e6e", "#d19a1f", "#8f63d8", "#d96f32", "#d64550", "#8a93a3", "#1496ab", "#c05a94")


def rounded(values: np.ndarray, digits: int) -> list[float | int | None]:
    """Short JSON: significant digits that a screen can show, whole numbers without a point, None for NaN."""
    short = (float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist())
    return [int(value) if value is not None and value.is_integer() else value for value in short]


def escaped(text: str) -> str:
    """Plotly reads a few HTML tags in labels; names are text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def say_empty(layout: dict[str, Any], text: str) -> None:
    """A sentence in place of axes that would count nothing."""
    for name in layout:
        if name.startswith(("xaxis", "yaxis")):
            layout[name]["visible"] = False
    layout["showlegend"] = False
    layout["annotations"] = [{"text": text, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}]

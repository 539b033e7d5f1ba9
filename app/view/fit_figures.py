"""What a job takes beside what is free, as figures. Pure functions, no Plotly needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.view.drawing import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    TEAL,
    VIOLET,
    Figure,
    escaped,
    rounded,
)
from app.words import GIB, in_bytes
from engine.fit.memory_items import Item, MemoryItem
from engine.fit.needs import Part

PART_COLOURS = {
    MemoryItem.WEIGHT_HIGH: BLUE,
    MemoryItem.WEIGHT_LOW: TEAL,
    MemoryItem.EXP_AVG: GREEN,
    MemoryItem.EXP_AVG_SQ: VIOLET,
    MemoryItem.GRAD: ORANGE,
    MemoryItem.HOST_BOUNDARIES: AMBER,
    MemoryItem.LOADING_PEAK: PINK,
    MemoryItem.RESIDENT_BLOCKS: BLUE,
    MemoryItem.BLOCK_SLOTS: TEAL,
    MemoryItem.OUTER_SLOTS: PINK,
    MemoryItem.GRADIENT_SUMS: ORANGE,
    MemoryItem.OPTIMIZER_STATES: VIOLET,
    MemoryItem.KEPT_ACTIVATIONS: AMBER,
    MemoryItem.BOUNDARIES: AMBER,
    MemoryItem.WORKING_SET: GREEN,
    MemoryItem.CHECKPOINTS: BLUE,
    MemoryItem.EXPORT: GREEN,
}
"""By item: what means the same has one colour wherever it stands. The small ones, which every run
has, are grey.
"""
FREE_COLOUR, LIMIT_COLOUR = "--rs-free", "--rs-text"
"""Colours of the theme: the page puts in what they are in light or in dark."""


def item_colour(kind: MemoryItem) -> str:
    """Of an item of host memory, GPU memory or disk."""
    return PART_COLOURS.get(kind, GREY)


def item_words(item: Item) -> str:
    """Its name for the screen."""
    return item.name.replace("_", " ")


def fit_figure(part: Part) -> Figure:
    """One stacked bar, in GiB: a segment for each item, then what stays free; the limit as a line,
    where one is known.
    """
    total, limit = part.total / GIB, None if part.limit is None else part.limit / GIB
    data = [
        _segment(item_words(item), item.bytes, item_colour(item.kind))
        for item in part.items
        if item.bytes
    ]
    if limit is not None and limit > total:
        data.append(_segment("free", part.limit - part.total, FREE_COLOUR) | {"meta": "free"})
    line = (
        []
        if limit is None
        else [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": limit,
                "x1": limit,
                "y0": 0,
                "y1": 1,
                "line": {"color": LIMIT_COLOUR, "width": 2},
            }
        ]
    )
    hidden = {"visible": False, "fixedrange": True}
    # A hundredth more than the longest: the line at its end is inside.
    end = 1.01 * max(total, limit or 0.0)
    layout = {
        "barmode": "stack",
        "bargap": 0,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "shapes": line,
        "uirevision": "kept",
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "xaxis": hidden | {"range": [0, end]},
        "yaxis": hidden | {"range": [-0.5, 0.5]},
    }
    return {"data": data, "layout": layout}


def _segment(name: str, nbytes: int, colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [0],
        "x": rounded(np.array([nbytes / GIB]), 6),
        "width": 0.7,
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": f"{escaped(name)}: {in_bytes(nbytes)}<extra></extra>",
    }

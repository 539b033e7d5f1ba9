"""Figures of what a job needs against what is free. All functions are pure and do not need
Plotly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from app.labels import GIB, in_bytes
from app.shared.charts.drawing import (
    AMBER,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    TEAL,
    VIOLET,
    Figure,
    escaped,
    rounded,
    vertical_line,
)
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.fit.requirements import Part

PART_COLORS = {
    MemoryItem.WEIGHT_HIGH: BLUE,
    MemoryItem.WEIGHT_LOW: TEAL,
    MemoryItem.EXP_AVG: GREEN,
    MemoryItem.EXP_AVG_SQ: VIOLET,
    MemoryItem.GRAD: ORANGE,
    MemoryItem.GRADIENT_RING: ORANGE,
    MemoryItem.STATES_RING: VIOLET,
    MemoryItem.UPDATED_MATRIX: GREEN,
    MemoryItem.DISK_OFFLOADED_MOMENTS: VIOLET,
    MemoryItem.HOST_BLOCK_INPUTS: AMBER,
    MemoryItem.DISK_RINGS: AMBER,
    MemoryItem.DISK_OFFLOADED_BLOCK_INPUTS: AMBER,
    MemoryItem.LOADING_PEAK: PINK,
    MemoryItem.STAGING_BUFFERS: BLUE,
    MemoryItem.BLOCKS_KEPT_IN_SLOTS: BLUE,
    MemoryItem.GPU_RESIDENT_UNITS: TEAL,
    MemoryItem.BLOCK_SLOTS: TEAL,
    MemoryItem.EMBED_AND_HEAD_SLOTS: PINK,
    MemoryItem.MAIN_GRADS: ORANGE,
    MemoryItem.KEPT_GRADIENTS: GREEN,
    MemoryItem.OPTIMIZER_STATES: VIOLET,
    MemoryItem.KEPT_ACTIVATIONS: AMBER,
    MemoryItem.BLOCK_INPUTS: AMBER,
    MemoryItem.WORKING_SET: GREEN,
    MemoryItem.BEST: TEAL,
    MemoryItem.CHECKPOINTS: BLUE,
    MemoryItem.EXPORT: GREEN,
}
"""Colors of items; the same meaning has the same color everywhere. The small ones, which every run
has, are not listed here and are gray.
"""
FREE_COLOR = "--rs-free"
LIMIT_COLOR = "--rs-text"
"""Placeholders for the theme's colors, which the page fills in for light or dark."""


def item_color(kind: MemoryItem) -> str:
    """Returns the color of an item of RAM, GPU memory or disk."""
    return PART_COLORS.get(kind, GRAY)


def fit_figure(part: Part) -> Figure:
    """Returns one stacked bar in GiB: a segment for each item, then the free rest. The limit is
    drawn as a line if it is known.
    """
    total = part.total / GIB
    data = [
        _segment(item.words, item.bytes, item_color(item.kind)) for item in part.items if item.bytes
    ]
    limit_line = []
    end = total
    if part.limit is not None:
        limit = part.limit / GIB
        if limit > total:
            free = _segment("free", part.limit - part.total, FREE_COLOR)
            data.append(free | {"meta": "free"})
        limit_line = [vertical_line(limit, {"color": LIMIT_COLOR, "width": 2})]
        end = max(total, limit)
    hidden = {"visible": False, "fixedrange": True}
    layout = {
        "barmode": "stack",
        "bargap": 0,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "shapes": limit_line,
        "uirevision": "kept",
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        # The range is one percent longer than the longest value, so that a line at the end is
        # visible.
        "xaxis": hidden | {"range": [0, 1.01 * end]},
        "yaxis": hidden | {"range": [-0.5, 0.5]},
    }
    return {"data": data, "layout": layout}


def _segment(name: str, nbytes: int, color: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [0],
        "x": rounded(np.array([nbytes / GIB]), 6),
        "width": 0.7,
        "marker": {"color": color, "line": {"width": 0}},
        "hovertemplate": f"{escaped(name)}: {in_bytes(nbytes)}<extra></extra>",
    }

"""The lengths of a data set's examples as a figure and as text. All functions are pure and need no
Plotly.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from app.shared.charts.drawing import BLUE, GRAY, Figure, vertical_line
from engine.text import counted

LIMIT_COLOR = "--rs-text"
"""Name that the page replaces by the theme's color, for light or dark."""


def lengths_figure(preview: Mapping[str, Any]) -> Figure:
    """Returns a histogram of tokens per example; `preview` is a preview from `engine.data`.
    Examples that are cut are gray, and a dotted line marks the cut.
    """
    histogram = preview["histogram"]
    longest = preview["max_seq_len"]
    spans = list(itertools.pairwise(histogram["edges"]))
    bars = {
        "type": "bar",
        "x": [(low + high - 1) / 2 for low, high in spans],
        "y": histogram["counts"],
        "width": [high - low for low, high in spans],
        "marker": {
            "color": [_bar_color(low, longest) for low, _ in spans],
            "line": {"width": 0},
        },
        "customdata": [_bar_text(*span, n) for span, n in zip(spans, histogram["counts"])],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    cut_line = {"color": LIMIT_COLOR, "width": 1, "dash": "dot"}
    cut = [vertical_line(longest, cut_line)] if preview["rows_cut"] else []
    layout = {
        "bargap": 0.06,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "shapes": cut,
        "margin": {"l": 34, "r": 6, "t": 4, "b": 30},
        "xaxis": {
            "title": {"text": "tokens per example", "standoff": 4},
            "fixedrange": True,
            "zeroline": False,
            "nticks": 6,
            "tickformat": ",d",
        },
        "yaxis": {"fixedrange": True, "zeroline": False, "nticks": 3, "rangemode": "tozero"},
    }
    return {"data": [bars], "layout": layout}


def _bar_color(low: int, longest: int) -> str:
    is_cut = low > longest
    return GRAY if is_cut else BLUE


def _bar_text(low: int, high: int, count: int) -> str:
    """Returns how many examples have from `low` to `high - 1` tokens."""
    tokens = counted(low, "token") if high - low == 1 else f"{low:,} to {high - 1:,} tokens"
    return f"{tokens}: {counted(count, 'example')}"


def lengths_text(preview: Mapping[str, Any]) -> str:
    """Returns how long an example is and how many are cut. It is empty if there are no examples."""
    lengths = preview["lengths"]
    if not lengths:
        return ""
    if min(lengths) < max(lengths):
        median = round(statistics.median(lengths))
        text = f"Typical example: {median:,} tokens ({min(lengths):,}–{max(lengths):,})."
    else:
        text = f"Every example has {lengths[0]:,} tokens."
    cut = preview["rows_cut"]
    if cut:
        verb = "is" if cut == 1 else "are"
        text += (
            f" {counted(cut, 'example')} of more than {preview['max_seq_len']:,} tokens {verb} cut."
        )
    else:
        text += " None is cut."
    texts = preview.get("text_rows")
    return f"{text} {texts}" if texts else text


def packing_text(preview: Mapping[str, Any]) -> str:
    """Returns how full packed rows are; empty without packing."""
    count, rows = len(preview["lengths"]), preview["packed_rows"]
    if rows is None or not count:
        return ""
    verb = "fills" if count == 1 else "fill"
    return (
        f"Packed, {counted(count, 'example')} {verb} {counted(rows, 'row')} of "
        f"{preview['max_seq_len']:,} tokens to {preview['percent_filled']:g} %."
    )

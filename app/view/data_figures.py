"""How long the examples of a data set are, as a figure and in words. Pure functions, no Plotly
needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from app.view.drawing import BLUE, GREY, Figure
from engine.words import counted

LIMIT_COLOUR = "--rs-text"
"""Of the theme: the page puts in what it is in light or in dark."""


def lengths_figure(preview: Mapping[str, Any]) -> Figure:
    """A histogram of tokens per example, `preview` being that of `engine.data`; what is cut is
    grey, the cut a line.
    """
    counts, edges, longest = (
        preview["histogram"]["counts"],
        preview["histogram"]["edges"],
        preview["max_seq_len"],
    )
    spans = list(zip(edges, edges[1:]))
    data = [
        {
            "type": "bar",
            "x": [(low + high - 1) / 2 for low, high in spans],
            "y": counts,
            "width": [high - low for low, high in spans],
            "marker": {
                "color": [GREY if low > longest else BLUE for low, _ in spans],
                "line": {"width": 0},
            },
            "customdata": [
                f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}" for low, high in spans
            ],
            "hovertemplate": "%{customdata} tokens: %{y} examples<extra></extra>",
        }
    ]
    cut = (
        [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": longest,
                "x1": longest,
                "y0": 0,
                "y1": 1,
                "line": {"color": LIMIT_COLOUR, "width": 1, "dash": "dot"},
            }
        ]
        if preview["rows_cut"]
        else []
    )
    layout = {
        "bargap": 0.06,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "shapes": cut,
        "margin": {"l": 34, "r": 6, "t": 4, "b": 30},
        "xaxis": {
            "title": {"text": "tokens of an example", "standoff": 4},
            "fixedrange": True,
            "zeroline": False,
            "nticks": 6,
            "tickformat": ",d",
        },
        "yaxis": {"fixedrange": True, "zeroline": False, "nticks": 3, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}


def lengths_words(preview: Mapping[str, Any]) -> str:
    """The same in words, and how full the rows are that the examples share; empty without an
    example.
    """
    lengths = preview["lengths"]
    if not lengths:
        return ""
    said = (
        f"Examples have {min(lengths):,} to {max(lengths):,} tokens, "
        f"{statistics.median(lengths):,.0f} in the median"
        if min(lengths) < max(lengths)
        else f"Every example has {lengths[0]:,} tokens"
    )
    rows = preview["packed_rows"]
    if rows is not None:
        said += (
            f"; packed, {len(lengths):,} of them share {counted(rows, 'row')} of "
            f"{preview['max_seq_len']:,}, {preview['percent_filled']:g} % full"
        )
    if preview["rows_cut"]:
        said += f"; {preview['rows_cut']:,} longer than {preview['max_seq_len']:,} are cut"
    return said + "."

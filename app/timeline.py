"""The timeline of one step: its spans by lane, as a figure and as numbers. Pure functions, no Plotly needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.drawing import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, TEAL, VIOLET, Figure, escaped, rounded, say_empty
from engine.plan import COMPUTE, D2H, H2D, HOST, STATES_IN, STATES_OUT, UPDATE, UPDATES
from engine.snapshot import RunSnapshot

MAX_SPANS = 1500
LANES = (H2D, STATES_IN, COMPUTE, UPDATE, D2H, STATES_OUT, HOST)
"""From top to bottom: what comes in, what the device does with it, what goes out, and the host."""

OP_GROUPS = {
    "Weights in": (BLUE, ("prefetch",)),
    "Boundaries, sums": (GREY, ("store_boundary", "fetch_boundary", "fetch_grad", "reduce", "summary", "clip", "lend",
                                "reclaim")),
    "Forward": (GREEN, ("embed", "forward", "loss")),
    "Recompute": (AMBER, ("recompute",)),
    "Backward": (VIOLET, ("backward", "embed_backward")),
    "Gradients out": (ORANGE, ("offload",)),
    "States in and out": (TEAL, ("fetch_states", "fetch_gradient", "offload_weights", "offload_states")),
    "Optimizer": (PINK, ("update", "device_update", "home")),
}
"""What each colour of the timeline stands for: the legend, in order."""

WAIT_COLOUR = "rgba(214, 69, 80, 0.35)"
OP_COLOURS = {op: colour for colour, ops in OP_GROUPS.values() for op in ops}
OP_WORDS = {"prefetch": "weights in", "offload": "gradients out", "update": "optimizer", "summary": "loss and norms out",
            "store_boundary": "boundary to host", "fetch_boundary": "boundary from host",
            "fetch_grad": "gradient sum from host", "reduce": "norm of the gradient", "clip": "clip factor",
            "fetch_states": "optimizer states in", "fetch_gradient": "gradient in",
            "device_update": "optimizer on the GPU", "offload_weights": "updated weights out",
            "offload_states": "optimizer states out", "home": "everything updated is home",
            "lend": "memory of activations for states", "reclaim": "memory of states for activations"}

LANE_WORDS = {H2D: "H2D", STATES_IN: "States in", COMPUTE: "Compute", UPDATE: "Update", D2H: "D2H",
              STATES_OUT: "States out", HOST: "Host"}


def timeline_figure(snapshot: RunSnapshot) -> Figure:
    """The spans of the latest sampled step, one row a lane, milliseconds from the step's first op; red is where COMPUTE
    waits. Empty before the first sample."""
    spans = snapshot.timeline.spans if snapshot.timeline is not None else []
    lanes = lanes_of(spans)
    length = max((span["end"] for span in spans), default=0.0)
    data = [_lane_bars(lane, own) for lane, own in lanes.items()]
    waits = waits_of(lanes[COMPUTE], length)
    data.append({"type": "bar", "orientation": "h", "name": "waiting", "y": [LANE_WORDS[COMPUTE]] * len(waits),
                 "base": rounded(1000 * np.array([start for start, _ in waits]), 6),
                 "x": rounded(1000 * np.array([end - start for start, end in waits]), 6),
                 "marker": {"color": WAIT_COLOUR, "line": {"width": 0}}, "width": 0.5,
                 "hovertemplate": "waiting for %{x:.3~g} ms<extra></extra>"})
    layout = {
        "barmode": "overlay", "bargap": 0.2, "showlegend": False, "uirevision": "kept", "hovermode": "closest",
        "margin": {"l": 74, "r": 10, "t": 8, "b": 38},
        "xaxis": {"title": {"text": "ms from the step's first op"}, "zeroline": False, "rangemode": "tozero"},
        "yaxis": {"categoryorder": "array", "categoryarray": [LANE_WORDS[lane] for lane in reversed(lanes)],
                  "fixedrange": True, "showgrid": False},
    }
    if not spans:
        say_empty(layout, "Appears with the first sampled step.")
    return {"data": data, "layout": layout}


def timeline_legend(snapshot: RunSnapshot) -> list[list[str]]:
    """Pairs of label and colour for what the timeline shows."""
    shown = {span["op"] for span in snapshot.timeline.spans} if snapshot.timeline is not None else set()
    legend = [[label, colour] for label, (colour, ops) in OP_GROUPS.items() if shown & set(ops)]
    return legend + [["Compute waits", WAIT_COLOUR]] if legend else []


def _lane_bars(lane: str, spans: list[dict[str, Any]]) -> dict[str, Any]:
    starts = 1000 * np.array([span["start"] for span in spans])
    lengths = 1000 * np.array([span["end"] - span["start"] for span in spans])
    return {"type": "bar", "orientation": "h", "name": lane, "y": [LANE_WORDS[lane]] * len(spans),
            "base": rounded(starts, 6), "x": rounded(lengths, 6), "width": 0.72,
            "marker": {"color": [OP_COLOURS.get(span["op"], GREY) for span in spans], "line": {"width": 0}},
            "customdata": [_span_words(span) for span in spans],
            "hovertemplate": "%{customdata}<br>%{x:.3~g} ms, from %{base:.4~g} ms<extra></extra>"}


def _span_words(span: dict[str, Any]) -> str:
    what = OP_WORDS.get(span["op"], span["op"].replace("_", " "))
    if span["count"] == 1:
        return f"{escaped(span['unit'])}: {escaped(what)}"
    units = span["unit"] if span["unit"] == span["last"] else f"{span['unit']} to {span['last']}"
    return f"{escaped(units)}: {span['count']} ops, mostly {escaped(what)}"


# ------------------------------------------------------------------ spans


def lanes_of(spans: list[dict[str, Any]], limit: int = MAX_SPANS) -> dict[str, list[dict[str, Any]]]:
    """Spans by lane in order of time, at most `limit` in all: the shortest neighbours of a lane are merged
    first, those of one op before others. A merged span has `count` > 1 and the op that fills most of it. The lanes of
    optimizers on the device are there when they have spans, the others always."""
    lanes = {lane: sorted((span for span in spans if span["lane"] == lane), key=lambda span: span["start"])
             for lane in LANES}
    lanes = {lane: own for lane, own in lanes.items() if own or lane not in UPDATES}
    length = max((span["end"] for span in spans), default=0.0)
    merged = {lane: [dict(span, count=1, last=span["unit"], share={span["op"]: span["end"] - span["start"]})
                     for span in own] for lane, own in lanes.items()}
    width, any_op = length / MAX_SPANS, False
    while sum(map(len, merged.values())) > limit:
        merged = {lane: _merge(own, width, any_op) for lane, own in merged.items()}
        width, any_op = (2 * width, False) if any_op else (width, True)
    return merged


def _merge(spans: list[dict[str, Any]], width: float, any_op: bool) -> list[dict[str, Any]]:
    """One pass over a lane that joins neighbours while the result is no longer than `width` seconds."""
    joined: list[dict[str, Any]] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and span["end"] - last["start"] <= width and (any_op or span["op"] == last["op"]):
            share = dict(last["share"])
            for op, seconds in span["share"].items():
                share[op] = share.get(op, 0.0) + seconds
            joined[-1] = dict(last, end=max(last["end"], span["end"]), last=span["last"], share=share,
                              count=last["count"] + span["count"], op=max(share, key=share.get))
        else:
            joined.append(span)
    return joined


def waits_of(compute: list[dict[str, Any]], length: float) -> list[tuple[float, float]]:
    """Gaps between the spans of the COMPUTE lane that are long enough to be seen, as (start, end) in seconds."""
    waits, busy_until = [], 0.0
    for span in compute:
        if span["start"] - busy_until > length / 500:
            waits.append((busy_until, span["start"]))
        busy_until = max(busy_until, span["end"])
    return waits

"""The timeline of one step: its spans by lane, its phases, where COMPUTE waited and for what, and
what had been predicted, as a figure and in words. Pure functions, no Plotly needed; what is drawn
is bounded, whatever the step has done (`app.view.spans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.view.drawing import (
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
    say_empty,
)
from app.view.spans import Phase, Window, gaps_of, lane_names, lanes_of, longest, phases_of, within
from app.words import in_share, in_short_time
from engine.plan.ops import Lane, OpKind
from engine.runs.events import PlanSimulated, StepTimeline

OP_GROUPS = {
    "Weights in": (BLUE, (OpKind.PREFETCH,)),
    "Boundaries, sums": (
        GREY,
        (
            OpKind.STORE_BOUNDARY,
            OpKind.FETCH_BOUNDARY,
            OpKind.FETCH_GRAD,
            OpKind.REDUCE,
            OpKind.SUMMARY,
            OpKind.CLIP,
            OpKind.LEND,
            OpKind.RECLAIM,
        ),
    ),
    "Forward": (GREEN, (OpKind.EMBED, OpKind.FORWARD, OpKind.LOSS)),
    "Backward": (VIOLET, (OpKind.BACKWARD, OpKind.EMBED_BACKWARD)),
    "Gradients out": (ORANGE, (OpKind.OFFLOAD,)),
    "States in and out": (
        TEAL,
        (OpKind.FETCH_STATES, OpKind.FETCH_GRADIENT, OpKind.OFFLOAD_WEIGHTS, OpKind.OFFLOAD_STATES),
    ),
    "Optimizer": (PINK, (OpKind.UPDATE, OpKind.DEVICE_UPDATE, OpKind.APPLIED)),
}
"""What each colour of the timeline stands for: the legend, in order."""

WAIT_COLOUR = "rgba(214, 69, 80, 0.35)"
WAITS = {
    "h2d": (BLUE, "weights (H2D)"),
    "d2h": (ORANGE, "gradients out (D2H)"),
    "optimizer": (PINK, "the optimizer"),
    "other": (GREY, "other work"),
}
"""Stretches in which COMPUTE waited are red, hatched in the colour of what it waited for."""

OP_COLOURS = {op: colour for colour, ops in OP_GROUPS.values() for op in ops}
OP_WORDS = {
    OpKind.PREFETCH: "weights in",
    OpKind.OFFLOAD: "gradients out",
    OpKind.UPDATE: "optimizer",
    OpKind.SUMMARY: "loss and norms out",
    OpKind.STORE_BOUNDARY: "boundary to host",
    OpKind.FETCH_BOUNDARY: "boundary from host",
    OpKind.FETCH_GRAD: "gradient sum from host",
    OpKind.REDUCE: "norm of the gradient",
    OpKind.CLIP: "clip factor",
    OpKind.FETCH_STATES: "optimizer states in",
    OpKind.FETCH_GRADIENT: "gradient in",
    OpKind.DEVICE_UPDATE: "optimizer on the GPU",
    OpKind.OFFLOAD_WEIGHTS: "updated weights out",
    OpKind.OFFLOAD_STATES: "optimizer states out",
    OpKind.APPLIED: "everything updated is home",
    OpKind.LEND: "memory of activations for states",
    OpKind.RECLAIM: "memory of states for activations",
}

LANE_WORDS = {
    Lane.H2D: "H2D",
    Lane.STATES_IN: "States in",
    Lane.COMPUTE: "Compute",
    Lane.UPDATE: "Update",
    Lane.D2H: "D2H",
    Lane.STATES_OUT: "States out",
    Lane.HOST: "Host",
}
PHASE_COLOURS = {"Forward": GREEN, "Loss": GREY, "Backward": VIOLET, "Updates": PINK}

SECOND_TONE = 0.74
"""Opacity of every other one of neighbours that are of one op, so that each can be told from the
next.
"""
MAX_WAITS, MAX_BOXES = 400, 500
"""Stretches of waiting, and boxes of the prediction, that are drawn."""
MAX_BOUNDARIES = 24
"""Phases up to which their ends are drawn through the lanes."""


def timeline_part(
    timeline: StepTimeline | None, simulated: PlanSimulated | None = None
) -> dict[str, Any]:
    """What the page draws and says of one step: its figure, the `phases` of the band above it,
    `legend`, `said` and `step`.
    """
    return {
        **timeline_figure(timeline, simulated),
        "phases": timeline_phases(timeline),
        "said": timeline_said(timeline),
        "legend": timeline_legend(timeline, simulated),
        "step": None if timeline is None else timeline.step,
    }


def timeline_figure(
    timeline: StepTimeline | None,
    simulated: PlanSimulated | None = None,
    window: Window | None = None,
) -> Figure:
    """The spans of a step, one row a lane, in milliseconds from the step's first op. Red is where
    COMPUTE waited, the thin grey line under a lane what had been predicted. Empty without a step.

    `window`: only what lies in it, on the same axes. `is_whole` says whether each span has a bar of
    its own, `count` how many bars stand for how many spans, in words.
    """
    every = timeline.spans if timeline is not None else []
    all_waits = timeline.waits if timeline is not None else []
    spans, waits = within(_with_predictions(every, simulated), window), within(all_waits, window)
    lanes = lanes_of(spans, names=lane_names(every))
    begin = min((wait["start"] for wait in all_waits), default=0.0)
    length = max((span["end"] for span in every), default=0.0)
    batches = 1 + max(
        (span["micro_batch"] for span in every if span.get("micro_batch") is not None), default=0
    )
    data = [_lane_bars(lane, own, batches) for lane, own in lanes.items()]
    data += (
        _wait_bars(waits)
        if all_waits
        else [_unknown_waits(gaps_of(lanes[Lane.COMPUTE], length, window))]
    )
    rows, ghost = (
        [LANE_WORDS[lane] for lane in reversed(lanes)],
        _ghost(simulated, list(lanes), window) if every else [],
    )
    layout = {
        "barmode": "overlay",
        "bargap": 0.2,
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 74, "r": 10, "t": 2, "b": 38},
        "xaxis": {
            "title": {"text": "ms from the step's first op"},
            "zeroline": False,
            "range": rounded(
                1000 * np.array([begin - 0.004 * length, 1.004 * max(length, 1e-6)]), 6
            ),
        },
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": rows,
            "range": [-0.52, len(rows) - 0.5],
            "fixedrange": True,
            "showgrid": False,
        },
        "shapes": ghost + _boundaries(phases_of(every)),
    }
    if not every:
        say_empty(layout, "Appears with the first sampled step.")
    bars = sum(map(len, lanes.values()))
    return {
        "data": data,
        "layout": layout,
        "is_whole": bars == len(spans),
        "count": _count_words(bars, len(spans), window),
    }


def _count_words(bars: int, spans: int, window: Window | None) -> str:
    if bars < spans:
        return f"Showing {bars:,} of {spans:,} spans; zoom in for all."
    return "" if window is None else f"Showing all {spans:,} spans of this stretch."


def timeline_phases(timeline: StepTimeline | None) -> list[dict[str, Any]]:
    """`{label, short, colour, start, end}` in milliseconds, in order of time."""
    return [
        {
            "label": f"{phase.label}: {_in_words(phase.end - phase.start)}",
            "short": phase.short,
            "colour": PHASE_COLOURS[phase.name],
            "start": round(1000 * phase.start, 4),
            "end": round(1000 * phase.end, 4),
        }
        for phase in phases_of(timeline.spans if timeline is not None else [])
    ]


def timeline_legend(
    timeline: StepTimeline | None, simulated: PlanSimulated | None = None
) -> list[dict[str, str]]:
    """Entries `{label, colour, kind}` for what the timeline shows; `kind` is op, wait or predicted."""
    if timeline is None or not timeline.spans:
        return []
    shown = {span["op"] for span in timeline.spans}
    legend = [
        _entry(label, colour, "op")
        for label, (colour, ops) in OP_GROUPS.items()
        if shown & set(ops)
    ]
    for cause, seconds in _waited(timeline).items():
        colour, words = WAITS.get(cause, WAITS["other"])
        legend.append(_entry(f"Compute waits for {words}: {_in_words(seconds)}", colour, "wait"))
    if not timeline.waits:
        legend.append(_entry("Compute waits", WAIT_COLOUR, "op"))
    return legend + ([_entry("As predicted", GREY, "predicted")] if simulated is not None else [])


def timeline_said(timeline: StepTimeline | None) -> str:
    """One sentence for those who cannot or will not read the figure."""
    if timeline is None or not timeline.spans:
        return ""
    length = max(span["end"] for span in timeline.spans)
    busy = sum(
        span["end"] - span["start"] for span in timeline.spans if span["lane"] == Lane.COMPUTE
    )
    said = (
        f"step {timeline.step:,}, {_in_words(length)}, compute busy "
        f"{in_share(min(1.0, busy / length) if length else 0.0)}"
    )
    waits = [
        f"{_in_words(seconds)} for {WAITS.get(cause, WAITS['other'])[1]}"
        for cause, seconds in _waited(timeline).items()
    ]
    return said + (f", waiting {', '.join(waits)}" if waits else "")


def _entry(label: str, colour: str, kind: str) -> dict[str, str]:
    return {"label": label, "colour": colour, "kind": kind}


def _waited(timeline: StepTimeline) -> dict[str, float]:
    """Seconds by cause, the longest first."""
    seconds: dict[str, float] = {}
    for wait in timeline.waits:
        cause = wait.get("cause", "other")
        seconds[cause] = seconds.get(cause, 0.0) + wait["end"] - wait["start"]
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _in_words(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else in_short_time(seconds)


# ------------------------------------------------------------------ bars


def _bars(
    name: str, row: str, starts: Sequence[float], ends: Sequence[float], **style: Any
) -> dict[str, Any]:
    begin, end = 1000 * np.array(starts, dtype=float), 1000 * np.array(ends, dtype=float)
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row] * len(begin),
        "base": rounded(begin, 9),
        "x": rounded(end - begin, 6),
        **style,
    }


def _lane_bars(lane: str, spans: list[dict[str, Any]], batches: int) -> dict[str, Any]:
    return _bars(
        lane,
        LANE_WORDS[lane],
        [span["start"] for span in spans],
        [span["end"] for span in spans],
        width=0.72,
        marker={
            "color": [OP_COLOURS.get(span["op"], GREY) for span in spans],
            "opacity": _tones(spans),
            "line": {"width": 0},
        },
        customdata=[_span_words(span, batches) for span in spans],
        hovertemplate="%{customdata}<br>%{x:.3~g} ms, from %{base:.4~g} ms<extra></extra>",
    )


def _tones(spans: list[dict[str, Any]]) -> list[float]:
    tones: list[float] = []
    for before, span in zip([None, *spans], spans):
        tones.append(
            SECOND_TONE
            if before is not None and before["op"] == span["op"] and tones[-1] == 1
            else 1
        )
    return tones


def _span_words(span: dict[str, Any], batches: int) -> str:
    what = escaped(OP_WORDS.get(span["op"], span["op"].replace("_", " ")))
    if span["count"] > 1:
        units = (
            span["unit"] if span["unit"] == span["last"] else f"{span['unit']} to {span['last']}"
        )
        return f"{escaped(units)}: {span['count']} ops, mostly {what}"
    words = f"{escaped(span['unit'])}: {what}"
    if batches > 1 and span.get("micro_batch") is not None:
        words += f", micro-batch {span['micro_batch'] + 1} of {batches}"
    return words + (f"<br>{_in_words(span['predicted'])} predicted" if "predicted" in span else "")


def _wait_bars(waits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A trace for each cause."""
    by_cause: dict[str, list[dict[str, Any]]] = {cause: [] for cause in WAITS}
    for wait in longest(waits, MAX_WAITS):
        cause = wait.get("cause", "other")
        by_cause[cause if cause in WAITS else "other"].append(wait)
    return [
        _bars(
            f"waiting: {cause}",
            LANE_WORDS[Lane.COMPUTE],
            [wait["start"] for wait in own],
            [wait["end"] for wait in own],
            width=0.72,
            marker={
                "color": WAIT_COLOUR,
                "line": {"width": 0},
                "pattern": {"shape": "/", "fgcolor": WAITS[cause][0], "size": 6, "solidity": 0.5},
            },
            hovertemplate=(
                f"Compute waits for {WAITS[cause][1]}<br>%{{x:.3~g}} ms, from %{{base:.4~g}} "
                "ms<extra></extra>"
            ),
        )
        for cause, own in by_cause.items()
        if own
    ]


def _unknown_waits(gaps: list[tuple[float, float]]) -> dict[str, Any]:
    """Of a record that does not say for what COMPUTE waited."""
    return _bars(
        "waiting",
        LANE_WORDS[Lane.COMPUTE],
        [start for start, _ in gaps],
        [end for _, end in gaps],
        width=0.5,
        marker={"color": WAIT_COLOUR, "line": {"width": 0}},
        hovertemplate="waiting for %{x:.3~g} ms<extra></extra>",
    )


def _boundaries(phases: list[Phase]) -> list[dict[str, Any]]:
    """Where one phase ends and the next begins, through all lanes."""
    if len(phases) > MAX_BOUNDARIES:
        return []
    return [
        {
            "type": "line",
            "name": "phase",
            "xref": "x",
            "yref": "paper",
            "x0": x,
            "x1": x,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"color": GREY, "width": 1, "dash": "dot"},
            "opacity": 0.6,
        }
        for x in rounded(1000 * np.array([phase.start for phase in phases[1:]]), 6)
    ]


# ------------------------------------------------------------------ the prediction


def _with_predictions(
    spans: list[dict[str, Any]], simulated: PlanSimulated | None
) -> list[dict[str, Any]]:
    """Each span with the seconds that were predicted of its op, where the plan that was simulated
    is the one that ran.
    """
    predicted = simulated.spans if simulated is not None else []
    if [_op(span) for span in spans] != [_op(span) for span in predicted]:
        return spans
    return [
        dict(span, predicted=other["end"] - other["start"]) for span, other in zip(spans, predicted)
    ]


def _op(span: dict[str, Any]) -> tuple[Any, ...]:
    return span["op"], span["unit"], span["lane"], span.get("micro_batch")


def _ghost(
    simulated: PlanSimulated | None, lanes: list[str], window: Window | None
) -> list[dict[str, Any]]:
    """The simulated step: under the bars of each lane, one path with a box an op."""
    shapes = []
    for lane, own in (
        lanes_of(within(simulated.spans, window), MAX_BOXES).items()
        if simulated is not None
        else ()
    ):
        if own and lane in lanes:
            row = len(lanes) - 1 - lanes.index(lane)  # Plotly counts from the bottom
            low, high = row - 0.48, row - 0.39
            ends = [(f"{1000 * span['start']:.9g}", f"{1000 * span['end']:.9g}") for span in own]
            boxes = "".join(f"M{start},{low}H{end}V{high}H{start}Z" for start, end in ends)
            shapes.append(
                {
                    "type": "path",
                    "name": "predicted",
                    "path": boxes,
                    "xref": "x",
                    "yref": "y",
                    "layer": "above",
                    "fillcolor": "rgba(138, 147, 163, 0.45)",
                    "line": {"color": GREY, "width": 0.75},
                }
            )
    return shapes

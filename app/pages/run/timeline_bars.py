"""The bars of the timeline, with their colors and texts: a bar for each span or group of merged
neighbors, and one for each stretch in which COMPUTE waited. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.labels import in_short_time
from app.pages.run.spans import MergedSpan, longest
from app.shared.charts.drawing import (
    AMBER,
    BLUE,
    GRAY,
    GREEN,
    OLIVE,
    ORANGE,
    PINK,
    TEAL,
    VIOLET,
    escaped,
    rounded,
)
from engine.planning.schedule.ops import Lane, OpKind
from engine.runs.record.events import Span, Wait

OPTIMIZER = "Optimizer"
OP_GROUPS = {
    "Weights in": (BLUE, (OpKind.PREFETCH,)),
    "Other": (
        GRAY,
        (
            OpKind.OFFLOAD_BLOCK_INPUT,
            OpKind.FETCH_BLOCK_INPUT,
            OpKind.FETCH_GRAD,
            OpKind.REDUCE,
            OpKind.SUMMARY,
            OpKind.CLIP,
        ),
    ),
    "Compute: forward": (GREEN, (OpKind.EMBED, OpKind.FORWARD, OpKind.LOSS)),
    "Compute: backward": (VIOLET, (OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.EMBED_BACKWARD)),
    "Gradients out": (ORANGE, (OpKind.OFFLOAD, OpKind.OFFLOAD_KEPT_GRADIENT)),
    "States in and out": (
        TEAL,
        (OpKind.FETCH_STATES, OpKind.FETCH_GRADIENT, OpKind.OFFLOAD_WEIGHTS, OpKind.OFFLOAD_STATES),
    ),
    OPTIMIZER: (
        PINK,
        (
            OpKind.UPDATE,
            OpKind.UPDATE_MOMENTS,
            OpKind.DEVICE_UPDATE,
            OpKind.UPDATE_IN_PLACE,
            OpKind.OPTIMIZER_STEP,
        ),
    ),
    "Exchange": (
        OLIVE,
        (OpKind.BARRIER, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE),
    ),
    "Disk": (
        AMBER,
        (
            OpKind.READ_STATES,
            OpKind.WRITE_STATES,
            OpKind.READ_BLOCK_INPUT,
            OpKind.WRITE_BLOCK_INPUT,
        ),
    ),
}
"""Ops that each color of the timeline represents, in the order of the legend, which has the words
of the lanes.
"""

WAIT_COLOR = "rgba(214, 69, 80, 0.35)"
WAITS = {
    "h2d": (BLUE, "weights", "weights"),
    "d2h": (ORANGE, "gradients", "gradients on their way out"),
    "optimizer": (PINK, "optimizer", "the optimizer"),
    "disk": (AMBER, "disk", "the disk"),
    "exchange": (OLIVE, "GPUs", "the other GPUs"),
    "other": (GRAY, "other", "other work"),
}
"""Causes for which COMPUTE waits, each with its color, a word for the legend, and a text. Such
stretches are red, with hatching in the color of the cause.
"""

OP_COLORS: dict[str, str] = {op: color for color, ops in OP_GROUPS.values() for op in ops}
OP_LABELS: dict[str, str] = {
    OpKind.PREFETCH: "weights in",
    OpKind.BARRIER: "until all GPUs have updated it",
    OpKind.ALL_GATHER: "weights from the other GPUs",
    OpKind.REDUCE_SCATTER: "gradients added up over the GPUs",
    OpKind.ALL_REDUCE: "loss and norms of all GPUs",
    OpKind.OFFLOAD: "gradients out",
    OpKind.OFFLOAD_KEPT_GRADIENT: "kept gradients out",
    OpKind.UPDATE: "optimizer",
    OpKind.UPDATE_MOMENTS: "optimizer, moments",
    OpKind.READ_STATES: "moments from the disk",
    OpKind.WRITE_STATES: "moments to the disk",
    OpKind.READ_BLOCK_INPUT: "block input from the disk",
    OpKind.WRITE_BLOCK_INPUT: "block input to the disk",
    OpKind.SUMMARY: "loss and norms out",
    OpKind.OFFLOAD_BLOCK_INPUT: "block input to RAM",
    OpKind.FETCH_BLOCK_INPUT: "block input from RAM",
    OpKind.FETCH_GRAD: "earlier gradient from RAM",
    OpKind.REDUCE: "norm of the gradient",
    OpKind.CLIP: "clip factor",
    OpKind.FETCH_STATES: "optimizer states in",
    OpKind.FETCH_GRADIENT: "gradient in",
    OpKind.DEVICE_UPDATE: "optimizer on the GPU",
    OpKind.UPDATE_IN_PLACE: "optimizer on the GPU, in place",
    OpKind.OFFLOAD_WEIGHTS: "updated weights out",
    OpKind.OFFLOAD_STATES: "optimizer states out",
    OpKind.OPTIMIZER_STEP: "everything updated is in RAM",
}

LANE_LABELS = {
    Lane.H2D: "Weights in",
    Lane.STATES_IN: "States in",
    Lane.COMPUTE: "Compute",
    Lane.UPDATE: "GPU optimizer",
    Lane.D2H: "Gradients out",
    Lane.STATES_OUT: "States out",
    Lane.GRADIENTS_OUT: "Kept gradients",
    Lane.HOST: "CPU optimizer",
    Lane.COLLECTIVE: "Exchange",
    Lane.READ: "Disk read",
    Lane.WRITE: "Disk write",
}

SECOND_TONE = 0.74
"""Opacity of every second one of neighboring bars of the same op, so that neighbors can be kept
apart.
"""
MAX_WAITS = 400
"""Largest number of stretches of waiting that are drawn."""


def _bars(name: str, row: str, starts: Sequence[float], ends: Sequence[float]) -> dict[str, Any]:
    """Returns a trace of bars in a row; `starts` and `ends` are in seconds."""
    begin = 1000 * np.array(starts, dtype=float)
    end = 1000 * np.array(ends, dtype=float)
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row] * len(begin),
        "base": rounded(begin, 9),
        "x": rounded(end - begin, 6),
    }


def _bars_of(name: str, row: str, intervals: Sequence[Span | Wait]) -> dict[str, Any]:
    starts = [interval["start"] for interval in intervals]
    ends = [interval["end"] for interval in intervals]
    return _bars(name, row, starts, ends)


def lane_bars(lane: Lane, spans: list[MergedSpan], batches: int, row: str = "") -> dict[str, Any]:
    """Returns a trace with a bar for each span of a lane, in `row` or else in the row of the lane.
    `batches` is the number of micro-batches of the step.
    """
    look = {
        "width": 0.72,
        "marker": {
            "color": [OP_COLORS.get(span["op"], GRAY) for span in spans],
            "opacity": _tones(spans),
            "line": {"width": 0},
        },
        "customdata": [_span_text(span, batches) for span in spans],
        # The page writes these into bars that have room for them.
        "text": [_block_number(span) for span in spans],
        "textposition": "none",
        "hovertemplate": "%{customdata}<br>%{x:.3~g} ms, from %{base:.4~g} ms<extra></extra>",
    }
    return _bars_of(lane, row or LANE_LABELS[lane], spans) | look


def _tones(spans: list[MergedSpan]) -> list[float]:
    """Returns the opacity of each span, which differs between neighbors of the same op."""
    tones: list[float] = []
    before: str | None = None
    for span in spans:
        is_second = span["op"] == before and tones[-1] == 1
        tones.append(SECOND_TONE if is_second else 1)
        before = span["op"]
    return tones


def _block_number(span: MergedSpan) -> str:
    """Returns the number of the block that a span is about, "" for other units and for many."""
    kind, _, number = span["unit"].partition(" ")
    return number if kind == "block" and span["count"] == 1 else ""


def _span_text(span: MergedSpan, batches: int) -> str:
    """Returns the text for a bar under the mouse pointer."""
    what = escaped(OP_LABELS.get(span["op"], span["op"].replace("_", " ")))
    unit, last = span["unit"], span["last"]
    if span["count"] > 1:
        units = unit if unit == last else f"{unit} to {last}"
        return f"{escaped(units)}: {span['count']} ops, mostly {what}"
    text = f"{escaped(unit)}: {what}"
    number = span.get("micro_batch")
    if batches > 1 and number is not None:
        text += f", micro-batch {number + 1} of {batches}"
    if "predicted" in span:
        text += f"<br>{duration_text(span['predicted'])} predicted"
    return text


def wait_bars(
    waits: list[Wait], row: str = LANE_LABELS[Lane.COMPUTE], limit: int = MAX_WAITS
) -> list[dict[str, Any]]:
    """Returns a trace for each cause for which COMPUTE waited, with at most `limit` bars in all."""
    by_cause: dict[str, list[Wait]] = {cause: [] for cause in WAITS}
    for wait in longest(waits, limit):
        cause = wait.get("cause", "other")
        by_cause[cause if cause in WAITS else "other"].append(wait)
    return [_bars_of_cause(cause, own, row) for cause, own in by_cause.items() if own]


def _bars_of_cause(cause: str, waits: list[Wait], row: str) -> dict[str, Any]:
    color, _, text = WAITS[cause]
    look = {
        "width": 0.72,
        "marker": {
            "color": WAIT_COLOR,
            "line": {"width": 0},
            "pattern": {"shape": "/", "fgcolor": color, "size": 6, "solidity": 0.5},
        },
        "hovertemplate": (
            f"Compute waits for {text}<br>%{{x:.3~g}} ms, from %{{base:.4~g}} ms<extra></extra>"
        ),
    }
    return _bars_of(f"waiting: {cause}", row, waits) | look


def unknown_waits(gaps: list[tuple[float, float]]) -> dict[str, Any]:
    """Returns the gaps in a record that does not contain the causes for which COMPUTE waited."""
    starts = [start for start, _ in gaps]
    ends = [end for _, end in gaps]
    look = {
        "width": 0.5,
        "marker": {"color": WAIT_COLOR, "line": {"width": 0}},
        "hovertemplate": "waiting for %{x:.3~g} ms<extra></extra>",
    }
    return _bars("waiting", LANE_LABELS[Lane.COMPUTE], starts, ends) | look


def duration_text(seconds: float) -> str:
    """Returns the duration of part of a step, in milliseconds if it is less than a second."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else in_short_time(seconds)

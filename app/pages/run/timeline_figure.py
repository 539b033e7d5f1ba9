"""The timeline of one step: its spans by lane, its phases, where COMPUTE waited and for what, and
the prediction.

All functions are pure and need no Plotly. The number of drawn elements is limited, however many
spans the step has (`app.pages.run.spans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.labels import in_share
from app.pages.run.spans import (
    Phase,
    TimedSpan,
    Window,
    gaps_of,
    lane_names,
    lanes_of,
    phases_of,
    within,
)
from app.pages.run.timeline_bars import (
    LANE_LABELS,
    OP_GROUPS,
    OPTIMIZER,
    WAIT_COLOR,
    WAITS,
    duration_text,
    lane_bars,
    unknown_waits,
    wait_bars,
)
from app.shared.charts.drawing import (
    GRAY,
    GREEN,
    PINK,
    VIOLET,
    Figure,
    rounded,
    vertical_line,
    write_empty,
)
from engine.planning.schedule.ops import Lane, OpKind
from engine.runs.record.events import PlanSimulated, Span, StepTimeline, Wait

PHASE_COLORS = {"Forward": GREEN, "Loss": GRAY, "Backward": VIOLET, "Updates": PINK}

MAIN_ENTRIES = ("Compute: forward", "Compute: backward", "Wait", "Predicted")
"""Entries of the legend that everybody needs."""
MAX_BOXES = 500
"""Largest number of boxes of the prediction that are drawn."""
MAX_BOUNDARIES = 24
"""Largest number of phases whose ends are drawn through the lanes."""
EDGE = 0.004
"""Share of the step's length by which the x axis extends beyond both ends of the step."""
GHOST_LOW = 0.48
"""Distance of the lower edge of a box of the prediction below the middle of its row, which is 1
high.
"""
GHOST_HIGH = 0.39
"""Distance of the upper edge below the middle."""


def timeline_figure(
    timeline: StepTimeline | None,
    simulated: PlanSimulated | None = None,
    window: Window | None = None,
) -> Figure:
    """Returns the spans of a step, with one row per lane, in milliseconds from the step's first op.
    Red marks stretches in which COMPUTE waited; the thin gray line under a lane is the prediction.
    The figure is empty if there is no step.

    With a `window`, only the part inside it is drawn, on the same axes. `is_whole` is whether each
    span has a bar of its own; `count` is a text on how many bars represent how many spans.
    """
    every = timeline.spans if timeline is not None else []
    all_waits = timeline.waits if timeline is not None else []
    spans = within(_with_predictions(every, simulated), window)
    lanes = lanes_of(spans, names=lane_names(every))
    batches = batches_of(every)
    data = [lane_bars(lane, own, batches) for lane, own in lanes.items()]
    if all_waits:
        data += wait_bars(within(all_waits, window))
    else:
        length = max((span["end"] for span in every), default=0.0)
        data.append(unknown_waits(gaps_of(lanes[Lane.COMPUTE], length, window)))
    shapes = phase_lines(phases_of(every))
    if every and simulated is not None:
        shapes = _ghost(simulated, list(lanes), window) + shapes
    layout = layout_of([LANE_LABELS[lane] for lane in lanes], every, all_waits, shapes)
    if not every:
        write_empty(layout, "Appears with the first sampled step.")
    bars = sum(map(len, lanes.values()))
    return {
        "data": data,
        "layout": layout,
        "is_whole": bars == len(spans),
        "count": count_text(bars, len(spans), window),
    }


def layout_of(
    rows: Sequence[str],
    spans: Sequence[Span],
    waits: Sequence[Wait],
    shapes: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the layout, with axes that show all spans and waits of a step. `rows` are named from
    top to bottom.
    """
    begin = min((interval["start"] for interval in [*spans, *waits]), default=0.0)
    length = max((span["end"] for span in spans), default=0.0)
    # At least one microsecond, since Plotly would replace a range of length zero by one of its own.
    ends = np.array([begin - EDGE * length, (1 + EDGE) * max(length, 1e-6)])
    from_bottom = list(reversed(rows))  # Plotly counts from the bottom
    return {
        "barmode": "overlay",
        "bargap": 0.2,
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 104, "r": 10, "t": 2, "b": 38},
        "xaxis": {
            "title": {"text": "milliseconds"},
            "zeroline": False,
            "range": rounded(1000 * ends, 6),
        },
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": from_bottom,
            "range": [-0.52, len(rows) - 0.5],
            "fixedrange": True,
            "showgrid": False,
        },
        "shapes": shapes,
    }


def batches_of(spans: Sequence[Span]) -> int:
    """Returns the number of micro-batches of a step."""
    numbers = [span.get("micro_batch") for span in spans]
    return 1 + max((number for number in numbers if number is not None), default=0)


def count_text(bars: int, spans: int, window: Window | None) -> str:
    """Returns how many bars stand for how many spans, or nothing where that is obvious."""
    if bars < spans:
        return f"Showing {bars:,} of {spans:,} spans; zoom in for all."
    if window is None:
        return ""
    return f"Showing all {spans:,} spans of this stretch."


def timeline_phases(timeline: StepTimeline | None) -> list[dict[str, Any]]:
    """Returns `{label, short, color, start, end}` of each phase in order of time; the times are in
    milliseconds.
    """
    if timeline is None:
        return []
    return [
        {
            "label": f"{phase.label}: {duration_text(phase.end - phase.start)}",
            "short": phase.short,
            "color": PHASE_COLORS[phase.name],
            "start": round(1000 * phase.start, 4),
            "end": round(1000 * phase.end, 4),
        }
        for phase in phases_of(timeline.spans)
    ]


def timeline_legend(
    timeline: StepTimeline | None, simulated: PlanSimulated | None = None
) -> list[dict[str, Any]]:
    """Returns entries `{label, color, kind, about, is_main}` for everything that the timeline
    shows; `kind` is op, wait or predicted, and `about` a text on waits. Those that are not main
    are told by the names of their rows, or divide another entry.
    """
    if timeline is None or not timeline.spans:
        return []
    shown = {span["op"] for span in timeline.spans}
    legend = [
        _entry(label, color, "op") for label, (color, ops) in OP_GROUPS.items() if shown & set(ops)
    ]
    for entry in legend:
        if entry["label"] == OPTIMIZER:
            entry["label"] = _optimizer_word(timeline)
    for cause, seconds in _waited(timeline).items():
        color, word, text = WAITS.get(cause, WAITS["other"])
        about = f"Compute waits {duration_text(seconds)} for {text}"
        legend.append(_entry(f"Wait: {word}", color, "wait", about))
    legend.append(_entry("Wait", WAIT_COLOR, "op", _waited_in_all(timeline)))
    if simulated is not None:
        legend.append(_entry("Predicted", GRAY, "predicted"))
    return legend


def _optimizer_word(timeline: StepTimeline) -> str:
    """Returns the name of the lane of the optimizer, or one word for both if it has two."""
    updates = set(OP_GROUPS[OPTIMIZER][1]) - {OpKind.OPTIMIZER_STEP}  # which ends the step
    lanes = {span["lane"] for span in timeline.spans if span["op"] in updates}
    return LANE_LABELS[Lane(lanes.pop())] if len(lanes) == 1 else OPTIMIZER


def timeline_text(timeline: StepTimeline | None) -> str:
    """Returns one sentence for people who cannot or do not want to read the figure."""
    if timeline is None or not timeline.spans:
        return ""
    share = in_share(busy_share(timeline))
    return f"Step {timeline.step:,}: {duration(timeline)} · busy {share}"


def duration(timeline: StepTimeline) -> str:
    """Returns a text on how long a step took; it has spans."""
    return duration_text(max(span["end"] for span in timeline.spans))


def busy_share(timeline: StepTimeline) -> float:
    """Returns the share of the step in which COMPUTE had work."""
    length = max((span["end"] for span in timeline.spans), default=0.0)
    busy = sum(
        span["end"] - span["start"] for span in timeline.spans if span["lane"] == Lane.COMPUTE
    )
    return min(1.0, busy / length) if length > 0 else 0.0


def _entry(label: str, color: str, kind: str, about: str = "") -> dict[str, Any]:
    is_main = label in MAIN_ENTRIES
    return {"label": label, "color": color, "kind": kind, "about": about, "is_main": is_main}


def _waited_in_all(timeline: StepTimeline) -> str:
    seconds = sum(_waited(timeline).values())
    return f"Compute waits {duration_text(seconds)} in all" if seconds else ""


def _waited(timeline: StepTimeline) -> dict[str, float]:
    """Returns the seconds of waiting by cause, longest first."""
    seconds: dict[str, float] = {}
    for wait in timeline.waits:
        cause = wait.get("cause", "other")
        seconds[cause] = seconds.get(cause, 0.0) + wait["end"] - wait["start"]
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def phase_lines(phases: list[Phase]) -> list[dict[str, Any]]:
    """Returns lines through all lanes at each end of a phase that another phase follows."""
    if len(phases) > MAX_BOUNDARIES:
        return []
    line = {"color": GRAY, "width": 1, "dash": "dot"}
    look = {"name": "phase", "layer": "below", "opacity": 0.6}
    starts = rounded(1000 * np.array([phase.start for phase in phases[1:]]), 6)
    return [vertical_line(start, line) | look for start in starts]


# ------------------------------------------------------------------ the prediction


def _with_predictions(spans: Sequence[Span], simulated: PlanSimulated | None) -> Sequence[Span]:
    """Returns each span with the predicted seconds of its op, if the simulated plan is the one that
    ran.
    """
    predicted = simulated.spans if simulated is not None else []
    if [_op(span) for span in spans] != [_op(span) for span in predicted]:
        return spans
    timed: list[TimedSpan] = []
    for span, other in zip(spans, predicted):
        timed.append({**span, "predicted": other["end"] - other["start"]})
    return timed


def _op(span: Span) -> tuple[Any, ...]:
    """Returns the values that identify an op of a plan."""
    return span["op"], span["unit"], span["lane"], span.get("micro_batch")


def _ghost(
    simulated: PlanSimulated, lanes: list[Lane], window: Window | None
) -> list[dict[str, Any]]:
    """Returns the simulated step: one path under the bars of each lane, with a box for each op. A
    single path is drawn far faster than as many shapes.
    """
    shapes = []
    for lane, own in lanes_of(within(simulated.spans, window), MAX_BOXES).items():
        if own and lane in lanes:
            row = len(lanes) - 1 - lanes.index(lane)  # Plotly counts from the bottom
            boxes = [_box(span, row - GHOST_LOW, row - GHOST_HIGH) for span in own]
            shapes.append(
                {
                    "type": "path",
                    "name": "predicted",
                    "path": "".join(boxes),
                    "xref": "x",
                    "yref": "y",
                    "layer": "above",
                    "fillcolor": "rgba(138, 147, 163, 0.45)",
                    "line": {"color": GRAY, "width": 0.75},
                }
            )
    return shapes


def _box(span: Span, low: float, high: float) -> str:
    """Returns a rectangle as an SVG path."""
    start, end = f"{1000 * span['start']:.9g}", f"{1000 * span['end']:.9g}"
    return f"M{start},{low}H{end}V{high}H{start}Z"

"""The curves of a run as plain `{"data": ..., "layout": ...}`: pure functions of a snapshot; no Plotly needed.

`uirevision` is constant, so that a redraw keeps the zoom. x is the step, or milliseconds since the run was started.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from app.drawing import AMBER, BLUE, GREEN, GREY, ORANGE, RED, VIOLET, Figure, rounded, say_empty
from app.view import SMOOTH_STEPS, downsample, smooth
from app.words import GIB, in_share, in_short_time, in_step_time
from engine.plan import COMPUTE
from engine.snapshot import Columns, RunSnapshot

Axis = Literal["step", "time"]

# ------------------------------------------------------------------ curves on the linked axis


def loss_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Loss of each step, its mean over the latest steps, and the loss on held-out rows."""
    steps, evals = snapshot.steps, snapshot.evals
    x, loss = _x(snapshot, steps, axis), np.asarray(steps.loss, dtype=float)
    window = min(SMOOTH_STEPS, max(1, len(loss) // 20))
    data = [
        _curve("each step", *downsample(x, loss), BLUE, opacity=0.35, width=1),
        _curve(f"mean of {window}", *downsample(x, smooth(loss, window)), BLUE, width=2),
        _curve("held out", _x(snapshot, evals, axis), np.asarray(evals.loss, dtype=float), ORANGE, width=2,
               markers=True),
    ]
    return _figure(data, axis, {"yaxis": _y()})


def optimizer_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Learning rate above, gradient norm before clipping below."""
    steps = snapshot.steps
    x = _x(snapshot, steps, axis)
    data = [
        _curve("learning rate", *downsample(x, np.asarray(steps.learning_rate, dtype=float)), GREEN, width=2),
        _curve("gradient norm", *downsample(x, np.asarray(steps.grad_norm, dtype=float)), VIOLET, row=2, width=1.5),
    ]
    rows = _rows("learning rate", "gradient norm")
    rows["yaxis"]["tickformat"] = ".2~e"
    return _figure(data, axis, rows)


def throughput_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Tokens per second above, TFLOPS below; padding and recompute are not counted in either."""
    steps = snapshot.steps
    x = _x(snapshot, steps, axis)
    data = [
        _curve("tokens/s", *downsample(x, np.asarray(steps.tokens_per_second, dtype=float)), BLUE, width=1.5),
        _curve("TFLOPS", *downsample(x, np.asarray(steps.tflops, dtype=float)), AMBER, row=2, width=1.5),
    ]
    rows = _rows("tokens/s", "TFLOPS", from_zero=True)
    rows["yaxis"]["tickformat"] = "~s"
    return _figure(data, axis, rows)


def memory_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """GiB: host above (this process, and what of it is pinned), GPU below where there is one."""
    memory = snapshot.memory
    x = _x(snapshot, memory, axis)

    def column(name: str, label: str, colour: str, row: int = 1, **style: Any) -> dict[str, Any]:
        values = np.asarray(getattr(memory, name), dtype=float) / GIB
        return _curve(label, *downsample(x, values), colour, row=row, **style)

    data = [column("host_rss", "process", BLUE, width=2)]
    if any(memory.host_pinned):
        data.append(column("host_pinned", "pinned", GREEN, width=1.5))
    if not (len(memory) and memory.gpu_total[-1]):
        return _figure(data, axis, {"yaxis": _y("host GiB", from_zero=True)})
    data += [column("gpu_reserved", "reserved", VIOLET, row=2, width=1.5),
             column("gpu_allocated", "allocated", AMBER, row=2, width=2),
             column("gpu_driver", "whole card", GREY, row=2, width=1.5),
             column("gpu_total", "limit", RED, row=2, width=1, dash="dot")]
    return _figure(data, axis, _rows("host GiB", "GPU GiB", from_zero=True))


def _x(snapshot: RunSnapshot, columns: Columns, axis: Axis) -> np.ndarray:
    if axis == "step":
        return np.asarray(columns.step, dtype=float)
    return 1000 * (np.asarray(columns.time, dtype=float) - (snapshot.started_time or 0.0))


def _curve(name: str, x: np.ndarray, y: np.ndarray, colour: str, row: int = 1, width: float = 2, opacity: float = 1.0,
           dash: str = "solid", markers: bool = False) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "lines+markers" if markers else "lines", "name": name, "x": rounded(x, 12),
             "y": rounded(y, 5), "line": {"color": colour, "width": width, "dash": dash}, "opacity": opacity,
             "hovertemplate": "%{y:.5~g}"}
    if markers:
        trace["marker"] = {"size": 6, "color": colour}
    if row == 2:
        trace["yaxis"] = "y2"
    return trace


def _figure(data: list[dict[str, Any]], axis: Axis, axes: dict[str, Any]) -> Figure:
    x = {"title": {"text": "step" if axis == "step" else "time since the start"}, "zeroline": False, "showspikes": True,
         "spikemode": "across", "spikethickness": 1, "spikedash": "solid", "spikesnap": "data"}
    if axis == "time":
        day = 86_400_000
        x |= {"type": "date", "hoverformat": "%H:%M:%S", "tickformat": "%H:%M:%S", "tickformatstops": [
            {"dtickrange": [60_000, day], "value": "%H:%M"}, {"dtickrange": [day, None], "value": "day %-j"}]}
    else:
        x |= {"rangemode": "tozero", "tickformat": ",~r" if _last_x(data) < 1e5 else "~s", "hoverformat": ",d"}
    layout = {"xaxis": x, "uirevision": "kept", "hovermode": "x unified", "showlegend": len(data) > 2,
              "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
              "margin": {"l": 58, "r": 10, "t": 22, "b": 38}} | axes
    if "yaxis2" in layout:
        x["anchor"] = "y2"
    if not any(trace["x"] for trace in data):
        say_empty(layout, "Appears with the first step.")
    return {"data": data, "layout": layout}


def _last_x(data: list[dict[str, Any]]) -> float:
    return max((trace["x"][-1] for trace in data if trace["x"]), default=0.0)


def _rows(upper: str, lower: str, from_zero: bool = False) -> dict[str, Any]:
    """Two y axes, one above the other, on the same x axis."""
    return {"yaxis": _y(upper, from_zero) | {"domain": [0.56, 1.0]}, "yaxis2": _y(lower, from_zero) | {"domain": [0.0, 0.44]}}


def _y(title: str = "", from_zero: bool = False) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 6}, "zeroline": False, "nticks": 5, "exponentformat": "e", "showspikes": False,
            "rangemode": "tozero" if from_zero else "normal"}


# ------------------------------------------------------------------ what the figures say, in words


def summaries(snapshot: RunSnapshot) -> dict[str, str]:
    """One sentence a figure, for those who cannot or will not read the curve."""
    steps, memory, said = snapshot.steps, snapshot.memory, {}
    if len(steps):
        said["loss"] = f"{steps.loss[0]:.3g} at step {steps.step[0]:,}, {steps.loss[-1]:.3g} at step {steps.step[-1]:,}"
        said["optimizer"] = f"norm {min(steps.grad_norm):.2g} to {max(steps.grad_norm):.2g}"
        said["throughput"] = _throughput_words(snapshot)
    if len(memory):
        peaks = f"host {max(memory.host_rss) / GIB:.2f} GiB at most"
        said["memory"] = peaks + (f", GPU {max(memory.gpu_peak) / GIB:.2f} GiB" if memory.gpu_total[-1] else "")
    if snapshot.timeline is not None and snapshot.timeline.spans:
        spans = snapshot.timeline.spans
        length = max(span["end"] for span in spans)
        busy = sum(span["end"] - span["start"] for span in spans if span["lane"] == COMPUTE)
        said["timeline"] = (f"step {snapshot.timeline.step:,}, {in_short_time(length)}, "
                            f"compute busy {in_share(min(1.0, busy / length) if length else 0.0)}")
    return said


def _throughput_words(snapshot: RunSnapshot) -> str:
    """What was measured, beside what the plan's simulation had predicted where it had rates to go by."""
    rate = f"{float(np.median(snapshot.steps.tokens_per_second)):,.0f} tokens/s in the median step"
    predicted = snapshot.plan_choices.get("predicted_seconds")
    if not predicted:
        return rate
    seconds = float(np.median(snapshot.steps.seconds))
    return f"{rate}; a step takes {in_step_time(seconds)}, {in_step_time(predicted)} were predicted"


FIGURES = {"loss": loss_figure, "optimizer": optimizer_figure, "throughput": throughput_figure, "memory": memory_figure}
"""Figures on the linked axis by the name of their place on the page."""

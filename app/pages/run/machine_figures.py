"""Figures of how a run uses the machine: speed, the parts of a step's time, memory, power and
energy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from app.labels import GIB
from app.pages.run.memory_line import MARGIN
from app.pages.run.step_time import PARTS
from app.shared.charts.axes import (
    LIMIT_SHARE,
    THOUSANDS,
    Axis,
    Line,
    curve,
    figure,
    level,
    one_row,
    places,
    two_rows,
)
from app.shared.charts.curve_points import downsample
from app.shared.charts.drawing import (
    AMBER,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    RED,
    VIOLET,
    Figure,
    rounded,
)
from app.verdict.step_shares import step_parts
from engine.runs.record.snapshot import RunSnapshot

AREA_POINTS = 300
"""Largest number of points of a stacked area. Each is the mean of a stretch, since areas must add
up.
"""
SLOWEST_DRAWN = 1.5
"""Multiple of the slow steps (95th percentile) at which the axis of step times ends. Otherwise a
first step that compiles would compress all others into a flat line.
"""


def throughput_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns tokens per second above and TFLOPS below, with the measured ceiling. Neither counts
    padding or recomputation.
    """
    steps = snapshot.steps
    x = places(snapshot, steps, axis)
    rates = np.asarray(steps.tokens_per_second, dtype=float)
    tflops = np.asarray(steps.tflops, dtype=float)
    data = [
        curve("tokens/s", *downsample(x, rates), Line(BLUE, width=1.5))
        | {"hovertemplate": THOUSANDS},
        curve("TFLOPS", *downsample(x, tflops), Line(AMBER, row=2, width=1.5)),
    ]
    ceiling = snapshot.peak_tflops
    if len(tflops) and 0 < LIMIT_SHARE * ceiling <= tflops.max():
        data.append(level("ceiling", x, ceiling, RED, row=2))
    rows = two_rows("tokens/s", "TFLOPS", from_zero=True)
    rows["yaxis"]["tickformat"] = "~s"
    return figure(data, axis, rows)


def tflops_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the share of the device's measured peak that is reached, for a small place; TFLOPS
    where no peak was measured.
    """
    steps = snapshot.steps
    x = places(snapshot, steps, axis)
    tflops = np.asarray(steps.tflops, dtype=float)
    ceiling = snapshot.peak_tflops
    name, values = ("of the top speed", 100 * tflops / ceiling) if ceiling else ("TFLOPS", tflops)
    data = [curve(name, *downsample(x, values), Line(AMBER, width=1.5))]
    y = one_row(from_zero=True) | {"nticks": 3}
    if ceiling:
        y |= {"ticksuffix": " %", "range": [0, 100], "autorange": False}
    drawn = figure(data, axis, {"yaxis": y})
    drawn["layout"] |= {"margin": MARGIN}
    drawn["layout"]["xaxis"]["title"] = {"text": ""}
    return drawn


def step_time_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the seconds of each step, stacked: compute, and above it the causes for which compute
    waited.
    """
    x = places(snapshot, snapshot.steps, axis)
    size = max(1, math.ceil(len(x) / AREA_POINTS))
    ends = rounded(_lasts(x, size), 12)
    data = []
    for name, values in step_parts(snapshot.steps).items():
        label, color = PARTS[name]
        if name != "compute" and not values.any():
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "x": ends,
                "stackgroup": "step",
                "y": rounded(_means(values, size), 4),
                "line": {"width": 0, "color": color},
                "fillcolor": color,
                "hovertemplate": "%{y:.3~g} s",
            }
        )
    y = one_row("seconds a step", from_zero=True)
    seconds = np.asarray(snapshot.steps.seconds, dtype=float)
    if len(seconds):
        top = SLOWEST_DRAWN * float(np.percentile(seconds, 95))
        if seconds.max() > top:
            y |= {"range": [0, float(f"{top:.3g}")], "autorange": False}
    drawn = figure(data, axis, {"yaxis": y})
    drawn["layout"]["showlegend"] = len(data) > 1
    return drawn


def _lasts(values: np.ndarray, size: int) -> np.ndarray:
    """Returns the last of each `size` of values[n]; the last stretch may be shorter."""
    ends = np.minimum(np.arange(0, len(values), size) + size, len(values))
    return values[ends - 1]


def _means(values: np.ndarray, size: int) -> np.ndarray:
    """Returns the mean of each `size` of values[n]; the last stretch may be shorter."""
    if not len(values):
        return values
    starts = np.arange(0, len(values), size)
    ends = np.minimum(starts + size, len(values))
    return np.add.reduceat(values, starts) / (ends - starts)


def memory_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns memory in GiB, each kind with its limit. The upper row shows the host (the process,
    or the processes of all ranks, and the pinned part), the lower row the GPU of rank 0, if there
    is one. The legend has what is in use and the limits.
    """
    memory = snapshot.memory
    x = places(snapshot, memory, axis)

    def column(name: str, label: str, line: Line) -> dict[str, Any]:
        values = np.asarray(getattr(memory, name), dtype=float) / GIB
        return curve(label, *downsample(x, values), line)

    data = [column("host_rss", "RAM in use", Line(BLUE))]
    if any(memory.host_pinned):
        data.append(_detail(column("host_pinned", "RAM pinned", Line(GREEN, width=1.5))))
    if len(memory) and 0 < LIMIT_SHARE * memory.host_total[-1] <= np.max(memory.host_rss):
        data.append(level("RAM limit", x, memory.host_total[-1] / GIB, RED))
    has_gpu = len(memory) and memory.gpu_total[-1]
    if not has_gpu:
        return figure(data, axis, {"yaxis": one_row("RAM GiB", from_zero=True)})
    details = [
        column("gpu_reserved", "GPU reserved", Line(VIOLET, row=2, width=1.5)),
        column("gpu_allocated", "GPU allocated", Line(AMBER, row=2, width=1.5)),
        column("gpu_driver", "GPU with other programs", Line(GRAY, row=2, width=1.5)),
    ]
    data += [
        column("gpu_peak", "GPU peak", Line(PINK, row=2)),
        *(_detail(trace) for trace in details),
        level("GPU limit", x, memory.gpu_total[-1] / GIB, RED, row=2),
    ]
    gpu = "GPU 0 GiB" if snapshot.ranks else "GPU GiB"
    return figure(data, axis, two_rows("RAM GiB", gpu, from_zero=True))


def _detail(trace: dict[str, Any]) -> dict[str, Any]:
    """Returns a curve that the tooltip names, so that the legend has what everybody needs."""
    return trace | {"opacity": 0.6, "showlegend": False}


def power_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns the card's power in watts above and its energy so far in watt hours below. The figure
    `is_absent` if the driver reports neither.
    """
    memory = snapshot.memory
    if not any(memory.power):
        axes = {"yaxis": one_row("W", from_zero=True)}
        return figure([], axis, axes, "The driver does not tell.") | {"is_absent": True}
    x = places(snapshot, memory, axis)
    power = downsample(x, np.asarray(memory.power, dtype=float))
    energy = downsample(x, np.asarray(memory.energy, dtype=float))
    data = [
        curve("W", *power, Line(ORANGE, width=1.5)),
        curve("Wh so far", *energy, Line(GREEN, row=2)),
    ]
    return figure(data, axis, two_rows("W", "Wh so far", from_zero=True))

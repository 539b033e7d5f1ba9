"""What a run asks of the machine: throughput, where a step's time goes, memory, power and energy."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.view.axes import LIMIT_SHARE, Axis, curve, figure, level, one_row, places, two_rows
from app.view.curve_points import downsample
from app.view.drawing import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, RED, VIOLET, Figure, rounded
from app.view.step_time import PARTS, step_parts
from app.words import GIB
from engine.runs.snapshot import RunSnapshot

AREA_POINTS = 300
"""Of a stacked area, at most: each is the mean of a stretch, since areas must add up."""
SLOWEST_DRAWN = 1.5
"""Times the slow steps (95th percentile), up to which the axis of step times goes: a first step
that compiles would press the others flat.
"""


def throughput_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Tokens per second above, TFLOPS below with the measured ceiling; padding and recompute are
    not counted in either.
    """
    steps = snapshot.steps
    x, tflops = places(snapshot, steps, axis), np.asarray(steps.tflops, dtype=float)
    data = [
        curve(
            "tokens/s",
            *downsample(x, np.asarray(steps.tokens_per_second, dtype=float)),
            BLUE,
            width=1.5,
        ),
        curve("TFLOPS", *downsample(x, tflops), AMBER, row=2, width=1.5),
    ]
    ceiling = snapshot.ceiling_tflops
    if len(tflops) and 0 < LIMIT_SHARE * ceiling <= tflops.max():
        data.append(level("ceiling", x, ceiling, RED, row=2))
    rows = two_rows("tokens/s", "TFLOPS", from_zero=True)
    rows["yaxis"]["tickformat"] = "~s"
    return figure(data, axis, rows)


def step_time_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Seconds of a step, stacked: compute, and above it what compute waited for."""
    x, parts = places(snapshot, snapshot.steps, axis), step_parts(snapshot.steps)
    seconds = np.asarray(snapshot.steps.seconds, dtype=float)
    size = max(1, -(-len(x) // AREA_POINTS))
    ends = _thinned(x, size, last=True)
    data = []
    for name, values in parts.items():
        label, colour = PARTS[name]
        if name != "compute" and not values.any():
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "x": rounded(ends, 12),
                "stackgroup": "step",
                "y": rounded(_thinned(values, size), 4),
                "line": {"width": 0, "color": colour},
                "fillcolor": colour,
                "hovertemplate": "%{y:.3~g} s",
            }
        )
    axes = {"yaxis": one_row("seconds a step", from_zero=True)}
    if len(seconds) and seconds.max() > (top := SLOWEST_DRAWN * float(np.percentile(seconds, 95))):
        axes["yaxis"] |= {"range": [0, float(f"{top:.3g}")], "autorange": False}
    drawn = figure(data, axis, axes)
    drawn["layout"]["showlegend"] = len(data) > 1
    return drawn


def _thinned(values: np.ndarray, size: int, last: bool = False) -> np.ndarray:
    """The mean, or the last, of each `size` values; the last ones may be fewer."""
    starts = np.arange(0, len(values), size)
    ends = np.minimum(starts + size, len(values))
    if last or not len(values):
        return values[ends - 1] if len(values) else values
    return np.add.reduceat(values, starts) / (ends - starts)


def memory_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """GiB: host above (this process, and what of it is pinned), GPU below where there is one, each
    with its limit.
    """
    memory = snapshot.memory
    x = places(snapshot, memory, axis)

    def column(name: str, label: str, colour: str, row: int = 1, **style: Any) -> dict[str, Any]:
        values = np.asarray(getattr(memory, name), dtype=float) / GIB
        return curve(label, *downsample(x, values), colour, row=row, **style)

    data = [column("host_rss", "process", BLUE, width=2)]
    if any(memory.host_pinned):
        data.append(column("host_pinned", "pinned", GREEN, width=1.5))
    if len(memory) and 0 < LIMIT_SHARE * memory.host_total[-1] <= np.max(memory.host_rss):
        data.append(level("host limit", x, memory.host_total[-1] / GIB, RED))
    if not (len(memory) and memory.gpu_total[-1]):
        return figure(data, axis, {"yaxis": one_row("host GiB", from_zero=True)})
    data += [
        column("gpu_reserved", "reserved", VIOLET, row=2, width=1.5),
        column("gpu_allocated", "allocated", AMBER, row=2, width=2),
        column("gpu_peak", "peak", PINK, row=2, width=1.2, dash="dash"),
        column("gpu_driver", "whole card", GREY, row=2, width=1.5),
        level("GPU limit", x, memory.gpu_total[-1] / GIB, RED, row=2),
    ]
    return figure(data, axis, two_rows("host GiB", "GPU GiB", from_zero=True))


def power_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """The card's watts above, its watt hours so far below; `is_absent` where no driver tells."""
    memory = snapshot.memory
    if not any(memory.power):
        return figure(
            [], axis, {"yaxis": one_row("W", from_zero=True)}, "The driver does not tell."
        ) | {"is_absent": True}
    x = places(snapshot, memory, axis)
    data = [
        curve("W", *downsample(x, np.asarray(memory.power, dtype=float)), ORANGE, width=1.5),
        curve(
            "Wh so far",
            *downsample(x, np.asarray(memory.energy, dtype=float)),
            GREEN,
            row=2,
            width=2,
        ),
    ]
    return figure(data, axis, two_rows("W", "Wh so far", from_zero=True))

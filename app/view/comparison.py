"""Runs are compared here side by side, as plain data: curves on shared axes, their key figures, and
the settings in which they differ.

All functions are pure and take `Compared` values. Names are plain text; they are escaped before
they go to Plotly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from app.view.axes import x_ticks
from app.view.curve_points import downsample, smooth, smoothing_window
from app.view.drawing import (
    AMBER,
    BLUE,
    GREEN,
    PINK,
    TEAL,
    VIOLET,
    Figure,
    escaped,
    rounded,
    say_empty,
)
from app.words import (
    GIB,
    STATE_TONES,
    STATE_WORDS,
    in_bytes,
    in_count,
    in_digits,
    in_step_time,
    in_time,
)
from engine.runs.event_tables import EventTable
from engine.runs.snapshot import RunSnapshot

COLOURS = (BLUE, AMBER, GREEN, VIOLET, PINK, TEAL)
CURVE_POINTS = 500
NAME_SHOWN = 48
"""The label of a curve shows this many characters of a run's name; the table next to it shows the
whole name.
"""
NOTHING_YET = "None of these runs has made a step yet."

Axis = Literal["step", "time"]


@dataclass(frozen=True)
class Compared:
    """A `Compared` is one of the runs that are compared."""

    id: str
    name: str
    state: str
    snapshot: RunSnapshot
    settings: dict[str, Any]
    """These are the settings by dotted name. They are empty if the configuration cannot be read."""


def comparison(runs: Sequence[Compared], axis: Axis) -> dict[str, Any]:
    """Returns the `runs` (id, name, colour, state), `figures` by name, a sentence on each figure
    (`said`), `rows` of key figures, and the `settings` that differ, as text.
    """
    names = labels(runs)
    rows = key_figures(runs)
    shown = [
        {
            "id": run.id,
            "name": name,
            "colour": colour,
            "word": STATE_WORDS[run.state],
            "tone": STATE_TONES[run.state],
        }
        for run, name, colour in zip(runs, names, COLOURS)
    ]
    return {
        "runs": shown,
        "figures": {name: build(runs, names, axis) for name, build in FIGURES.items()},
        "said": summaries(names, rows),
        "rows": rows,
        "settings": differing_settings(runs),
        "unread": [name for run, name in zip(runs, names) if not run.settings],
        "going_on": any(STATE_TONES[run.state] == "busy" for run in runs),
    }


def labels(runs: Sequence[Compared]) -> list[str]:
    """Returns a name for each run, with the run's id if two runs have the same name."""
    names = [run.name for run in runs]
    labelled = []
    for run in runs:
        is_shared = names.count(run.name) > 1
        labelled.append(f"{run.name} ({run.id})" if is_shared else run.name)
    return labelled


# ------------------------------------------------------------------ key figures


@dataclass(frozen=True)
class KeyFigure:
    """A `KeyFigure` is one number by which runs are compared."""

    name: str
    read: Callable[[RunSnapshot], float | None]
    """This returns the run's number, or None if it is not known."""
    words: Callable[[float], str]
    better: Literal["least", "most", ""]
    """This says which number is best, the least or the greatest; if it is empty, neither is.
    """

    def row(self, runs: Sequence[Compared]) -> dict[str, Any]:
        """Returns the name, a text for each run, and the columns with the best value. Values with
        the same text are equally good; if all are equal, none is best.
        """
        values = [self.read(run.snapshot) for run in runs]
        texts = ["–"] * len(values)
        known: list[float] = []
        for index, value in enumerate(values):
            if value is not None:
                texts[index] = self.words(value)
                known.append(value)
        best: list[int] = []
        if self.better and len(known) > 1 and len(set(texts)) > 1:
            winner = min(known) if self.better == "least" else max(known)
            wanted = texts[values.index(winner)]
            best = [index for index, text in enumerate(texts) if text == wanted]
        return {"name": self.name, "texts": texts, "best": best}


def key_figures(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """Returns one row for each key figure."""
    return [figure.row(runs) for figure in KEY_FIGURES]


def _last(values: Sequence[float]) -> float | None:
    return float(values[-1]) if len(values) else None


def _least(values: Sequence[float]) -> float | None:
    return float(min(values)) if len(values) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _most(values: Sequence[float]) -> float | None:
    """Returns the greatest value, or None if nothing was measured, which records mark with 0."""
    return float(max(values)) if len(values) and max(values) else None


def _final_loss(snapshot: RunSnapshot) -> float | None:
    loss = snapshot.steps.loss
    return float(np.mean(loss[-smoothing_window(len(loss)) :])) if len(loss) else None


def _tokens(snapshot: RunSnapshot) -> float | None:
    """Returns the number of tokens trained on, or None for a run too long to keep every step."""
    steps = snapshot.steps
    return float(sum(steps.tokens)) if steps.count == len(steps) else None


FINAL_LOSS = "Final loss (mean of the last steps)"
HELD_OUT = "Held-out loss, last"
THROUGHPUT = "Tokens per second (median)"
HOST_MEMORY = "Host memory, peak"
GPU_MEMORY = "GPU memory, peak"
KEY_FIGURES = (
    KeyFigure("Steps", lambda run: float(run.step), lambda value: f"{value:,.0f}", ""),
    KeyFigure(FINAL_LOSS, _final_loss, in_digits, "least"),
    KeyFigure(HELD_OUT, lambda run: _last(run.evals.loss), in_digits, "least"),
    KeyFigure("Held-out loss, lowest", lambda run: _least(run.evals.loss), in_digits, "least"),
    KeyFigure(THROUGHPUT, lambda run: _median(run.steps.tokens_per_second), in_count, "most"),
    KeyFigure(
        "Time of a step (median)", lambda run: _median(run.steps.seconds), in_step_time, "least"
    ),
    KeyFigure("TFLOPS (median)", lambda run: _median(run.steps.tflops), in_digits, "most"),
    KeyFigure(HOST_MEMORY, lambda run: _most(run.memory.host_rss), in_bytes, "least"),
    KeyFigure(GPU_MEMORY, lambda run: _most(run.memory.gpu_peak), in_bytes, "least"),
    KeyFigure("Tokens trained on", _tokens, in_count, ""),
    KeyFigure("Time at work", lambda run: run.seconds, in_time, ""),
)
SUMMARISED = {
    "loss": (FINAL_LOSS, HELD_OUT),
    "throughput": (THROUGHPUT,),
    "memory": (HOST_MEMORY, GPU_MEMORY),
}
"""These key figures describe the content of each figure."""


def summaries(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns a description of each figure, for people who cannot or do not want to read the
    curves.
    """
    texts = {row["name"]: row["texts"] for row in rows}
    said = {}
    for figure, wanted in SUMMARISED.items():
        sentences = [
            _key_figure_words(name, names, texts[name])
            for name in wanted
            if set(texts[name]) != {"–"}
        ]
        said[figure] = " ".join(sentences) or NOTHING_YET
    return said


def _key_figure_words(name: str, runs: Sequence[str], texts: Sequence[str]) -> str:
    told = [f"{run} {text}" for run, text in zip(runs, texts)]
    return f"{name}: {', '.join(told)}."


# ------------------------------------------------------------------ settings


def differing_settings(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """Returns a row for each setting in which runs with a readable configuration differ: its dotted
    name, and a text for each run (an en dash if its configuration cannot be read). The name of a
    run is not compared.
    """
    known = [run.settings for run in runs if run.settings]
    names: dict[str, None] = {}  # keys in the order in which they were first seen
    for settings in known:
        names |= dict.fromkeys(settings)
    names.pop("name", None)
    rows = []
    for name in names:
        is_shared = len({_setting(settings, name) for settings in known}) == 1
        texts = [_setting(run.settings, name) for run in runs]
        if not is_shared:
            rows.append({"name": name, "texts": texts})
    return rows


def _setting(settings: dict[str, Any], name: str) -> str:
    """Returns the value of a setting as a preset writes it."""
    if name not in settings:
        return "–"
    value = settings[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------ curves


def loss_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns each run's smoothed loss as a curve, and its held-out loss as points."""
    data = []
    for run, name, colour in zip(runs, names, COLOURS):
        steps, evals = run.snapshot.steps, run.snapshot.evals
        x, loss = _x(run, steps, axis), _smoothed(steps.loss)
        data.append(_curve(name, x, loss, colour))
        if len(evals):
            held_out = np.asarray(evals.loss, dtype=float)
            points = _trace(f"{name}, held out", _x(run, evals, axis), held_out, colour, "dot")
            marks = {"mode": "lines+markers", "marker": {"size": 6, "color": colour}}
            data.append(points | marks)
    return _figure(data, axis, {"yaxis": _y("loss")})


def throughput_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns a smoothed curve of each run's tokens per second."""
    data = []
    for run, name, colour in zip(runs, names, COLOURS):
        steps = run.snapshot.steps
        x, rates = _x(run, steps, axis), _smoothed(steps.tokens_per_second)
        data.append(_curve(name, x, rates, colour))
    y = _y("tokens/s") | {"rangemode": "tozero", "tickformat": "~s"}
    return _figure(data, axis, {"yaxis": y})


def memory_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Returns the host memory of each run in GiB and, in a lower row, the GPU memory of runs that
    used a GPU.
    """
    data = []
    has_gpu = False
    for run, name, colour in zip(runs, names, COLOURS):
        memory = run.snapshot.memory
        x = _x(run, memory, axis)
        host = np.asarray(memory.host_rss, dtype=float) / GIB
        data.append(_curve(name, x, host, colour))
        if _most(memory.gpu_total):
            has_gpu = True
            gpu = np.asarray(memory.gpu_allocated, dtype=float) / GIB
            data.append(_curve(name, x, gpu, colour) | {"yaxis": "y2"})
    axes = {"yaxis": _y("host GiB") | {"rangemode": "tozero"}}
    if has_gpu:
        axes["yaxis"]["domain"] = [0.56, 1.0]
        axes["yaxis2"] = _y("GPU GiB") | {"rangemode": "tozero", "domain": [0.0, 0.44]}
    return _figure(data, axis, axes)


FIGURES = {"loss": loss_figure, "throughput": throughput_figure, "memory": memory_figure}


def _smoothed(column: Sequence[float]) -> np.ndarray:
    """Returns the smoothed values[steps] of a column."""
    values = np.asarray(column, dtype=float)
    return smooth(values, smoothing_window(len(values)))


def _x(run: Compared, table: EventTable, axis: Axis) -> np.ndarray:
    """Returns x[rows]: the steps of a table, or milliseconds since the run was started."""
    if axis == "step":
        return np.asarray(table.step, dtype=float)
    return 1000 * (np.asarray(table.time, dtype=float) - (run.snapshot.started_time or 0.0))


def _curve(name: str, x: np.ndarray, y: np.ndarray, colour: str) -> dict[str, Any]:
    """Returns a curve x[n], y[n], thinned to few enough points to draw."""
    return _trace(name, *downsample(x, y, CURVE_POINTS), colour, "solid")


def _trace(name: str, x: np.ndarray, y: np.ndarray, colour: str, dash: str) -> dict[str, Any]:
    is_long = len(name) > NAME_SHOWN
    shown = f"{name[: NAME_SHOWN - 1]}…" if is_long else name
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escaped(shown),
        "x": rounded(x, 12),
        "y": rounded(y, 5),
        "line": {"color": colour, "width": 2, "dash": dash},
        "hovertemplate": "%{y:.5~g}",
    }


def _figure(data: list[dict[str, Any]], axis: Axis, axes: dict[str, Any]) -> Figure:
    """Returns a figure of traces on the shared axis; `axes` are the y axes."""
    title = "step" if axis == "step" else "time since the start"
    x = {"title": {"text": title}, "zeroline": False} | x_ticks(axis, data)
    if "yaxis2" in axes:
        x["anchor"] = "y2"
    layout = {
        "xaxis": x,
        "uirevision": "kept",
        "hovermode": "x unified",
        "showlegend": False,
        "margin": {"l": 58, "r": 10, "t": 12, "b": 38},
    } | axes
    if not any(trace["x"] for trace in data):
        say_empty(layout, NOTHING_YET)
    return {"data": data, "layout": layout}


def _y(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 6},
        "zeroline": False,
        "nticks": 5,
        "exponentformat": "e",
    }

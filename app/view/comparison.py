"""Several runs side by side, as plain data: curves on shared axes, their key figures, and the
settings in which they differ.

Pure functions of `Compared` values; names are text, which Plotly gets escaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from app.view.curve_points import SMOOTH_STEPS, downsample, smooth
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
from engine.runs.snapshot import RunSnapshot

COLOURS = (BLUE, AMBER, GREEN, VIOLET, PINK, TEAL)
CURVE_POINTS = 500
NAME_SHOWN = 48

Axis = Literal["step", "time"]


@dataclass(frozen=True)
class Compared:
    """A run under comparison: `settings` by dotted name, empty where its configuration cannot be
    read.
    """

    id: str
    name: str
    state: str
    snapshot: RunSnapshot
    settings: dict[str, Any]


def comparison(runs: Sequence[Compared], axis: Axis) -> dict[str, Any]:
    """`runs` (id, name, colour, state), `figures` by name, what each says (`said`), `rows` of key
    figures and `settings` that differ, as text.
    """
    names, rows = labels(runs), key_figures(runs)
    return {
        "runs": [
            {
                "id": run.id,
                "name": name,
                "colour": colour,
                "word": STATE_WORDS[run.state],
                "tone": STATE_TONES[run.state],
            }
            for run, name, colour in zip(runs, names, COLOURS)
        ],
        "figures": {name: build(runs, names, axis) for name, build in FIGURES.items()},
        "said": summaries(names, rows),
        "rows": rows,
        "settings": differing_settings(runs),
        "unread": [name for run, name in zip(runs, names) if not run.settings],
        "going_on": any(STATE_TONES[run.state] == "busy" for run in runs),
    }


def labels(runs: Sequence[Compared]) -> list[str]:
    """A name for each run, with its id where two have the same."""
    names = [run.name for run in runs]
    return [
        f"{name} ({run.id})" if names.count(name) > 1 else name for run, name in zip(runs, names)
    ]


def key_figures(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """A row for each figure: its name, a text for each run, and in which columns the best value
    stands (none where all are alike).
    """
    return [
        _figure_row(name, [read(run.snapshot) for run in runs], words, better)
        for name, read, words, better in KEY_FIGURES
    ]


def _figure_row(
    name: str, values: list[float | None], words: Callable[[float], str], better: str
) -> dict[str, Any]:
    texts = ["–" if value is None else words(value) for value in values]
    known = [value for value in values if value is not None]
    best: list[int] = []
    if better and len(known) > 1 and len(set(texts)) > 1:
        wanted = texts[values.index(min(known) if better == "least" else max(known))]
        best = [index for index, text in enumerate(texts) if text == wanted]
    return {"name": name, "texts": texts, "best": best}


def _last(values: Sequence[float]) -> float | None:
    return float(values[-1]) if len(values) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _most(values: Sequence[float]) -> float | None:
    return float(max(values)) if len(values) and max(values) else None


def _final_loss(snapshot: RunSnapshot) -> float | None:
    loss = snapshot.steps.loss
    return float(np.mean(loss[-_window(len(loss)) :])) if len(loss) else None


KEY_FIGURES: tuple[
    tuple[str, Callable[[RunSnapshot], float | None], Callable[[float], str], str], ...
] = (
    ("Steps", lambda s: float(s.step), lambda value: f"{value:,.0f}", ""),
    ("Final loss (mean of the last steps)", _final_loss, in_digits, "least"),
    ("Held-out loss, last", lambda s: _last(s.evals.loss), in_digits, "least"),
    (
        "Held-out loss, lowest",
        lambda s: float(min(s.evals.loss)) if len(s.evals) else None,
        in_digits,
        "least",
    ),
    ("Tokens per second (median)", lambda s: _median(s.steps.tokens_per_second), in_count, "most"),
    ("Time of a step (median)", lambda s: _median(s.steps.seconds), in_step_time, "least"),
    ("TFLOPS (median)", lambda s: _median(s.steps.tflops), in_digits, "most"),
    ("Host memory, peak", lambda s: _most(s.memory.host_rss), in_bytes, "least"),
    ("GPU memory, peak", lambda s: _most(s.memory.gpu_peak), in_bytes, "least"),
    (
        "Tokens trained on",
        lambda s: float(sum(s.steps.tokens)) if s.steps.count == len(s.steps) else None,
        in_count,
        "",
    ),
    ("Time at work", lambda s: s.seconds, in_time, ""),
)
"""Name, value of a run, its words, and which value is the better one."""


def differing_settings(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """A row for each dotted setting in which runs with a readable configuration differ: its name,
    and a text for each run (an en dash where the configuration cannot be read). The name of a run
    is no setting that matters.
    """
    known = [run.settings for run in runs if run.settings]
    names = list(dict.fromkeys(name for settings in known for name in settings if name != "name"))
    rows = []
    for name in names:
        texts = [_setting(run.settings, name) for run in runs]
        if len({_setting(settings, name) for settings in known}) > 1:
            rows.append({"name": name, "texts": texts})
    return rows


def _setting(settings: dict[str, Any], name: str) -> str:
    """As a preset has it."""
    if name not in settings:
        return "–"
    value = settings[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


SUMMARISED = {
    "loss": ("Final loss (mean of the last steps)", "Held-out loss, last"),
    "throughput": ("Tokens per second (median)",),
    "memory": ("Host memory, peak", "GPU memory, peak"),
}
"""Rows of key figures that say what a figure shows."""


def summaries(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of each figure, in words for those who cannot or will not read the curves."""
    texts = {row["name"]: row["texts"] for row in rows}

    def said(name: str) -> str:
        return f"{name}: {', '.join(f'{run} {text}' for run, text in zip(names, texts[name]))}."

    told = {
        figure: " ".join(said(name) for name in wanted if set(texts[name]) != {"–"})
        for figure, wanted in SUMMARISED.items()
    }
    return {
        figure: text or "None of these runs has made a step yet." for figure, text in told.items()
    }


# ------------------------------------------------------------------ curves


def loss_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Each run's loss, smoothed, and its held-out loss as points."""
    data = []
    for run, name, colour in zip(runs, names, COLOURS):
        steps, evals = run.snapshot.steps, run.snapshot.evals
        loss = np.asarray(steps.loss, dtype=float)
        data.append(
            _curve(
                name,
                *downsample(_x(run, steps, axis), smooth(loss, _window(len(loss))), CURVE_POINTS),
                colour,
            )
        )
        if len(evals):
            held = _curve(
                f"{name}, held out",
                _x(run, evals, axis),
                np.asarray(evals.loss, dtype=float),
                colour,
                dash="dot",
            )
            data.append(held | {"mode": "lines+markers", "marker": {"size": 6, "color": colour}})
    return _figure(data, axis, {"yaxis": _y("loss")})


def throughput_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """Each run's tokens per second, smoothed."""
    data = []
    for run, name, colour in zip(runs, names, COLOURS):
        rates = np.asarray(run.snapshot.steps.tokens_per_second, dtype=float)
        x = _x(run, run.snapshot.steps, axis)
        data.append(
            _curve(name, *downsample(x, smooth(rates, _window(len(rates))), CURVE_POINTS), colour)
        )
    return _figure(
        data, axis, {"yaxis": _y("tokens/s") | {"rangemode": "tozero", "tickformat": "~s"}}
    )


def memory_figure(runs: Sequence[Compared], names: Sequence[str], axis: Axis) -> Figure:
    """GiB of host memory, and of GPU memory below where a run had a GPU."""
    data, on_gpu = [], any(_most(run.snapshot.memory.gpu_total) for run in runs)
    for run, name, colour in zip(runs, names, COLOURS):
        memory = run.snapshot.memory
        x = _x(run, memory, axis)
        data.append(
            _curve(
                name,
                *downsample(x, np.asarray(memory.host_rss, dtype=float) / GIB, CURVE_POINTS),
                colour,
            )
        )
        if on_gpu and _most(memory.gpu_total):
            used = np.asarray(memory.gpu_allocated, dtype=float) / GIB
            data.append(_curve(name, *downsample(x, used, CURVE_POINTS), colour) | {"yaxis": "y2"})
    axes = {"yaxis": _y("host GiB") | {"rangemode": "tozero"}}
    if on_gpu:
        axes["yaxis"]["domain"] = [0.56, 1.0]
        axes["yaxis2"] = _y("GPU GiB") | {"rangemode": "tozero", "domain": [0.0, 0.44]}
    return _figure(data, axis, axes)


FIGURES = {"loss": loss_figure, "throughput": throughput_figure, "memory": memory_figure}


def _window(length: int) -> int:
    """Steps of a mean, as in the Live tab."""
    return min(SMOOTH_STEPS, max(1, length // 20))


def _x(run: Compared, columns: Any, axis: Axis) -> np.ndarray:
    if axis == "step":
        return np.asarray(columns.step, dtype=float)
    return 1000 * (np.asarray(columns.time, dtype=float) - (run.snapshot.started_time or 0.0))


def _curve(
    name: str, x: np.ndarray, y: np.ndarray, colour: str, dash: str = "solid"
) -> dict[str, Any]:
    shown = name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 1]}…"
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
    x = {"title": {"text": "step" if axis == "step" else "time since the start"}, "zeroline": False}
    if axis == "time":
        x |= {
            "type": "date",
            "hoverformat": "%H:%M:%S",
            "tickformat": "%H:%M:%S",
            "tickformatstops": [
                {"dtickrange": [60_000, 86_400_000], "value": "%H:%M"},
                {"dtickrange": [86_400_000, None], "value": "day %-j"},
            ],
        }
    else:
        x |= {
            "rangemode": "tozero",
            "tickformat": ",~r" if _last_x(data) < 1e5 else "~s",
            "hoverformat": ",d",
        }
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
        say_empty(layout, "None of these runs has made a step yet.")
    return {"data": data, "layout": layout}


def _last_x(data: list[dict[str, Any]]) -> float:
    return max((trace["x"][-1] for trace in data if trace["x"]), default=0.0)


def _y(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 6},
        "zeroline": False,
        "nticks": 5,
        "exponentformat": "e",
    }

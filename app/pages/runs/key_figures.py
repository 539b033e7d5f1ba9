"""Numbers by which runs are compared. All functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from app.labels import (
    in_bytes,
    in_count,
    in_digits,
    in_flops,
    in_loss,
    in_share,
    in_step_time,
    in_time,
)
from app.shared.charts.curve_points import smoothing_window
from engine.runs.record.before_training import worse_than_before
from engine.runs.record.events import ExactMatchMeasured
from engine.runs.record.snapshot import RunSnapshot

MARGIN, LOSS_MARGIN = 0.02, 0.01
"""Share by which two speeds or sizes, and two losses or shares of answers, differ by more than
chance.
"""
SAME_SIZE = 1.1
"""Ratio of the tokens of two runs' median steps above which their steps are of other sizes."""
NOTHING_YET = "None of these runs has made a step yet."


@dataclass(frozen=True)
class KeyFigure:
    """One number by which runs are compared."""

    name: str
    read: Callable[[RunSnapshot], float | None]
    """Returns the run's number, or None if it is not known."""
    as_text: Callable[[float], str]
    better: Literal["least", "most", ""]
    """Which number is best, the least or the greatest; empty if neither is."""
    is_of_data: bool = False
    """Whether the number depends on the rows of training or validation, so that no run is the best
    of runs on different data.
    """
    margin: float = MARGIN
    """Share by which the best number must differ from all others: less is chance."""
    least_margin: Callable[[RunSnapshot], float] = lambda _run: 0.0
    """Returns a difference from this run's number that is chance, whatever its share is."""
    is_of_step: bool = False
    """Whether the number belongs to a step, so that runs with steps of other sizes cannot be
    compared by it.
    """

    def row(self, runs: Sequence[RunSnapshot], same_data: bool) -> dict[str, Any]:
        """Returns the name, a text for each run, and the column with the best number, which is None
        where none is better than all others by more than chance.
        """
        values = [self.read(run) for run in runs]
        texts = [self._text(value) for value in values]
        is_comparable = self._is_comparable(runs)
        has_best = bool(self.better) and (same_data or not self.is_of_data) and is_comparable
        return {
            "name": self.name if is_comparable else f"{self.name} (steps of other sizes)",
            "texts": texts,
            "best": self._best(runs, values) if has_best else None,
        }

    def _is_comparable(self, runs: Sequence[RunSnapshot]) -> bool:
        tokens = [float(np.median(run.steps.tokens)) for run in runs if len(run.steps)]
        return not (self.is_of_step and tokens and max(tokens) > SAME_SIZE * min(tokens))

    def _text(self, value: float | None) -> str:
        return "–" if value is None else self.as_text(value)

    def _best(self, runs: Sequence[RunSnapshot], values: Sequence[float | None]) -> int | None:
        known = {place: value for place, value in enumerate(values) if value is not None}
        if len(known) < 2:
            return None
        choose = min if self.better == "least" else max
        best = choose(known, key=known.__getitem__)
        # A run that has made its model worse is not the best, and no greater loss is better.
        if self.is_of_data and worse_than_before(runs[best]) is not None:
            return None
        others = [place for place in known if place != best]
        differs = (self._differs(runs, known, best, other) for other in others)
        return best if all(differs) else None

    def _differs(
        self, runs: Sequence[RunSnapshot], known: dict[int, float], one: int, other: int
    ) -> bool:
        """Returns whether two runs' numbers differ by more than chance."""
        size = max(abs(known[one]), abs(known[other]))
        least = max(self.least_margin(runs[one]), self.least_margin(runs[other]))
        # Shares of answers are not exact: 0.96 - 0.94 is more than 0.02.
        return round(abs(known[one] - known[other]) - max(self.margin * size, least), 9) > 0

    def changes(self, runs: Sequence[RunSnapshot], baseline: int) -> list[str]:
        """Returns how much each run's number differs from that of the baseline, as in +12 %; an
        empty text for the baseline itself, where both are the same, where either is not known or
        the baseline's is 0, and where they cannot be compared.
        """
        if not self._is_comparable(runs):
            return [""] * len(runs)
        values = [self.read(run) for run in runs]
        changes = [_change(value, values[baseline]) for value in values]
        changes[baseline] = ""
        return changes


def _change(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    share = value / base - 1
    if abs(share) < 0.0005:
        return ""
    digits = 1 if abs(share) < 0.0995 else 0
    return f"{'+' if share > 0 else '−'}{100 * abs(share):,.{digits}f} %"


def key_figures(
    runs: Sequence[RunSnapshot], same_data: bool, baseline: int | None = None
) -> list[dict[str, Any]]:
    """Returns one row for each key figure that a run has, with the `changes` against the run number
    `baseline`, if there is one. Without the `same_data`, no loss or share of answers is called the
    best.
    """
    rows = []
    for figure in KEY_FIGURES:
        changes = [""] * len(runs) if baseline is None else figure.changes(runs, baseline)
        rows.append(figure.row(runs, same_data) | {"changes": changes})
    return [row for row in rows if set(row["texts"]) != {"–"}]


def _of_data(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns those of a run's settings that decide its rows."""
    return {
        name: value
        for name, value in settings.items()
        if name.startswith("data.") and name not in _SAME_ROWS
    }


def is_same_data(settings: Sequence[dict[str, Any]]) -> bool:
    """Returns whether runs have the same rows. `settings` are theirs by dotted name; if those of a
    run are not known, its rows may be others.
    """
    data = [_of_data(of) for of in settings]
    return all(data) and all(other == data[0] for other in data)


_SAME_ROWS = ("data.packing",)
"""Settings whose difference leaves the rows the same."""


def _last(values: Sequence[float]) -> float | None:
    return float(values[-1]) if len(values) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _most(values: Sequence[float]) -> float | None:
    """Returns the greatest value, or None if nothing was measured, which records mark with 0."""
    return float(max(values)) if len(values) and max(values) else None


def _final_loss(snapshot: RunSnapshot) -> float | None:
    loss = snapshot.steps.loss
    return float(np.mean(loss[-smoothing_window(len(loss)) :])) if len(loss) else None


def _lowest(snapshot: RunSnapshot) -> float | None:
    """Returns the lowest validation loss after a step, or None without one."""
    evals = snapshot.evals
    return min((loss for step, loss in zip(evals.step, evals.loss) if step > 0), default=None)


def _answered(snapshot: RunSnapshot) -> float | None:
    """Returns the share of validation prompts answered exactly at the newest measurement after a
    step, or None.
    """
    newest = _newest_answers(snapshot)
    return None if newest is None else newest.correct / newest.total


def _one_answer(snapshot: RunSnapshot) -> float:
    """Returns the share of one answer in those of `_answered`."""
    newest = _newest_answers(snapshot)
    return 0.0 if newest is None else 1 / newest.total


def _newest_answers(snapshot: RunSnapshot) -> ExactMatchMeasured | None:
    asked = [match for match in snapshot.exact_matches if match.total and match.step > 0]
    return max(asked, key=lambda match: match.step, default=None)


def _tokens(snapshot: RunSnapshot) -> float | None:
    """Returns the number of tokens trained on, or None for a run too long to keep every step."""
    steps = snapshot.steps
    return float(sum(steps.tokens)) if steps.count == len(steps) else None


def _in_tokens(rate: float) -> str:
    return f"{in_count(rate)} tokens/s"


FINAL_LOSS = "Training loss, last (smoothed)"
LAST_VALIDATION = "Validation loss, last"
LOWEST = "Validation loss, lowest"
ANSWERED = "Answers right, last"
RATE = "Learning rate, highest"
SPEED = "Speed, median of the run"
HOST_MEMORY = "RAM, peak"
GPU_MEMORY = "GPU memory, peak"
KEY_FIGURES = (
    KeyFigure("Steps", lambda run: float(run.step), lambda value: f"{value:,.0f}", ""),
    KeyFigure(FINAL_LOSS, _final_loss, in_loss, "least", True, LOSS_MARGIN),
    KeyFigure(
        LAST_VALIDATION, lambda run: _last(run.evals.loss), in_loss, "least", True, LOSS_MARGIN
    ),
    KeyFigure(LOWEST, _lowest, in_loss, "least", True, LOSS_MARGIN),
    KeyFigure(ANSWERED, _answered, in_share, "most", True, LOSS_MARGIN, _one_answer),
    KeyFigure(RATE, lambda run: _most(run.steps.learning_rate), in_digits, ""),
    KeyFigure(SPEED, lambda run: _median(run.steps.tokens_per_second), _in_tokens, "most"),
    KeyFigure(
        "Step time, median of the run",
        lambda run: _median(run.steps.seconds),
        in_step_time,
        "least",
        is_of_step=True,
    ),
    KeyFigure(
        "Compute, median of the run", lambda run: _median(run.steps.tflops), in_flops, "most"
    ),
    KeyFigure(HOST_MEMORY, lambda run: _most(run.memory.host_rss), in_bytes, "least"),
    KeyFigure(GPU_MEMORY, lambda run: _most(run.memory.gpu_peak), in_bytes, "least"),
    KeyFigure("Tokens trained on", _tokens, in_count, ""),
    KeyFigure("Time", lambda run: run.seconds, in_time, ""),
)
SUMMARIZED = {
    "loss": (FINAL_LOSS, LAST_VALIDATION),
    "accuracy": (ANSWERED,),
    "rate": (RATE,),
    "throughput": (SPEED,),
    "memory": (HOST_MEMORY, GPU_MEMORY),
}
"""Key figures that describe the content of each figure."""


def summaries(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns a description of each figure, for people who cannot or do not want to read the
    curves.
    """
    texts = {row["name"]: row["texts"] for row in rows}
    captions = {}
    for figure, wanted in SUMMARIZED.items():
        known = [name for name in wanted if set(texts.get(name, ["–"])) != {"–"}]
        sentences = [_key_figure_text(name, names, texts[name]) for name in known]
        captions[figure] = " ".join(sentences) or NOTHING_YET
    return captions


def _key_figure_text(name: str, runs: Sequence[str], texts: Sequence[str]) -> str:
    parts = [f"{run} {text}" for run, text in zip(runs, texts)]
    return f"{name}: {', '.join(parts)}."

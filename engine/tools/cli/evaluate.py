"""The command `launch.py eval`: a run's trained model beside its base model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from engine.runs.record.run_folder import open_run
from engine.runs.summaries.benchmark_results import BenchmarkResult, read_benchmarks
from engine.runs.summaries.evaluation_figures import (
    Figure,
    benchmark_figures,
    evaluation_figures,
)
from engine.runs.summaries.evaluation_results import Began, Evaluation
from engine.tools.cli.bars import SteadyBar
from engine.tools.evaluate.evaluate_run import AskedEvaluation, evaluate_run


def evaluate(runs_dir: Path, run_id: str, asked: AskedEvaluation, as_json: bool) -> str:
    """Returns the results as a table or as JSON; progress goes to the error stream. Raises the
    errors of `evaluate_run`.
    """
    with _Bar() as bar:
        found = evaluate_run(runs_dir, run_id, asked, bar.show, _allows)
    known = read_benchmarks(open_run(runs_dir, run_id).path).results
    results = [one for one in known if one.evaluation == found.began.id]
    if as_json:
        return _as_json(found, results)
    figures = [*evaluation_figures(found), *benchmark_figures(results)]
    parts = [_head(found.began), _table(figures), found.note, _answers(found)]
    return "\n".join(filter(None, parts))


def _allows(runs: str) -> bool:
    """Asks a person at the terminal whether the programs that a sentence names may run."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{runs} Run them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class _Bar:
    """Draws the progress of one job after the other."""

    def __init__(self) -> None:
        self._bar: SteadyBar | None = None
        self._message = ""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def show(self, done: float, total: float, message: str = "") -> None:
        if self._bar is None or message != self._message or done < self._bar.n:
            self._close()
            self._message = message
            self._bar = SteadyBar(total=total, desc=message, file=sys.stderr, unit_scale=True)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _as_json(found: Evaluation, results: Sequence[BenchmarkResult]) -> str:
    figures = [*evaluation_figures(found), *benchmark_figures(results)]
    tree = {
        "evaluation": msgspec.to_builtins(found.began),
        "figures": [asdict(figure) | {"difference": figure.difference} for figure in figures],
        "benchmarks": [asdict(one) for one in results],
        "answers": {
            side: msgspec.to_builtins(answered.answers) for side, answered in found.answered.items()
        },
    }
    return json.dumps(tree, indent=1)


def _head(began: Began) -> str:
    """Returns a line on which weights were evaluated."""
    step = "" if began.step is None else f" of step {began.step:,}"
    whose = "exported" if began.weights == "export" else began.weights
    return f"The {whose} weights{step}, computed in {began.dtype}:"


def _table(figures: Sequence[Figure]) -> str:
    """Returns the figures as lines of columns."""
    if not figures:
        return "There are no figures of these parts."
    heads = ("", "base", "trained", "difference", "95 %", "of")
    rows = [heads, *(_row(one) for one in figures)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(one: Figure) -> tuple[str, ...]:
    interval = ""
    if one.interval is not None:
        interval = f"{one.interval.low:+.4f} to {one.interval.high:+.4f}"
    count = "" if one.count is None else f"{one.count:,} {one.of}"
    of = ", ".join(filter(None, (count, one.how)))
    numbers = [_number(value) for value in (one.base, one.trained)]
    difference = "" if one.difference is None else f"{one.difference:+.4f}"
    return one.name, *numbers, difference, interval, of


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _answers(found: Evaluation) -> str:
    """Returns the answers side by side, a block of lines for each prompt."""
    sides = [found.answered[side].answers for side in found.sides if side in found.answered]
    blocks = []
    for answers in zip(*sides):
        lines = [f"Prompt: {answers[0].prompt}", f"  expected: {answers[0].expected}"]
        lines += [f"  {side}: {one.answer}" for side, one in zip(found.sides, answers)]
        blocks.append("\n" + "\n".join(lines))
    return "\n".join(blocks)

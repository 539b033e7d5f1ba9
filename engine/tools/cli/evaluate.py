"""The command `launch.py eval`: benchmarks of lm-evaluation-harness on a run's weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engine.config.export_choice import ExportFrom
from engine.errors import ConfigError
from engine.runs.summaries.benchmark_results import BenchmarkResult
from engine.tools.cli.bars import SteadyBar
from engine.tools.evaluate.evaluate_run import evaluate_run
from engine.tools.evaluate.harness import AskedTasks


def evaluate(
    runs_dir: Path, run_id: str, asked: AskedTasks, of: ExportFrom | None, as_json: bool
) -> str:
    """Returns the results as a table or as JSON; progress goes to the error stream. Raises
    ConfigError where no task is named, and the errors of `evaluate_run`.
    """
    if not asked.names:
        raise ConfigError("--tasks", "no task is named.")
    with _Bar() as bar:
        results = evaluate_run(runs_dir, run_id, asked, of, bar.show, _allows)
    if as_json:
        return json.dumps([asdict(one) for one in results], indent=1)
    return _table(results)


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


def _table(results: Sequence[BenchmarkResult]) -> str:
    """Returns the results as lines of columns, below a line on whose they are."""
    if not results:
        return "The tasks have no metrics."
    heads = ("task", "metric", "value", "error", "shots", "samples")
    rows = [heads, *(_row(one) for one in results)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    first = results[0]
    step = "" if first.step is None else f" of step {first.step:,}"
    whose = "exported" if first.weights == "export" else first.weights
    lines.insert(0, f"The {whose} weights{step}, computed in {first.dtype}:")
    return "\n".join(lines)


def _row(one: BenchmarkResult) -> tuple[str, ...]:
    value = "not finite" if one.value is None else f"{one.value:.4f}"
    error = "" if one.error is None else f"{one.error:.4f}"
    shots = "" if one.shots is None else str(one.shots)
    samples = "" if one.samples is None else f"{one.samples:,}"
    return one.task, one.metric, value, error, shots, samples

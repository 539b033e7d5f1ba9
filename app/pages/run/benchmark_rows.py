"""The results of benchmarks as rows of a table. All functions are pure."""

from __future__ import annotations

import time
from typing import Any

from app.labels import in_digits
from engine.runs.summaries.benchmark_results import BenchmarkResult, Benchmarks, latest

MOST_ROWS = 200
"""Largest number of rows in a table: those that were measured last."""
_WHOSE = {"export": "exported", "best": "best", "last": "last"}


def benchmark_table(benchmarks: Benchmarks) -> dict[str, Any]:
    """Returns the rows of the table, the newest evaluation first, and a caption."""
    results = sorted(latest(benchmarks.results), key=lambda one: one.time, reverse=True)
    sentences = [benchmarks.problem] if benchmarks.problem else []
    if len(results) > MOST_ROWS:
        sentences.append(f"The latest {MOST_ROWS} of {len(results):,} results are shown.")
    return {"rows": [_row(one) for one in results[:MOST_ROWS]], "caption": " ".join(sentences)}


def _row(one: BenchmarkResult) -> dict[str, str]:
    value = in_digits(one.value)
    if one.error is not None:
        value += f" ± {in_digits(one.error)}"
    return {
        "task": one.task,
        "metric": _metric(one),
        "value": value,
        "asked": _asked(one),
        "weights": _weights(one),
        "when": f"{_day(one.time)}, lm-eval {one.harness}",
    }


def _metric(one: BenchmarkResult) -> str:
    """Returns the name of a metric, and which direction is better."""
    if one.higher_is_better is None:
        return one.metric
    return f"{one.metric} {'↑' if one.higher_is_better else '↓'}"


def _asked(one: BenchmarkResult) -> str:
    """Returns how much was asked, and how."""
    parts = []
    if one.samples is not None:
        parts.append(f"{one.samples:,}" + ("" if one.limit is None else " at most"))
    if one.shots is not None:
        parts.append(f"{one.shots}-shot")
    if one.chat:
        parts.append("chat template")
    return ", ".join(parts)


def _weights(one: BenchmarkResult) -> str:
    step = "" if one.step is None else f", step {one.step:,}"
    return f"{_WHOSE[one.weights]}{step}, {one.dtype}"


def _day(seconds: float) -> str:
    """Returns a date, or an en dash for a time that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"

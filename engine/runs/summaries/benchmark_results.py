"""The results of benchmarks, in ``benchmarks.jsonl`` in a run's folder, one result a line.

They are measured when the run is over, by another process than the one that trained, so they are
not in its record. A line is appended in one write and never changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec.json import Decoder, Encoder

from engine.runs.summaries.lines_file import append_lines, read_lines

RESULTS_FILE = "benchmarks.jsonl"

WhichWeights = Literal["export", "best", "last", "base"]
"""Weights of a run; `base` are those of its base model."""


@dataclass(frozen=True)
class BenchmarkResult:
    """Result of one metric of one task for some weights of a run."""

    task: str
    metric: str
    """Name of the metric in lm-evaluation-harness, with the filter of the answers if there is
    one.
    """
    value: float | None
    """None for a number that is not finite."""
    error: float | None
    """Standard error of the value; None where the harness estimates none."""
    higher_is_better: bool | None
    shots: int | None
    """Number of solved examples before each question."""
    limit: int | None
    """Number of samples of the task that were asked, at most; None where all of them were."""
    samples: int | None
    """Number of samples."""
    weights: WhichWeights
    step: int | None
    """Step of the weights; None for the base model, and if the record does not have it."""
    dtype: str
    """Dtype of the computation."""
    chat: bool
    """The questions were written with the model's chat template."""
    time: float
    """End of the evaluation, in Unix seconds."""
    harness: str
    """Version of lm-evaluation-harness."""
    task_version: str
    values: tuple[float, ...] = ()
    """The metric of each sample, in the order of the task, where the value is their mean. Two
    results on the same samples are compared by them in pairs.
    """
    evaluation: str = ""
    """Id of the evaluation that it belongs to."""


@dataclass(frozen=True)
class Benchmarks:
    """All results of a run that can be read, in the order of their evaluation."""

    results: list[BenchmarkResult] = field(default_factory=list)
    problem: str = ""
    """One sentence on what cannot be read; empty where nothing is wrong."""


_decode = Decoder(BenchmarkResult).decode
_encode = Encoder().encode


def read_benchmarks(path: Path) -> Benchmarks:
    """Returns the results in the run folder `path`. Damaged lines are left out, and counted in the
    problem; a file that cannot be read has no results.
    """
    return Benchmarks(*read_lines(path / RESULTS_FILE, _result_in))


def _result_in(line: bytes) -> BenchmarkResult | None:
    """Returns the result in a line, or None if the line is damaged."""
    try:
        result = _decode(line)
    except (ValueError, RecursionError):
        return None
    numbers = (result.value, result.error, result.time, *result.values)
    if not all(number is None or math.isfinite(number) for number in numbers):
        return None
    return result


def append_benchmarks(path: Path, results: Sequence[BenchmarkResult]) -> None:
    """Adds results to those of the run folder `path`, on the disk when this returns. Another
    process may do so at the same time. Raises RunError if they cannot be written.
    """
    append_lines(path / RESULTS_FILE, [_encode(result) for result in results])


def latest(results: Sequence[BenchmarkResult]) -> list[BenchmarkResult]:
    """Returns the results without those that were measured again in the same way on the same
    weights, in the order of first evaluation.
    """
    kept: dict[tuple[Any, ...], BenchmarkResult] = {}
    for one in results:
        how = (one.task, one.metric, one.shots, one.limit, one.chat)
        kept[(*how, one.weights, one.step, one.dtype)] = one
    return list(kept.values())

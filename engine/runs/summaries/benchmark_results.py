"""The results of benchmarks, in ``benchmarks.jsonl`` in a run's folder, one result a line.

They are measured when the run is over, by another process than the one that trained, so they are
not in its record. A line is appended in one write and never changed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec.json import Decoder, Encoder

from engine import safe_files
from engine.errors import RunError

RESULTS_FILE = "benchmarks.jsonl"
LARGEST_FILE = 16 << 20
"""Bytes above which a file is not read: it has tens of thousands of results."""

WhichWeights = Literal["export", "best", "last"]


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
    """Step of the weights; None if the record does not have it."""
    dtype: str
    """Dtype of the computation."""
    chat: bool
    """The questions were written with the model's chat template."""
    time: float
    """End of the evaluation, in Unix seconds."""
    harness: str
    """Version of lm-evaluation-harness."""
    task_version: str


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
    file = path / RESULTS_FILE
    try:
        lines = safe_files.read_bytes(file, path.parent, LARGEST_FILE).split(b"\n")
    except FileNotFoundError:
        return Benchmarks()
    except OSError as error:
        return Benchmarks(problem=f"{RESULTS_FILE} cannot be read ({error.strerror}).")
    results, damaged = [], 0
    for line in filter(None, lines):
        result = _result_in(line)
        if result is None:
            damaged += 1
        else:
            results.append(result)
    return Benchmarks(results, _left_out(damaged))


def _result_in(line: bytes) -> BenchmarkResult | None:
    """Returns the result in a line, or None if the line is damaged."""
    try:
        result = _decode(line)
    except (ValueError, RecursionError):
        return None
    numbers = (result.value, result.error, result.time)
    if not all(number is None or math.isfinite(number) for number in numbers):
        return None
    return result


def _left_out(damaged: int) -> str:
    if not damaged:
        return ""
    if damaged == 1:
        return f"A line of {RESULTS_FILE} is damaged and left out."
    return f"{damaged:,} lines of {RESULTS_FILE} are damaged and left out."


def append_benchmarks(path: Path, results: Sequence[BenchmarkResult]) -> None:
    """Adds results to those of the run folder `path`, on the disk when this returns. Another
    process may do so at the same time. Raises RunError if they cannot be written.
    """
    content = b"".join(_encode(result) + b"\n" for result in results)
    try:
        descriptor = safe_files.open_to_append(path / RESULTS_FILE, path.parent)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a torn line stands alone
                content = b"\n" + content
            _write(descriptor, content, size)
        finally:
            os.close(descriptor)
        safe_files.sync_folder(path, path.parent)
    except OSError as error:
        raise RunError(
            f"The results cannot be written to {path / RESULTS_FILE} ({error.strerror}); free some "
            "disk space or check the folder."
        ) from None


def _write(descriptor: int, content: bytes, size: int) -> None:
    """Appends to a file of `size` bytes all of the content or nothing."""
    try:
        written = os.write(descriptor, content)
        if written < len(content):
            os.write(descriptor, content[written:])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def latest(results: Sequence[BenchmarkResult]) -> list[BenchmarkResult]:
    """Returns the results without those that were measured again in the same way on the same
    weights, in the order of first evaluation.
    """
    kept: dict[tuple[Any, ...], BenchmarkResult] = {}
    for one in results:
        how = (one.task, one.metric, one.shots, one.limit, one.chat)
        kept[(*how, one.weights, one.step, one.dtype)] = one
    return list(kept.values())

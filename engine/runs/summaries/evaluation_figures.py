"""The figures of an evaluation: the base model, the trained one, and the difference with its 95 %
interval. All functions are pure.

Both sides see the same rows, prompts or samples, so their differences are taken one by one. The
interval of a mean is normal, from the standard error of these differences (Miller, arXiv
2411.00640); that of a share of right answers is the adjusted one of Agresti and Min for pairs
(doi:10.1002/sim.1781), which holds where all or none are right. With fewer than eight rows there is
no interval.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.runs.record.evaluations import FEWEST_ROWS, RowLosses, paired_error
from engine.runs.summaries.benchmark_results import BenchmarkResult, latest
from engine.runs.summaries.evaluation_results import Evaluation, Evaluations, LossMeasured

LOSS, AHEAD, RIGHT = "Validation loss", "Chosen answer likelier", "Answers right"
_ERRORS = 1.96
"""Standard errors on either side of a 95 % interval."""
_ADDED = 0.5
"""What Agresti and Min add to each of the four counts of pairs."""

Unit = Literal["loss", "share", "number"]


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of a difference."""

    low: float
    high: float


@dataclass(frozen=True)
class Figure:
    """One number of both models."""

    name: str
    unit: Unit
    base: float | None
    """None where it was not measured."""
    trained: float | None
    interval: Interval | None
    """Interval of the difference; None where it is unknown."""
    higher_is_better: bool | None
    count: int | None
    """Number of rows, prompts, pairs or samples."""
    of: str
    """What they are, as in `prompts`."""
    how: str = ""
    """How a task was asked, in words."""

    @property
    def difference(self) -> float | None:
        """By how much the trained model's number is above the other's."""
        if self.base is None or self.trained is None:
            return None
        return self.trained - self.base

    @property
    def is_better(self) -> bool | None:
        """Whether the trained model is better or worse by more than chance; None where it is
        neither, or where that is not known.
        """
        if self.interval is None or self.higher_is_better is None:
            return None
        if self.interval.low <= 0 <= self.interval.high:
            return None
        return (self.interval.low > 0) == self.higher_is_better


def evaluation_figures(evaluation: Evaluation) -> list[Figure]:
    """Returns the figures of the validation rows, as far as they are measured."""
    figures = []
    base, trained = evaluation.losses.get("base"), evaluation.losses.get("trained")
    newest = trained or base
    if newest is not None:
        figures.append(
            Figure(
                LOSS,
                "loss",
                None if base is None else base.loss,
                None if trained is None else trained.loss,
                _of_losses(base, trained),
                False,
                len(newest.losses),
                "rows",
            )
        )
    ahead = {side: compared.ahead for side, compared in evaluation.pairs.items()}
    right = {side: matched.right for side, matched in evaluation.matched.items()}
    for name, flags, of in ((AHEAD, ahead, "pairs"), (RIGHT, right, "prompts")):
        if flags:
            figures.append(_share(name, flags.get("base"), flags.get("trained"), of))
    return figures


def figures_of(evaluations: Evaluations, step: int | None) -> list[Figure]:
    """Returns the figures of the validation rows in the latest evaluation of the weights of
    `step`.
    """
    for evaluation in reversed(evaluations.found):
        figures = [one for one in evaluation_figures(evaluation) if one.trained is not None]
        if figures and evaluation.began.step == step:
            return figures
    return []


def benchmark_figures(results: Sequence[BenchmarkResult]) -> list[Figure]:
    """Returns a figure for each metric of each task that was asked of a trained model, the latest
    first, beside the same of the base model.
    """
    known = latest(results)
    bases = {_asked(one): one for one in known if one.weights == "base"}
    trained = [one for one in known if one.weights != "base"]
    trained.sort(key=lambda one: one.time, reverse=True)
    return [_of_task(bases.get(_asked(one)), one) for one in trained]


def _asked(one: BenchmarkResult) -> tuple[object, ...]:
    return (one.task, one.metric, one.shots, one.limit, one.chat, one.dtype, one.task_version)


def _of_task(base: BenchmarkResult | None, trained: BenchmarkResult) -> Figure:
    is_share = trained.metric.partition(" ")[0] in _SHARES
    return Figure(
        f"{trained.task}: {trained.metric}",
        "share" if is_share else "number",
        None if base is None else base.value,
        trained.value,
        None if base is None else _of_results(base, trained),
        trained.higher_is_better,
        trained.samples,
        "samples",
        how_asked(trained),
    )


_SHARES = ("acc", "acc_norm", "exact_match", "acc_mutual_info", "prompt_level_strict_acc")
"""Metrics of lm-evaluation-harness that are shares of samples."""


def how_asked(one: BenchmarkResult) -> str:
    """Returns how a task was asked, and of which weights."""
    parts = [] if one.shots is None else [f"{one.shots}-shot"]
    if one.chat:
        parts.append("chat template")
    if one.step is not None:
        parts.append(f"step {one.step:,}")
    return ", ".join([*parts, one.dtype])


def _of_losses(base: LossMeasured | None, trained: LossMeasured | None) -> Interval | None:
    if base is None or trained is None or base.tokens != trained.tokens:
        return None
    rows = [RowLosses(tuple(one.losses), tuple(one.tokens)) for one in (base, trained)]
    with contextlib.suppress(OverflowError):  # a file may hold any number
        return _around(trained.loss - base.loss, paired_error(*rows))
    return None


def _share(
    name: str, base: Sequence[bool] | None, trained: Sequence[bool] | None, of: str
) -> Figure:
    newest = trained if trained is not None else base
    return Figure(
        name,
        "share",
        None if not base else sum(base) / len(base),
        None if not trained else sum(trained) / len(trained),
        None if base is None or trained is None else of_flags(base, trained),
        True,
        None if newest is None else len(newest),
        of,
    )


def _of_results(base: BenchmarkResult, trained: BenchmarkResult) -> Interval | None:
    if base.values and len(base.values) == len(trained.values):
        if set(base.values) | set(trained.values) <= {0.0, 1.0}:
            return of_flags([bool(value) for value in base.values], list(map(bool, trained.values)))
        return of_values(base.values, trained.values)
    if None in (base.value, trained.value, base.error, trained.error):
        return None
    error = math.hypot(base.error or 0.0, trained.error or 0.0)
    return _around((trained.value or 0.0) - (base.value or 0.0), error)


def of_values(base: Sequence[float], trained: Sequence[float]) -> Interval | None:
    """Returns the interval of the difference of two means over the same samples."""
    changes = [late - early for early, late in zip(base, trained)]
    count = len(changes)
    if count < FEWEST_ROWS:
        return None
    with contextlib.suppress(OverflowError):  # a file may hold any number
        mean = math.fsum(changes) / count
        variance = math.fsum((change - mean) ** 2 for change in changes) / (count - 1)
        return _around(mean, math.sqrt(variance / count))
    return None


def of_flags(base: Sequence[bool], trained: Sequence[bool]) -> Interval | None:
    """Returns the interval of the difference of two shares of the same prompts."""
    if len(base) != len(trained) or len(base) < FEWEST_ROWS:
        return None
    gained = sum(late and not early for early, late in zip(base, trained)) + _ADDED
    lost = sum(early and not late for early, late in zip(base, trained)) + _ADDED
    count = len(base) + 4 * _ADDED
    error = math.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    found = _around((gained - lost) / count, error)
    return None if found is None else Interval(max(-1.0, found.low), min(1.0, found.high))


def _around(middle: float, error: float | None) -> Interval | None:
    if error is None or not math.isfinite(middle + error):
        return None
    return Interval(middle - _ERRORS * error, middle + _ERRORS * error)

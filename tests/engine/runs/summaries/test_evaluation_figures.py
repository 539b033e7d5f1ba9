"""The figures of both models: a difference with an interval that is right as often as it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.runs.summaries.benchmark_results import append_benchmarks
from engine.runs.summaries.evaluation_figures import (
    benchmark_figures,
    evaluation_figures,
    figures_of,
    of_flags,
    of_values,
)
from engine.runs.summaries.evaluation_results import (
    AnswersMatched,
    Began,
    Ended,
    LossMeasured,
    PairsCompared,
    Wanted,
    append_evaluation,
    read_evaluations,
)
from engine.runs.summaries.evaluation_summary import read_summary
from tests.support.measured import measured


def began(id: str = "one", step: int = 7, **wanted) -> Began:
    return Began(id, Wanted(**wanted), "best", step, "float32", "rows", 1.78e9)


def test_the_interval_of_a_share_is_that_of_agresti_and_min():
    """By hand: of 18 pairs, 16.5 gained and 0.5 lost."""
    found = of_flags([False] * 16, [True] * 16)
    middle, error = 16 / 18, (17 - 16**2 / 18) ** 0.5 / 18
    assert (found.low, found.high) == pytest.approx((middle - 1.96 * error, 1.0))
    assert of_flags([True] * 7, [False] * 7) is None, "seven are too few"
    assert of_flags([True] * 8, [False] * 9) is None, "they are not the same prompts"


@pytest.mark.parametrize(("share", "gain"), [(0.5, 0.1), (0.02, 0.9)])
def test_an_interval_holds_the_true_difference_as_often_as_it_says(share, gain):
    draw = np.random.default_rng(5)
    held = {"flags": 0, "values": 0}
    for _ in range(400):
        base = draw.random(60) < share
        trained = np.where(draw.random(60) < gain, True, base)
        true = (1 - share) * gain
        flags = of_flags(base.tolist(), trained.tolist())
        held["flags"] += flags.low <= true <= flags.high
        losses = draw.normal(3, 1, 60)
        values = of_values(losses, losses - gain + draw.normal(0, 0.3, 60))
        held["values"] += values.low <= -gain <= values.high
    assert all(0.92 <= count / 400 <= 0.99 for count in held.values()), held


def test_losses_are_compared_row_by_row(tmp_path):
    """Rows differ much more than their changes, which are weighted by tokens."""
    draw = np.random.default_rng(1)
    losses, tokens = draw.normal(4, 1, 40), draw.integers(1, 30, 40)
    changed = losses - 0.2 + draw.normal(0, 0.05, 40)
    for side, of_side in (("base", losses), ("trained", changed)):
        mean = float((of_side * tokens).sum() / tokens.sum())
        line = LossMeasured("one", side, mean, of_side.tolist(), tokens.tolist())
        append_evaluation(tmp_path, *([began()] if side == "base" else []), line)
    (loss,) = evaluation_figures(read_evaluations(tmp_path).latest)
    assert loss.interval.low < loss.difference < loss.interval.high < -0.15
    assert loss.interval.high - loss.interval.low < 0.05
    assert (loss.is_better, loss.count) == (True, 40)


def test_a_figure_that_one_side_lacks_has_no_difference(tmp_path):
    append_evaluation(tmp_path, began(), AnswersMatched("one", "base", [True, False] * 8))
    (right,) = evaluation_figures(read_evaluations(tmp_path).latest)
    assert (right.base, right.trained, right.difference, right.is_better) == (0.5, None, None, None)
    assert figures_of(read_evaluations(tmp_path), 7) == []
    append_evaluation(
        tmp_path,
        *(PairsCompared("one", side, [True] * 9) for side in ("base", "trained")),
        Ended("one"),
        began("two", step=9),
    )
    found = read_evaluations(tmp_path)
    assert [figure.name for figure in figures_of(found, 7)] == ["Chosen answer likelier"]
    assert found.found[0].is_over and found.latest.parts_done() == (0, 4)


def test_tasks_stand_beside_the_same_of_the_model_before_training(tmp_path):
    base = measured(weights="base", step=None, value=0.25, values=(0.0, 0.0, 0.0, 1.0) * 4)
    trained = measured(value=0.5, values=(0.0, 1.0, 0.0, 1.0) * 4)
    other = measured(value=0.9, shots=5)
    figures = benchmark_figures([base, trained, other, replace(base, task="alone")])
    assert [(one.base, one.trained) for one in figures] == [(0.25, 0.5), (None, 0.9)]
    paired = figures[0].interval
    apart = benchmark_figures([replace(base, values=()), replace(trained, values=())])[0].interval
    assert paired.low < 0.25 < paired.high and apart.low < 0.25 < apart.high
    append_benchmarks(tmp_path, [base, trained, replace(trained, metric="acc_norm")])
    assert [one.name for one in read_summary(tmp_path).tasks] == ["arc_easy: acc"]

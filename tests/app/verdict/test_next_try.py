"""What a run is told to try next does not contradict what another run of the same data is told."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from app.verdict.judge import verdict
from app.verdict.next_try import TOO_SMALL, Outcome, next_try, passes_of
from engine.config.setting_warnings import MOST_PASSES
from engine.config.settings import TrainConfig
from engine.runs.record.events import DataPrepared, EvalFinished, ExactMatchMeasured, RunEnded
from tests.app.verdict.made_runs import CONFIG, evaluated, fold, steps

PASSES = (0.5, 1, 3, 10, MOST_PASSES, 100)


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_passes_are_neither_more_and_fewer_nor_more_where_new_warns_of_them(outcome):
    told = {passes: next_try(outcome, passes) for passes in PASSES}
    assert all("more passes" not in told[passes] for passes in PASSES if passes >= MOST_PASSES)
    assert all("fewer passes" not in told[passes] for passes in PASSES if passes <= 3)
    more = [passes for passes in PASSES if "more passes" in told[passes]]
    fewer = [passes for passes in PASSES if "fewer passes" in told[passes]]
    assert not (more and fewer), "one outcome is told one of both"
    assert all(told.values()) and next_try(outcome, None)


def finished(passes, evals, right, source="m"):
    """Returns the verdict on a finished run of a hundred steps with so many passes."""
    config = TrainConfig.from_dict(
        CONFIG.to_dict() | {"model": {"source": source}, "data": {"source": "own.csv"}}
    )
    data = {"eval_examples": 38, "train_rows": round(100 * config.train.batch_size / passes)}
    snapshot = fold(
        DataPrepared(data),
        EvalFinished(step=0, loss=4.0, loss_tokens=2000),
        *steps(loss=lambda step: 4 * math.exp(-step / 6) + 0.0003),
        *evals,
        ExactMatchMeasured(100, "after", right, 38),
        RunEnded("finished"),
    )
    assert passes_of(snapshot, config) == pytest.approx(passes, rel=0.02)
    return verdict(snapshot, "finished", config=config)


RISEN, FLAT, WORSE = (2.0, 2.5, 3.0, 3.5, 3.6), (3.9, 3.9, 3.9, 3.9), (4.0, 4.1)


@pytest.mark.parametrize("passes", [2.5, 10, 100])
@pytest.mark.parametrize("losses", [RISEN, FLAT, WORSE])
def test_an_example_s_model_on_own_data_is_told_one_thing_whatever_its_passes(passes, losses):
    judged = finished(passes, evaluated(*losses), 0, "assets/starter-model")
    found = (judged.main, *judged.also)
    assert TOO_SMALL in [each.text for each in found]
    assert "passes" not in " ".join(each.advice for each in found)
    other = finished(passes, evaluated(*losses), 0)
    assert other.main.is_alarm and other.main.advice
    assert passes > 3 or "fewer passes" not in other.main.advice

"""Runs that learn from pairs on several ranks: losses, figures and weights are those of one rank,
and every pair is whole on one of them.
"""

# ruff: noqa: F811  fixtures are imported by name

from __future__ import annotations

import numpy as np
import pytest

from engine.data.batches.rows import batches
from engine.planning.schedule.shards import Shards
from engine.runs.record.events import EvalFinished, StepFinished
from engine.runtime.step.step import StepShard
from engine.training.loop.run import resume_run
from tests.support.made_pairs import made_pairs
from tests.support.pair_ranks import train
from tests.support.prepared_pairs import prepared
from tests.support.rows import write_rows
from tests.support.trained_runs import events_of, execute, files_of
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]
OBJECTIVES = ["dpo", "orpo", "kto"]


def assert_close(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], rel=2e-3, abs=1e-4), name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_ranks_learn_what_one_does(tmp_path, objective, forked_workers):
    one, two = (train(tmp_path, f"on{ranks}", ranks, objective) for ranks in (1, 2))
    steps = list(zip(events_of(two, StepFinished), events_of(one, StepFinished)))
    assert len(steps) == 8
    first, alone = steps[0]
    assert first.preference == alone.preference  # each answer has the same bits on any rank
    for ours, theirs in steps:
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
        assert (ours.tokens, ours.loss_tokens) == (theirs.tokens, theirs.loss_tokens)
        assert_close(ours.preference, theirs.preference)
    for ours, theirs in zip(events_of(two, EvalFinished), events_of(one, EvalFinished)):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert_close(ours.preference, theirs.preference)
    for name, held in files_of(two)[8].items():
        mine, plain = (np.frombuffer(one_, np.float32) for one_ in (held, files_of(one)[8][name]))
        np.testing.assert_allclose(mine, plain, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_on_two_ranks_goes_on_to_the_bit(tmp_path, objective, forked_workers):
    whole = train(tmp_path, "whole", 2, objective)
    stopped = train(tmp_path, "stopped", 2, objective, {4: "stop"})
    resumed = resume_run(tmp_path / "stopped", stopped.id)
    assert execute(resumed).state == "finished"
    assert files_of(resumed)[8] == files_of(whole)[8]


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_a_run_on_one_rank_goes_on_on_two(tmp_path, forked_workers):
    stopped = train(tmp_path, "stopped", 1, "dpo", {4: "stop"})
    resumed = resume_run(tmp_path / "stopped", stopped.id, ["engine.gpus=2"])
    assert execute(resumed).state == "finished"
    whole = train(tmp_path, "whole", 1, "dpo")
    losses = [[step.loss for step in events_of(run, StepFinished)] for run in (resumed, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("objective", "ranks"), [("dpo", 2), ("kto", 4)])
def test_each_rank_has_whole_pairs_and_the_totals_of_the_step(tmp_path, objective, ranks):
    reads = "labels" if objective == "kto" else "pairs"
    made = made_pairs(12)
    if reads == "labels":
        made = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": place % 2 == 0}
            for place, row in enumerate(made)
        ]
    rows = prepared(write_rows(tmp_path / "rows.jsonl", made), reads).train
    step = batches(rows, 8, 1, 1)
    shares = [StepShard.of(step, Shards(ranks, rank)) for rank in range(ranks)]
    a_row = 2 if reads == "pairs" else 1
    assert [share.first_line for share in shares] == [
        a_row * 8 // ranks * rank for rank in range(ranks)
    ]
    assert {share.sequences for share in shares} == {8 * a_row}
    for share in shares:
        for batch in share.batches:
            assert len(batch.input_ids) == a_row and batch.pairs.pairs == 8

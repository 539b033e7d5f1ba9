"""Steps of pairs on several ranks and nodes: each knows the sums of all answers, to the bit."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from engine.config.preference_settings import Objective
from engine.data.batches.packing import one_each, two_each
from engine.data.batches.pair_rows import MarkedRows, PairRows
from engine.data.batches.rows import DocumentTokens, Order, batches
from engine.planning.schedule.choices import PlanChoices
from tests.support.ranks import on_ranks
from tests.support.tiny import VOCAB
from tests.support.trained_ranks import RATE, Job, open_rank

pytestmark = pytest.mark.computing
ROWS = 8


def rows_of(objective: str):
    """Returns eight rows of answers to prompts of several lengths, with what they compare with."""
    draw = np.random.default_rng(5)
    documents = ROWS if objective == "kto" else 2 * ROWS
    lengths = draw.integers(6, 12, documents)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = draw.integers(3, VOCAB, starts[-1]).astype(np.int32)
    trained = np.ones(len(ids), bool)
    for start in starts[:-1]:
        trained[start : start + 3] = False
    found = draw.integers(0, 2, documents).astype(float)
    tokens = DocumentTokens(ids, trained, starts, found if objective == "kto" else -20 - found)
    make, layout = (MarkedRows, one_each) if objective == "kto" else (PairRows, two_each)
    rows = make(tokens, layout(documents), 0, Order(7, shuffle=True))
    rows.learn(Objective(name=objective))
    if objective == "kto":
        rows.set_reference_logps(np.full((ROWS, 2), -21, np.float32))
    return rows


def trained(objective: str, ranks: int, nodes: int, dtype: str) -> list:
    """Returns (loss, norm, sums of answers) of each step, from each rank."""
    rows, own = rows_of(objective), ROWS // (ranks * nodes)
    choices = PlanChoices().changed(micro_batches=own, ranks=ranks, replicas=nodes)

    def work(collectives):
        run = open_rank(Job(dtype=dtype), choices, collectives)
        applied = []
        try:
            for step in (1, 2):
                made = batches(rows, ROWS, 1, step)
                run.engine.train_step(step, made, RATE, applied.append)
            run.engine.drain()
        except BaseException:
            collectives.abort()  # else lanes of other ranks would wait for this one
            with contextlib.suppress(Exception):
                run.engine.drain()
            raise
        finally:
            run.close()
        return [(each.loss, each.grad_norm, each.sequence_sums) for each in applied]

    return on_ranks(ranks * nodes, work, nodes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_every_rank_knows_the_sums_of_all_answers(objective, ranks, nodes, dtype):
    found = trained(objective, ranks, nodes, dtype)
    assert all(each == found[0] for each in found)
    (alone,) = trained(objective, 1, 1, dtype)
    assert np.shape(found[0][0][2]) == (ROWS if objective == "kto" else 2 * ROWS, 2)
    assert found[0][0][2] == alone[0][2]  # of the same weights
    for ours, theirs in zip(found[0], alone):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ours[1] == pytest.approx(theirs[1], rel=5e-3)
        np.testing.assert_allclose(ours[2], theirs[2], rtol=5e-3)

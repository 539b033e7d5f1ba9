"""Ranks of several nodes train what those of one node train. After every training the planes of all
nodes have the same bits (`tests.support.trained_ranks`).
"""

from __future__ import annotations

import pytest

from tests.support.rank_parity import EXACT, IN_ORDER, UNTIED, UPDATED_ON_DEVICE, assert_near
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.trained_ranks import InTurn, Job, train

pytestmark = pytest.mark.computing


@pytest.mark.parametrize("dtype, nodes", [("float32", 2), ("bfloat16", 3)])
def test_nodes_with_one_rank_have_the_bits_of_one_node(dtype, nodes):
    """They add the same sums in the same order, and nothing is divided. So the norm has the same
    bits, too.
    """
    job = Job("llama", dtype, 3, nodes, UNTIED, IN_ORDER)
    several, one = train(1, job, nodes=nodes), train(1, job)
    several.assert_same_bits(one)
    assert several.steps == one.steps
    train(nodes, job).assert_same_bits(one)


def test_nodes_that_clip_have_the_bits_of_one_node():
    """One rank of a node has the whole norm, as it has alone."""
    job = Job("llama", "bfloat16", 3, 2, UNTIED, {"max_grad_norm": 0.1, "loss_chunk": 64})
    several, one = train(1, job, nodes=2), train(1, job)
    assert several.steps == one.steps and one.steps[0][1] > 0.1
    several.assert_same_bits(one)


@pytest.mark.parametrize(
    "device_updates", slow_but(UPDATED_ON_DEVICE, ["all, gradients on the GPU"], PLAN_SWEEP)
)
@pytest.mark.parametrize("nodes, ranks", [(2, 1), (2, 2)])
def test_so_they_have_where_optimizers_run_on_the_device(nodes, ranks, device_updates):
    job = Job("qwen3", "bfloat16", 2, 2 * ranks, UNTIED, IN_ORDER)
    several = train(ranks, job, nodes=nodes, **UPDATED_ON_DEVICE[device_updates])
    if ranks == 1:
        several.assert_same_bits(train(1, job, **UPDATED_ON_DEVICE[device_updates]))
    else:
        assert [loss for loss, _ in several.steps] == pytest.approx(
            [loss for loss, _ in train(1, job, **UPDATED_ON_DEVICE[device_updates]).steps], rel=1e-3
        )


def test_so_they_have_where_weights_stay_in_fp32():
    job = Job(EXACT[0], "bfloat16", 2, 2, {}, IN_ORDER, exact=True)
    train(1, job, nodes=2).assert_same_bits(train(1, job))


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("family, changes", [("llama", UNTIED), ("qwen3", {})])
def test_nodes_of_several_ranks_differ_by_the_rounding_of_fp32(family, changes):
    """(a + b) + (c + d) is not ((a + b) + c) + d."""
    job = Job(family, "float32", 10, 4, changes, IN_ORDER)
    two_of_two, four = train(2, job, nodes=2), train(4, job)
    assert_near(two_of_two, four)
    assert two_of_two.steps != four.steps  # else they were not added node by node
    job = Job(family, "float32", 2, 8, changes)
    assert_near(train(2, job, nodes=2), train(1, job))
    sums = dict(rounds=2, main_grad="device")
    assert_near(train(1, job, nodes=2, **sums), train(1, job, **sums))


def test_a_row_is_masked_alike_on_whichever_host_it_is():
    dropout = dict(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    job = Job("gpt2", "bfloat16", 2, 2, UNTIED | dropout, IN_ORDER)

    def trained(nodes: int):
        return train(1, job, lambda _: InTurn(), nodes)

    trained(2).assert_same_bits(trained(1))

"""Several ranks train adapters, and parts of a model, as one rank does: to the bit where sums are
added in the same order, and elsewhere to the rounding of fp32.
"""

from __future__ import annotations

import pytest

from engine.config.adapters import Adapters
from engine.config.trained_parts import Parts
from engine.planning.schedule.choices import EmbedAndHead
from tests.support.optimizers import KINDS
from tests.support.rank_parity import IN_ORDER, UNTIED, assert_near
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.trained_ranks import Job, Trained, train

pytestmark = pytest.mark.computing

EVERYWHERE = Adapters(rank=4)
SOME = Adapters(rank=3, targets=("model.layers.1.self_attn.q_proj",), save_modules=("norm",))
"""The first block has no backward, and the last one no gradient."""
TRAINED = {
    "adapters": EVERYWHERE,
    "some adapters": SOME,
    "last block": Parts(last_blocks=1),
    "norms": Parts(("*norm.weight",)),
    "head": Parts(("lm_head.weight",)),
}
PLANS = {
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "kept": dict(blocks_without_recompute=1, slots=3, prefetch_depth=2),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "shared embed and head slot, rounds": dict(
        embed_and_head=EmbedAndHead.SHARED_SLOT, rounds=2, main_grad="device"
    ),
    "resident": dict(blocks_kept_in_slots=2),
}


def job_of(parts: Adapters | Parts, dtype: str = "float32", **values) -> Job:
    return Job(
        "qwen3",
        dtype,
        values.pop("steps", 3),
        values.pop("micro_batches", 4),
        UNTIED,
        IN_ORDER | {"parts": parts} | values,
    )


@pytest.mark.parametrize("dtype, ranks", [("float32", 2), ("bfloat16", 3)])
@pytest.mark.parametrize("name", TRAINED)
def test_ranks_with_one_micro_batch_have_the_bits_of_one_rank(name, dtype, ranks):
    """Frozen weights are gathered as they are, behind those that are trained."""
    job = job_of(TRAINED[name], dtype, micro_batches=ranks)
    several, one = train(ranks, job), train(1, job)
    several.assert_same_bits(one)
    assert [loss for loss, _ in several.steps] == [loss for loss, _ in one.steps]


@pytest.mark.slow(PLAN_SWEEP)
@pytest.mark.parametrize("optimizer", KINDS)
def test_so_they_have_where_weights_stay_in_fp32(optimizer, monkeypatch):
    """Routers are frozen, and have all planes nonetheless."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)
    engine = IN_ORDER | {"parts": Adapters(rank=8), "optimizer": optimizer}
    job = Job("ernie4_5_moe", "bfloat16", 2, 2, {}, engine, exact=True)
    train(2, job).assert_same_bits(train(1, job))


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
def test_stacked_experts_have_them_too():
    experts = Adapters(4, target_parameters=("experts.gate_up_proj", "experts.down_proj"))
    job = Job("mixtral", "float32", 2, 2, UNTIED, IN_ORDER | {"parts": experts})
    train(2, job).assert_same_bits(train(1, job))


@pytest.fixture(scope="module")
def usual():
    """Returns what two ranks train by the plan without choices."""
    made: dict[str, Trained] = {}

    def get(name: str) -> Trained:
        if name not in made:
            made[name] = train(2, job_of(TRAINED[name], "bfloat16"))
        return made[name]

    return get


@pytest.mark.parametrize("name", ["adapters", "some adapters"])
@pytest.mark.parametrize("plan", slow_but(PLANS, ("gradients on the GPU",), PLAN_SWEEP))
def test_any_plan_gives_the_same_bits(usual, plan, name):
    found = train(2, job_of(TRAINED[name], "bfloat16"), **PLANS[plan])
    common = found.planes.keys() & usual(name).planes.keys()
    ours, theirs = ({key: each.planes[key] for key in common} for each in (found, usual(name)))
    Trained(found.steps, ours).assert_same_bits(Trained(found.steps, theirs))
    assert found.steps == usual(name).steps


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("ranks, name", [(2, "adapters"), (4, "some adapters"), (4, "norms")])
def test_ten_steps_are_those_of_one_rank(name, ranks):
    job = job_of(TRAINED[name], steps=10, max_grad_norm=1.0, loss_chunk=7)
    assert_near(train(ranks, job), train(1, job))

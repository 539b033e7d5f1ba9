"""Law 2 and law 3 for several ranks: with their number fixed, any plan gives the same bits, and no
delay changes one, whichever lanes of whichever ranks are late. A missing wait is found.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.planning.schedule.choices import EmbedAndHead
from engine.planning.schedule.ops import Lane
from engine.runtime.device import cuda_backend
from engine.runtime.device.cpu_backend import CpuBackend
from tests.support.lanes import ImmediateStreams, find_missing_waits, lanes_without_a_gpu
from tests.support.optimizers import ROUNDED
from tests.support.rank_choices import DEVICE_UPDATES, LATE
from tests.support.same_bits import LATE_MOMENTS, SAME_BITS, DelayedBackend
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.trained_ranks import Job, Trained, train

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

PLANS = {
    name: changes for name, changes in SAME_BITS.items() if "blocks_per_saved_input" not in changes
} | {"gradients on the GPU": dict(gradients_on_gpu=True), **LATE_MOMENTS}
UNTIED_PLANS = {
    "rounds": dict(rounds=2, main_grad="device"),
    "rounds, block inputs on the host": dict(
        rounds=2, main_grad="device", offloaded_block_inputs=True
    ),
    "rounds, kept": dict(rounds=2, main_grad="device", blocks_without_recompute=2),
    "rounds, gradients on the GPU": dict(gradients_on_gpu=True, rounds=2, main_grad="device"),
    "shared embed and head slot": dict(embed_and_head=EmbedAndHead.SHARED_SLOT),
    "shared embed and head slot, rounds": dict(
        embed_and_head=EmbedAndHead.SHARED_SLOT, rounds=2, main_grad="device"
    ),
    "shared embed and head slot, gradients on the GPU": dict(
        embed_and_head=EmbedAndHead.SHARED_SLOT, gradients_on_gpu=True
    ),
}
"""In a tied model, rounds add the gradients of embed and head in another order."""
DEVICE_UPDATE_PLANS = {
    "two buffers": dict(update_buffers=2),
    "three buffers": dict(update_buffers=3),
    "small chunks": dict(update_buffers=3, update_chunks=4),
    "resident": dict(update_buffers=2, blocks_kept_in_slots=2),
    "kept, three slots": dict(
        update_buffers=1, blocks_without_recompute=2, slots=3, prefetch_depth=2
    ),
    "rounds": dict(update_buffers=2, rounds=2, main_grad="device"),
    "gradients on the GPU": dict(update_buffers=2, gradients_on_gpu=True),
}
FIRST_PLANS = ("one slot", "deep prefetch", "all kept", "block inputs on the host", "rounds")
FIRST_PLANS += ("gradients on the GPU", "shared embed and head slot, gradients on the GPU")


@pytest.fixture(autouse=True)
def tiny_is_not_small(monkeypatch):
    """Where moments are rounded, the matrices of a tiny model are kept in 8 bits."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)


@pytest.fixture(scope="module")
def usual():
    """Returns the training by the plan without choices, which is made once for a job."""
    made: dict[str, Trained] = {}

    def get(ranks: int, job: Job, **choices) -> Trained:
        key = repr((ranks, job, choices))
        if key not in made:
            made[key] = train(ranks, job, **choices)
        return made[key]

    return get


def job_of(dtype: str = "bfloat16", tied: bool = False, optimizer: str = "adamw") -> Job:
    changes, engine = {"tie_word_embeddings": tied}, {"max_grad_norm": 0.5, "optimizer": optimizer}
    return Job("qwen3", dtype, changes=changes, engine=engine)


def assert_same(ours: Trained, theirs: Trained) -> None:
    """Planes of gradients are compared where both plans have them."""
    common = ours.planes.keys() & theirs.planes.keys()
    assert {plane for _, plane in common} >= {"weight_high", "exp_avg", "exp_avg_sq"}
    mine, other = ({key: each.planes[key] for key in common} for each in (ours, theirs))
    Trained(ours.steps, mine).assert_same_bits(Trained(theirs.steps, other))
    assert not (ours.steps and theirs.steps) or ours.steps == theirs.steps


# ---------------------------------------------------------------------- plans


def test_repeated_runs_have_the_same_bits(usual):
    for ranks in (2, 4):
        assert_same(train(ranks, job_of(tied=True)), usual(ranks, job_of(tied=True)))


@pytest.mark.parametrize("dtype, tied", [("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("name", slow_but(PLANS, FIRST_PLANS, PLAN_SWEEP))
def test_any_plan_gives_the_same_bits(usual, name, dtype, tied):
    job = job_of(dtype, tied)
    assert_same(train(2, job, **PLANS[name]), usual(2, job))


@pytest.mark.parametrize("name", slow_but(UNTIED_PLANS, FIRST_PLANS, PLAN_SWEEP))
def test_so_do_plans_for_untied_models(usual, name):
    assert_same(train(2, job_of(), **UNTIED_PLANS[name]), usual(2, job_of()))


SHARDS = dict(rounds=2, main_grad="shards")
SHARD_PLANS = {
    "block inputs on the host": dict(offloaded_block_inputs=True),
    "kept, three slots": dict(blocks_without_recompute=2, slots=3, prefetch_depth=2),
    "late moments": dict(moments_after_weights=True, blocks_without_recompute=2),
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "shared embed and head slot": dict(embed_and_head=EmbedAndHead.SHARED_SLOT),
}


@pytest.mark.parametrize("name", slow_but(SHARD_PLANS, ("late moments",), PLAN_SWEEP))
def test_so_do_plans_that_keep_shards_of_main_grads(usual, name):
    """Their sums have another order than those of plans that add up all ranks once."""
    assert_same(train(2, job_of(), **SHARDS, **SHARD_PLANS[name]), usual(2, job_of(), **SHARDS))


@pytest.mark.parametrize(
    "device_updates, optimizer", [("some", "adamw"), ("all", "adamw_bf16"), ("all", "adamw_8bit")]
)
@pytest.mark.parametrize(
    "name", slow_but(DEVICE_UPDATE_PLANS, ("three buffers", "gradients on the GPU"), PLAN_SWEEP)
)
def test_so_do_plans_whose_optimizers_run_on_the_device(usual, name, device_updates, optimizer):
    job, updated_on_device = (
        job_of(optimizer=optimizer),
        {"device_updated_units": DEVICE_UPDATES[device_updates]},
    )
    expected = usual(2, job, **updated_on_device, update_buffers=1)
    assert_same(train(2, job, **updated_on_device, **DEVICE_UPDATE_PLANS[name]), expected)


@pytest.mark.parametrize("optimizer", ROUNDED)
@pytest.mark.parametrize("name", slow_but(UNTIED_PLANS, ("rounds",), PLAN_SWEEP))
def test_so_do_plans_with_rounded_moments_on_the_host(usual, name, optimizer):
    job = replace(job_of(optimizer=optimizer), micro_batches=6)  # two for each rank
    assert_same(train(3, job, **UNTIED_PLANS[name]), usual(3, job))


# ---------------------------------------------------------------------- delays

DELAYED = {
    "usual": {},
    "rounds, block inputs on the host": UNTIED_PLANS["rounds, block inputs on the host"],
    "gradients on the GPU": PLANS["gradients on the GPU"],
    "shards, late moments": dict(SHARDS, moments_after_weights=True),
    "device_updates": dict(device_updated_units=DEVICE_UPDATES["all"], update_buffers=2),
}
FIRST_DELAYS = ("exchange",)


@pytest.mark.parametrize("who", ["every rank", "one rank"])
@pytest.mark.parametrize("late", slow_but(LATE, FIRST_DELAYS, PLAN_SWEEP))
@pytest.mark.parametrize("name", DELAYED)
def test_no_delay_changes_a_bit(usual, name, late, who):
    """A rank whose COLLECTIVE is late holds the others up, and takes part in the end."""
    job = job_of()

    def backend(rank: int) -> CpuBackend:
        return DelayedBackend(LATE[late] if who == "every rank" or rank == 1 else ())

    found = train(2, job, backend, **DELAYED[name])
    on_time = {key: value for key, value in DELAYED[name].items() if key != "moments_after_weights"}
    assert_same(found, usual(2, job, **on_time))


# ---------------------------------------------------------------------- waits that are missing


@pytest.fixture
def lanes(monkeypatch):
    """Makes backends with real lane threads, without a GPU."""
    monkeypatch.setattr(cuda_backend, "torch", ImmediateStreams())
    return lanes_without_a_gpu


@pytest.mark.parametrize("slow", [(Lane.COLLECTIVE,), (Lane.H2D, Lane.D2H), (Lane.HOST,)], ids=str)
def test_lanes_in_threads_have_the_same_bits(usual, lanes, slow):
    """One rank is slow in some lanes, and the lanes of both run at once."""
    job = job_of()
    found = train(2, job, lambda rank: lanes(slow if rank == 1 else ()))
    assert_same(found, usual(2, job))


@pytest.mark.parametrize(
    "careless, slow",
    [
        (Lane.COLLECTIVE, (Lane.H2D,)),  # weights are gathered before they are there
        (Lane.COMPUTE, (Lane.COLLECTIVE,)),  # weights are used before they are gathered
        (Lane.D2H, (Lane.COLLECTIVE,)),  # a gradient leaves before it is the sum of all ranks
    ],
    ids=lambda lane: lane if isinstance(lane, str) else "+".join(lane),
)
def test_a_lane_that_does_not_wait_is_found(usual, lanes, careless, slow):
    """It is careless on one rank alone, and changes what all of them compute."""
    job = job_of()
    expected = usual(2, job)

    def train_and_compare():
        found = train(2, job, lambda rank: lanes(slow, (careless,) if rank == 1 else ()))
        assert_same(found, expected)

    find_missing_waits(train_and_compare)

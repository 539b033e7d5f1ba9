"""Law 2 and law 3 for several ranks: with their number fixed, any plan gives the same bits, and no
delay changes one, whichever lanes of whichever ranks are late. A missing wait is found.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.planning.schedule.ops import Lane
from engine.runtime.device import cuda_backend
from engine.runtime.device.cpu_backend import CpuBackend
from tests.support.lanes import ImmediateStreams, find_missing_waits, lanes_without_a_gpu
from tests.support.rank_choices import HOMES, LATE
from tests.support.same_bits import LATE_MOMENTS, SAME_BITS, DelayedBackend
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.trained_ranks import Job, Trained, train

pytestmark = pytest.mark.computing

OF_ONE_RANK = ("boundary_blocks", "gradients_in_sums")
PLANS = {
    name: changes for name, changes in SAME_BITS.items() if not set(changes) & set(OF_ONE_RANK)
} | {"parked gradients": dict(parked_gradients=True), **LATE_MOMENTS}
UNTIED_PLANS = {
    "rounds": dict(rounds=2, gradient_sum="device"),
    "rounds, host boundaries": dict(rounds=2, gradient_sum="device", host_boundaries=True),
    "rounds, kept": dict(rounds=2, gradient_sum="device", kept_blocks=2),
    "rounds, parked": dict(parked_gradients=True, rounds=2, gradient_sum="device"),
    "shared outer slot": dict(shared_outer_slot=True),
    "shared outer slot, rounds": dict(shared_outer_slot=True, rounds=2, gradient_sum="device"),
    "shared outer slot, parked": dict(shared_outer_slot=True, parked_gradients=True),
}
"""In a tied model, rounds add the gradients of embed and head in another order."""
HOME_PLANS = {
    "two buffers": dict(update_buffers=2),
    "three buffers": dict(update_buffers=3),
    "small pieces": dict(update_buffers=3, update_pieces=4),
    "resident": dict(update_buffers=2, resident_blocks=2),
    "kept, three slots": dict(update_buffers=1, kept_blocks=2, slots=3, prefetch_depth=2),
    "rounds": dict(update_buffers=2, rounds=2, gradient_sum="device"),
    "parked": dict(update_buffers=2, parked_gradients=True),
}
FIRST_PLANS = ("one slot", "deep prefetch", "all kept", "host boundaries", "rounds")
FIRST_PLANS += ("parked gradients", "shared outer slot, parked")


@pytest.fixture(autouse=True)
def tiny_is_not_small(monkeypatch):
    """Where moments are rounded, the matrices of a tiny model are kept in 8 bits."""
    monkeypatch.setattr("engine.planning.layout.moments.SMALL", 256)


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


SHARDS = dict(rounds=2, gradient_sum="shards")
SHARD_PLANS = {
    "host boundaries": dict(host_boundaries=True),
    "kept, three slots": dict(kept_blocks=2, slots=3, prefetch_depth=2),
    "late moments": dict(late_moments=True, kept_blocks=2),
    "parked": dict(parked_gradients=True),
    "shared outer slot": dict(shared_outer_slot=True),
}


@pytest.mark.parametrize("name", slow_but(SHARD_PLANS, ("late moments",), PLAN_SWEEP))
def test_so_do_plans_that_keep_shards_of_sums(usual, name):
    """Their sums have another order than those of plans that add up all ranks once."""
    assert_same(train(2, job_of(), **SHARDS, **SHARD_PLANS[name]), usual(2, job_of(), **SHARDS))


@pytest.mark.parametrize(
    "homes, optimizer", [("some", "adamw"), ("all", "adamw_bf16"), ("all", "adamw_8bit")]
)
@pytest.mark.parametrize("name", slow_but(HOME_PLANS, ("three buffers", "parked"), PLAN_SWEEP))
def test_so_do_plans_whose_optimizers_run_on_the_device(usual, name, homes, optimizer):
    job, at_home = job_of(optimizer=optimizer), {"device_homes": HOMES[homes]}
    expected = usual(2, job, **at_home, update_buffers=1)
    assert_same(train(2, job, **at_home, **HOME_PLANS[name]), expected)


@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw_8bit"])
@pytest.mark.parametrize("name", slow_but(UNTIED_PLANS, ("rounds",), PLAN_SWEEP))
def test_so_do_plans_with_rounded_moments_on_the_host(usual, name, optimizer):
    job = replace(job_of(optimizer=optimizer), micro_batches=6)  # two for each rank
    assert_same(train(3, job, **UNTIED_PLANS[name]), usual(3, job))


# ---------------------------------------------------------------------- delays

DELAYED = {
    "usual": {},
    "rounds, host boundaries": UNTIED_PLANS["rounds, host boundaries"],
    "parked gradients": PLANS["parked gradients"],
    "shards, late moments": dict(SHARDS, late_moments=True),
    "homes": dict(device_homes=HOMES["all"], update_buffers=2),
}
FIRST_DELAYS = ("exchange",)


@pytest.mark.parametrize("who", ["every rank", "one rank"])
@pytest.mark.parametrize("late", slow_but(LATE, FIRST_DELAYS, PLAN_SWEEP))
@pytest.mark.parametrize("name", DELAYED)
def test_no_delay_changes_a_bit(usual, name, late, who):
    """A rank whose EXCHANGE is late holds the others up, and takes part in the end."""
    job = job_of()

    def backend(rank: int) -> CpuBackend:
        return DelayedBackend(LATE[late] if who == "every rank" or rank == 1 else ())

    found = train(2, job, backend, **DELAYED[name])
    on_time = {key: value for key, value in DELAYED[name].items() if key != "late_moments"}
    assert_same(found, usual(2, job, **on_time))


# ---------------------------------------------------------------------- waits that are missing


@pytest.fixture
def lanes(monkeypatch):
    """Makes backends with real lane threads, without a GPU."""
    monkeypatch.setattr(cuda_backend, "torch", ImmediateStreams())
    return lanes_without_a_gpu


@pytest.mark.parametrize("slow", [(Lane.EXCHANGE,), (Lane.H2D, Lane.D2H), (Lane.HOST,)], ids=str)
def test_lanes_in_threads_have_the_same_bits(usual, lanes, slow):
    """One rank is slow in some lanes, and the lanes of both run at once."""
    job = job_of()
    found = train(2, job, lambda rank: lanes(slow if rank == 1 else ()))
    assert_same(found, usual(2, job))


@pytest.mark.parametrize(
    "careless, slow",
    [
        (Lane.EXCHANGE, (Lane.H2D,)),  # weights are gathered before they are there
        (Lane.COMPUTE, (Lane.EXCHANGE,)),  # weights are used before they are gathered
        (Lane.D2H, (Lane.EXCHANGE,)),  # a gradient leaves before it is the sum of all ranks
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

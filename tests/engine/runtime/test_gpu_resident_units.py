"""Units that live on the device: their planes have the bits that they would have in host memory,
whichever units live there and whichever lanes are late.
"""

from __future__ import annotations

import pytest
import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlaneSizes
from engine.planning.schedule.ops import Lane, Prefetch
from engine.planning.schedule.shards import WHOLE
from engine.runtime.step.step import StepShard
from tests.support.device_updates import LATE, updated_on_device
from tests.support.gpu_resident_units import PLAN_FAMILIES, UNITS, planes_after
from tests.support.optimizers import ROUNDED
from tests.support.same_bits import BASE, assert_same_bits
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("plan_family", slow_but(PLAN_FAMILIES, ("plain", "rounds"), PLAN_SWEEP))
def test_the_bits_are_those_of_planes_in_host_memory(plan_family, tied):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    for dtype in ("bfloat16", "float32") if "main_grads" not in plan_family else ("bfloat16",):
        expected = planes_after(base, dtype=dtype, tied=tied)
        for count in range(1, UNITS + 1):
            choices = base.changed(gpu_resident_units=count)
            assert_same_bits(planes_after(choices, dtype=dtype, tied=tied), expected)


@pytest.mark.parametrize("plan_family", slow_but(PLAN_FAMILIES, ("plain", "kept"), PLAN_SWEEP))
def test_blocks_that_live_there_may_be_apart(plan_family):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    expected = planes_after(base)
    for count, late in ((2, ()), (3, ()), (3, (Lane.H2D,)), (2, (Lane.COMPUTE,))):
        choices = base.changed(gpu_resident_units=count, gpu_resident_apart=True)
        assert_same_bits(planes_after(choices, late), expected)


@pytest.mark.parametrize("optimizer", ROUNDED)
def test_small_moments_have_the_same_bits_wherever_they_are(optimizer):
    expected = planes_after(BASE, optimizer=optimizer)
    for changes in (dict(gpu_resident_units=2), dict(gpu_resident_units=UNITS)):
        choices = BASE.changed(**changes)
        assert_same_bits(planes_after(choices, optimizer=optimizer), expected)


@pytest.mark.parametrize(
    "plan_family", slow_but(PLAN_FAMILIES, ("plain", "rounds, gradients on the GPU"), PLAN_SWEEP)
)
def test_a_late_lane_changes_nothing(plan_family):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    expected = planes_after(base)
    for count in (2, UNITS):
        for late in ((Lane.COMPUTE,), (Lane.HOST,), (Lane.H2D, Lane.D2H), Lane):
            choices = base.changed(gpu_resident_units=count)
            assert_same_bits(planes_after(choices, late), expected)


@pytest.mark.parametrize("main_grad", ["vertical", "device"])
def test_others_may_be_updated_on_the_device_from_states_that_are_streamed(main_grad):
    device_updates = ("block 1", "head")
    expected = planes_after(updated_on_device(device_updates, 2, main_grad))
    for on_gpu in (False, True):
        choices = updated_on_device(
            device_updates, 2, main_grad, gpu_resident_units=2, gradients_on_gpu=on_gpu
        )
        for late in ((), *LATE[:3]):
            assert_same_bits(planes_after(choices, late), expected)


def test_resident_blocks_may_follow_those_that_live_on_the_device():
    choices = BASE.changed(gpu_resident_units=2, blocks_kept_in_slots=1, blocks_without_recompute=3)
    assert_same_bits(planes_after(choices), planes_after(BASE))
    with pytest.raises(ValueError, match="blocks kept in slots are among"):
        planes_after(BASE.changed(gpu_resident_units=3, blocks_kept_in_slots=2))


def test_a_model_that_lives_on_the_device_moves_nothing():
    blocks = ["block 0", "block 1", "block 2"]
    choices = BASE.changed(gpu_resident_units=UNITS)
    numel = dict.fromkeys(("embed", *blocks, "head"), 64)
    plan = build_step_plan(blocks, False, choices, PlaneSizes(numel=numel))
    assert {op.lane for op in plan.ops} == {Lane.COMPUTE, Lane.HOST}
    assert not any(isinstance(op, Prefetch) for op in plan.ops)
    # Forward and backward wait for nothing. From the summary on, the step before must be over.
    waiting = [op.kind for op in plan.ops if op.lane == Lane.COMPUTE and op.waits_previous]
    assert not any(op.waits for op in plan.ops if op.lane == Lane.COMPUTE)
    assert set(waiting) <= {"summary", "update_in_place"}


def test_a_step_that_is_not_finite_changes_nothing_and_neither_does_the_next():
    """The device may run the next step before the host has seen what is wrong."""
    plain = plain_model(tiny_config("qwen3"))
    run = streamed(plain, BASE.changed(gpu_resident_units=UNITS), dtype="bfloat16")
    before = {
        (unit, plane): run.host_states.tensor(unit, plane).clone()
        for unit in run.host_states.layouts
        for plane in ("weight_high", "weight_low", "exp_avg", "exp_avg_sq")
    }
    norms = run.engine.state.norms

    def of_norms(name: str, value: float) -> None:
        norms.fill_(value)
        share = StepShard.of(random_batches(2, seed=1), WHOLE)
        step = run.engine._training_step(1, share, 1e-2)
        executor = run.engine._train
        for op in run.engine.plan.ops:
            if op.kind in ("summary", "update_in_place"):
                executor.work(op, step)()

    run.engine._train._begin()
    of_norms("not finite", float("nan"))
    of_norms("finite again", 1.0)
    for key, plane in before.items():
        assert torch.equal(run.host_states.tensor(*key), plane)
    batches = random_batches(2, seed=1)
    run.engine.train_step(1, batches, 1e-2)
    run.engine.drain()
    changed = run.host_states.tensor("block 0", "weight_low")
    assert not torch.equal(changed, before["block 0", "weight_low"])
    with pytest.raises(NonFiniteError):
        run.engine.train_step(2, batches, float("inf"))
        run.engine.train_step(3, batches, 1e-2)
        run.engine.drain()
    run.close()

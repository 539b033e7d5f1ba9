"""Parked gradients and a slot that embed and head share: the bits are those of a step with a plane
of gradients on the host, whichever lane is late.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlaneSizes
from engine.planning.schedule.ops import Lane, OffloadParked, Prefetch
from engine.planning.schedule.step_buffers import GRADIENT_RINGS
from engine.planning.schedule.validate import validate
from tests.support.device_homes import HOMES, at_home
from tests.support.parked_gradients import FRAMES, OUTERS, TALL, run
from tests.support.same_bits import BASE, SAME_BITS, assert_same_bits
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.tiny import VOCAB, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

IN_SUMS = dict(parked_gradients=True, gradients_in_sums=True)
ROUNDS = {
    "vertical": {},
    "device": dict(micro_batches=4, rounds=2, gradient_sum="device"),
}
LATE = [
    (),
    (Lane.GRADIENTS_OUT,),
    (Lane.HOST,),
    (Lane.D2H, Lane.H2D),
    (Lane.COMPUTE, Lane.GRADIENTS_OUT),
]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(
    "frame, optimizer", [*((frame, "adamw") for frame in FRAMES), ("all", "adamw_8bit")]
)
def test_the_bits_are_those_of_a_plane_on_the_host(frame, rounds, optimizer):
    base = dataclasses.replace(BASE, **ROUNDS[rounds])
    expected = run(base, optimizer=optimizer)
    framed = dataclasses.replace(base, **FRAMES[frame])
    in_pairs = framed.boundary_blocks == 2
    for name, changes in SAME_BITS.items():
        # `test_laws` has the plans of pairs, which need two slots.
        if "pairs" in name or (in_pairs and changes.get("slots") == 1):
            continue
        if in_pairs and "host" not in name:
            continue
        # What is kept where does not depend on how moments are kept.
        if optimizer == "adamw" or "host" in name:
            changed = dataclasses.replace(framed, **changes)
            assert_same_bits(run(changed, optimizer=optimizer), expected)
    for late in LATE if optimizer == "adamw" else LATE[::2]:
        assert_same_bits(run(framed, late, optimizer=optimizer), expected)


@pytest.mark.parametrize("homes", [(), *HOMES.values()])
def test_gradients_parked_in_their_sums_are_those_of_a_plane_on_the_host(homes):
    """The update buffers are in the other halves of the sums, and after them."""
    base = at_home(homes, 2, "device") if homes else dataclasses.replace(BASE, **ROUNDS["device"])
    expected = run(base)
    for changes in ({}, dict(shared_outer_slot=True), dict(update_buffers=5) if homes else {}):
        framed = dataclasses.replace(base, **IN_SUMS, **changes)
        for late in LATE[::2]:
            assert_same_bits(run(framed, late), expected)
    with pytest.raises(ValueError, match="only in those of all rounds"):
        run(dataclasses.replace(BASE, **IN_SUMS))


@pytest.mark.parametrize("homes", [(), *HOMES.values()])
@pytest.mark.parametrize("vocabulary", [VOCAB, TALL])
@pytest.mark.parametrize("frame", OUTERS)
def test_embed_and_head_in_the_memory_of_parked_gradients_change_no_bit(frame, vocabulary, homes):
    base = at_home(homes, 2) if homes else BASE
    model = dict(vocabulary=vocabulary, pad_token_id=5)
    expected = run(base, **model)
    framed = dataclasses.replace(base, **OUTERS[frame])
    for late in LATE if vocabulary == TALL else LATE[:2]:
        assert_same_bits(run(framed, late, **model), expected)
    for changes in (dict(host_boundaries=True), dict(update_buffers=5 if homes else 0)):
        changed = dataclasses.replace(framed, **changes)
        for late in LATE[:1] + LATE[-1:]:
            assert_same_bits(run(changed, late, **model), expected)


@pytest.mark.parametrize("boundaries", [False, True])
@pytest.mark.parametrize("homes", slow_but(HOMES, ("some",), PLAN_SWEEP))
def test_optimizers_on_the_device_read_parked_gradients(homes, boundaries):
    choices = at_home(HOMES[homes], 2, host_boundaries=boundaries)
    expected = run(choices, dtype="float32")
    for name in ("parked", "all"):
        for late in LATE:
            framed = dataclasses.replace(choices, **FRAMES[name])
            assert_same_bits(run(framed, late, dtype="float32"), expected)


def test_the_embedding_of_a_tied_model_parks_its_gradient_too():
    expected = run(BASE, tied=True)
    parked = dataclasses.replace(BASE, parked_gradients=True)
    assert_same_bits(run(parked, tied=True), expected)
    with pytest.raises(ValueError, match="tied model cannot share"):
        run(dataclasses.replace(BASE, shared_outer_slot=True), tied=True)


def test_a_step_that_is_not_applied_changes_nothing():
    """Its parked gradients never leave the device."""
    plain = plain_model(tiny_config("qwen3"))
    engine = streamed(plain, dataclasses.replace(BASE, parked_gradients=True), dtype="bfloat16")
    engine.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    engine.engine.drain()
    engine.store.tensor("block 1", "weight_high")[0] = torch.inf
    planes = [
        engine.store.tensor(unit, name)
        for unit in engine.store.layouts
        for name in ("weight_high", "weight_low", "exp_avg", "exp_avg_sq")
    ]
    before = [plane.clone() for plane in planes]
    with pytest.raises(NonFiniteError):
        engine.engine.train_step(2, random_batches(2, seed=2), 1e-2)
        engine.engine.drain()
    assert_same_bits(planes, before)
    engine.close()


def test_boundaries_never_wait_for_parked_gradients():
    """They leave on another lane than boundaries do, and each waits for the summary."""
    blocks = [f"block {number}" for number in range(4)]
    choices = dataclasses.replace(
        BASE, host_boundaries=True, parked_gradients=True, shared_outer_slot=True
    )
    numel = dict.fromkeys(["embed", *blocks, "head"], 10)
    plan = build_step_plan(blocks, False, choices, PlaneSizes(numel))
    validate(plan)
    sent = [op for op in plan.ops if isinstance(op, OffloadParked)]
    assert [op.unit for op in sent] == ["embed", *blocks, "head"]
    assert {op.lane for op in plan.ops if "boundary" in op.kind} == {Lane.H2D, Lane.D2H}
    summary = next(op.index for op in plan.ops if op.kind == "summary")
    assert summary in sent[0].waits and sent[0].index > summary
    fetched = [op.unit for op in plan.ops if isinstance(op, Prefetch)]
    assert fetched.count("embed") == 2 and fetched.count("head") == 1


def test_neither_memory_of_the_host_nor_of_the_device_is_more_than_counted():
    plain = plain_model(tiny_config("qwen3"))
    choices = dataclasses.replace(BASE, parked_gradients=True)
    engine = streamed(plain, choices, dtype="bfloat16")
    units = {unit.name: unit.layout.numel for unit in engine.model.units}
    assert engine.store.states == ("adamw", False)
    assert engine.store.allocated_bytes == 12 * sum(units.values())
    piece = max(size for unit, size in units.items() if unit.startswith("block"))
    rings = engine.engine._parts.gradient_rings.values()
    assert [each.nbytes for each in rings] == [2 * piece] * GRADIENT_RINGS
    engine.close()

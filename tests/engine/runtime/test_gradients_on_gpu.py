"""Kept gradients and a slot that embed and head share: the bits are those of a step with a plane
of gradients on the host, whichever lane is late.
"""

from __future__ import annotations

import pytest
import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import EmbedAndHead, PlaneSizes
from engine.planning.schedule.ops import Lane, OffloadKeptGradient, Prefetch
from engine.planning.schedule.step_buffers import GRADIENT_RINGS
from engine.planning.schedule.verify_plan import verify_plan
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.gradients_on_gpu import EMBED_AND_HEAD_FAMILIES, PLAN_FAMILIES, TALL, run
from tests.support.same_bits import BASE, SAME_BITS, assert_same_bits
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.tiny import VOCAB, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

ROUNDS = {
    "vertical": {},
    "device": dict(micro_batches=4, rounds=2, main_grad="device"),
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
    "plan_family, optimizer",
    [*((plan_family, "adamw") for plan_family in PLAN_FAMILIES), ("all", "adamw_8bit")],
)
def test_the_bits_are_those_of_a_plane_on_the_host(plan_family, rounds, optimizer):
    base = BASE.changed(**ROUNDS[rounds])
    expected = run(base, optimizer=optimizer)
    choices_of_family = base.changed(**PLAN_FAMILIES[plan_family])
    in_pairs = choices_of_family.activations.blocks_per_saved_input == 2
    for name, changes in SAME_BITS.items():
        # `test_laws` has the plans of pairs, which need two slots.
        if "pairs" in name or (in_pairs and changes.get("slots") == 1):
            continue
        if in_pairs and "host" not in name:
            continue
        # What is kept where does not depend on how moments are kept.
        if optimizer == "adamw" or "host" in name:
            changed = choices_of_family.changed(**changes)
            assert_same_bits(run(changed, optimizer=optimizer), expected)
    for late in LATE if optimizer == "adamw" else LATE[::2]:
        assert_same_bits(run(choices_of_family, late, optimizer=optimizer), expected)


@pytest.mark.parametrize("device_updates", [(), *DEVICE_UPDATES.values()])
def test_kept_gradients_of_rounds_are_those_of_a_plane_on_the_host(device_updates):
    """The update buffers are in the memory of the accumulators."""
    base = (
        updated_on_device(device_updates, 2, "device")
        if device_updates
        else BASE.changed(**ROUNDS["device"])
    )
    expected = run(base)
    for changes in (
        {},
        dict(embed_and_head=EmbedAndHead.SHARED_SLOT),
        dict(update_buffers=5) if device_updates else {},
    ):
        choices_of_family = base.changed(gradients_on_gpu=True, **changes)
        for late in LATE[::2]:
            assert_same_bits(run(choices_of_family, late), expected)


@pytest.mark.parametrize("device_updates", [(), *DEVICE_UPDATES.values()])
@pytest.mark.parametrize("vocabulary", [VOCAB, TALL])
@pytest.mark.parametrize("plan_family", EMBED_AND_HEAD_FAMILIES)
def test_embed_and_head_in_the_memory_of_kept_gradients_change_no_bit(
    plan_family, vocabulary, device_updates
):
    base = updated_on_device(device_updates, 2) if device_updates else BASE
    model = dict(vocabulary=vocabulary, pad_token_id=5)
    expected = run(base, **model)
    choices_of_family = base.changed(**EMBED_AND_HEAD_FAMILIES[plan_family])
    for late in LATE if vocabulary == TALL else LATE[:2]:
        assert_same_bits(run(choices_of_family, late, **model), expected)
    for changes in (
        dict(offloaded_block_inputs=True),
        dict(update_buffers=5 if device_updates else 0),
    ):
        changed = choices_of_family.changed(**changes)
        for late in LATE[:1] + LATE[-1:]:
            assert_same_bits(run(changed, late, **model), expected)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("device_updates", slow_but(DEVICE_UPDATES, ("some",), PLAN_SWEEP))
def test_optimizers_on_the_device_read_kept_gradients(device_updates, on_host):
    choices = updated_on_device(DEVICE_UPDATES[device_updates], 2, offloaded_block_inputs=on_host)
    expected = run(choices, dtype="float32")
    for name in ("gradients on the GPU", "all"):
        for late in LATE:
            choices_of_family = choices.changed(**PLAN_FAMILIES[name])
            assert_same_bits(run(choices_of_family, late, dtype="float32"), expected)


def test_the_embedding_of_a_tied_model_keeps_its_gradient_too():
    expected = run(BASE, tied=True)
    on_gpu = BASE.changed(gradients_on_gpu=True)
    assert_same_bits(run(on_gpu, tied=True), expected)
    with pytest.raises(ValueError, match="tied model cannot share"):
        run(BASE.changed(embed_and_head=EmbedAndHead.SHARED_SLOT), tied=True)


def test_a_step_that_is_not_applied_changes_nothing():
    """Its kept gradients never leave the device."""
    plain = plain_model(tiny_config("qwen3"))
    engine = streamed(plain, BASE.changed(gradients_on_gpu=True), dtype="bfloat16")
    engine.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    engine.engine.drain()
    engine.host_states.tensor("block 1", "weight_high")[0] = torch.inf
    planes = [
        engine.host_states.tensor(unit, name)
        for unit in engine.host_states.layouts
        for name in ("weight_high", "weight_low", "exp_avg", "exp_avg_sq")
    ]
    before = [plane.clone() for plane in planes]
    with pytest.raises(NonFiniteError):
        engine.engine.train_step(2, random_batches(2, seed=2), 1e-2)
        engine.engine.drain()
    assert_same_bits(planes, before)
    engine.close()


def test_block_inputs_never_wait_for_kept_gradients():
    """They leave on another lane than block inputs do, and each waits for the summary."""
    blocks = [f"block {number}" for number in range(4)]
    choices = BASE.changed(
        offloaded_block_inputs=True, gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT
    )
    numel = dict.fromkeys(["embed", *blocks, "head"], 10)
    plan = build_step_plan(blocks, False, choices, PlaneSizes(numel=numel))
    verify_plan(plan)
    sent = [op for op in plan.ops if isinstance(op, OffloadKeptGradient)]
    assert [op.unit for op in sent] == ["embed", *blocks, "head"]
    assert {op.lane for op in plan.ops if "block_input" in op.kind} == {Lane.H2D, Lane.D2H}
    summary = next(op.index for op in plan.ops if op.kind == "summary")
    assert summary in sent[0].waits and sent[0].index > summary
    fetched = [op.unit for op in plan.ops if isinstance(op, Prefetch)]
    assert fetched.count("embed") == 2 and fetched.count("head") == 1


def test_neither_memory_of_the_host_nor_of_the_device_is_more_than_counted():
    plain = plain_model(tiny_config("qwen3"))
    choices = BASE.changed(gradients_on_gpu=True)
    engine = streamed(plain, choices, dtype="bfloat16")
    units = {unit.name: unit.layout.numel for unit in engine.model.units}
    assert engine.host_states.allocated == ("adamw", False)
    assert engine.host_states.ram.nbytes == 12 * sum(units.values())
    chunk = max(size for unit, size in units.items() if unit.startswith("block"))
    rings = engine.engine._context.gradient_rings.values()
    assert [each.nbytes for each in rings] == [2 * chunk] * GRADIENT_RINGS
    engine.close()

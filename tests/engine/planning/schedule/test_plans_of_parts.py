"""Laws 2 and 3 where parts of a model are trained: any plan gives the same bits, its ops are those
that frozen units leave, and delays change nothing.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import EmbedAndHead, PlanChoices, PlaneSizes
from engine.planning.schedule.ops import Lane, MainGrad, OpKind
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.verify_plan import verify_plan
from tests.support.optimizers import ROUNDED
from tests.support.plans_of_parts import BASE, PARTS, planes_after
from tests.support.same_bits import GRID, DelayedBackend, assert_same_bits, find_dropped_waits

pytestmark = pytest.mark.computing

BLOCKS = [f"block {at}" for at in range(4)]
UNITS = ("embed", *BLOCKS, "head")
SAME_BITS = {
    "one slot": dict(slots=1),
    "three slots": dict(slots=3, prefetch_depth=2),
    "resident": dict(blocks_kept_in_slots=2),
    "kept": dict(blocks_without_recompute=1),
    "kept, one slot": dict(blocks_without_recompute=1, slots=1),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "GPU-resident": dict(gpu_resident_units=2),
    "all GPU-resident": dict(gpu_resident_units=6),
    "GPU-resident apart": dict(gpu_resident_units=3, gpu_resident_apart=True),
    "GPU-resident and resident": dict(
        gpu_resident_units=3, blocks_kept_in_slots=1, blocks_without_recompute=1
    ),
    "shared embed and head slot": dict(embed_and_head=EmbedAndHead.SHARED_SLOT),
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "gradients on the GPU, shared embed and head slot": dict(
        gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT
    ),
    "rounds on the device": dict(rounds=2, main_grad=MainGrad.DEVICE),
    "rounds, gradients on the GPU": dict(
        rounds=2, main_grad=MainGrad.DEVICE, gradients_on_gpu=True
    ),
}


@pytest.fixture(scope="module")
def reference():
    return {
        (name, dtype, tied): planes_after(BASE, PARTS[name], dtype=dtype, tied=tied)
        for name, dtype, tied in itertools.product(PARTS, ("float32", "bfloat16"), (False, True))
    }


def allows(name: str, parts: str, tied: bool) -> bool:
    """Whether a plan is possible and adds in the same order: only blocks with a backward keep
    activations, and the embedding of a tied model shares no slot and is accumulated at both ends of
    a round.
    """
    if "blocks_without_recompute" in SAME_BITS[name] and parts == "head" and not tied:
        return False
    return not tied or not SAME_BITS[name].keys() & {"embed_and_head", "rounds"}


POSSIBLE = [
    (name, parts, dtype, tied)
    for name, parts, dtype, tied in itertools.product(
        SAME_BITS, PARTS, ("float32", "bfloat16"), (False, True)
    )
    if allows(name, parts, tied)
]


@pytest.mark.parametrize("name, parts, dtype, tied", POSSIBLE)
def test_any_plan_gives_the_same_bits(reference, name, parts, dtype, tied):
    choices = BASE.changed(**SAME_BITS[name])
    found = planes_after(choices, PARTS[parts], dtype=dtype, tied=tied)
    assert_same_bits(found, reference[parts, dtype, tied])


@pytest.mark.parametrize("on_disk", [1, 3, 6])
def test_moments_on_the_disk_give_the_same_bits(reference, on_disk, tmp_path):
    choices = BASE.changed(disk_offloaded_units=on_disk)
    for name in PARTS:
        found = planes_after(choices, PARTS[name], dtype="bfloat16", disk=tmp_path)
        assert_same_bits(found, reference[name, "bfloat16", False])


@pytest.mark.parametrize("count", [1, 2])
def test_block_inputs_on_the_disk_give_the_same_bits(reference, count, tmp_path):
    choices = BASE.changed(offloaded_block_inputs=True, disk_offloaded_block_inputs=count)
    for name in ("last block", "in the middle"):
        found = planes_after(choices, PARTS[name], dtype="bfloat16", disk=tmp_path)
        assert_same_bits(found, reference[name, "bfloat16", False])
    with pytest.raises(
        ValueError, match="3 block inputs cannot be on the disk where a step keeps 2"
    ):
        more = choices.changed(disk_offloaded_block_inputs=3)
        planes_after(more, PARTS["last block"], disk=tmp_path)


@pytest.mark.parametrize("optimizer", ROUNDED)
def test_rounded_moments(optimizer):
    """The moments of frozen parameters are nowhere, and those of the others are in their places."""
    for parts in PARTS.values():
        first = planes_after(BASE, parts, dtype="bfloat16", optimizer=optimizer)
        choices = BASE.changed(slots=3, blocks_without_recompute=0, blocks_kept_in_slots=1)
        again = planes_after(choices, parts, dtype="bfloat16", optimizer=optimizer)
        assert_same_bits(again, first)


@pytest.mark.parametrize(
    "lanes",
    [(Lane.H2D,), (Lane.D2H,), (Lane.HOST,), (Lane.COMPUTE,), (Lane.H2D, Lane.D2H, Lane.HOST)],
    ids="+".join,
)
@pytest.mark.parametrize("parts", PARTS)
def test_delays_in_any_lane_change_nothing(reference, lanes, parts):
    found = planes_after(BASE, PARTS[parts], backend=DelayedBackend(lanes))
    assert_same_bits(found, reference[parts, "float32", False])


@pytest.mark.parametrize("home", ["embed", "block 1", "block 3", "head"])
def test_the_optimizer_on_the_device_gives_nearly_the_same(home, reference):
    """Both devices round alike but for the last bits."""
    parts, units = PARTS["around"], ("embed", "block 1", "block 3", "head")
    trained = ("embed", "block 3", "head")
    choices = BASE.changed(device_updated_units=(home,), update_buffers=2)
    if home not in trained:
        with pytest.raises(ValueError, match="have no optimizer"):
            planes_after(choices, parts)
        return
    assert home in units
    for mine, other in zip(planes_after(choices, parts), reference["around", "float32", False]):
        torch.testing.assert_close(
            mine.view(torch.float32), other.view(torch.float32), rtol=1e-3, atol=1e-6
        )


# ------------------------------------------------------------------ plans alone

FROZEN = [
    ("embed", "block 0", "block 1", "head"),
    ("embed", "block 0", "block 1", "block 2", "block 3"),
    ("block 0", "block 1", "block 2", "block 3", "head"),
    ("block 1", "block 3"),
    ("embed", "head"),
]


def plan_of(frozen: tuple[str, ...], choices: PlanChoices, tied: bool = False) -> StepPlan:
    numel = dict.fromkeys(UNITS, 100) | dict.fromkeys(frozen, 0)
    return build_step_plan(BLOCKS, tied, choices, PlaneSizes(numel=numel, frozen=frozen))


def back(frozen: tuple[str, ...]) -> list[str]:
    first = min(at for at, unit in enumerate(UNITS) if unit not in frozen)
    return [unit for unit in UNITS[first:] if unit in BLOCKS]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_every_plan_of_a_size_grid_validates(frozen, tied):
    for choices in GRID:
        if choices.activations.blocks_without_recompute <= len(back(frozen)):
            verify_plan(plan_of(frozen, choices, tied))


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_plans_with_device_updates_validate(frozen):
    trained = [unit for unit in UNITS if unit not in frozen]
    for count, buffers, shares in itertools.product(range(1, 5), (1, 3), (False, True)):
        for main_grad, rounds in ((MainGrad.VERTICAL, 1), (MainGrad.DEVICE, 2)):
            verify_plan(
                plan_of(
                    frozen,
                    PlanChoices().changed(
                        micro_batches=2,
                        rounds=rounds,
                        main_grad=main_grad,
                        device_updated_units=tuple(trained[:count]),
                        update_buffers=buffers,
                        update_chunks=2,
                        gradients_on_gpu=shares,
                        embed_and_head=EmbedAndHead.SHARED_SLOT
                        if shares
                        else EmbedAndHead.OWN_SLOTS,
                        blocks_kept_in_slots=1,
                    ),
                )
            )


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_a_frozen_unit_has_no_gradient_and_no_update(frozen):
    ops = plan_of(frozen, PlanChoices().changed(micro_batches=2)).ops
    trained = [unit for unit in UNITS if unit not in frozen]
    for kind in (OpKind.REDUCE, OpKind.OFFLOAD, OpKind.UPDATE):
        assert sorted(op.unit for op in ops if op.kind == kind) == sorted(trained), kind
    backs = [op.unit for op in ops if op.kind == OpKind.BACKWARD]
    assert backs == [unit for unit in reversed(back(frozen)) for _ in range(2)]
    has_embed = any(op.kind == OpKind.EMBED_BACKWARD for op in ops)
    assert has_embed == ("embed" not in frozen)


def test_what_lies_below_keeps_and_fetches_nothing():
    frozen = FROZEN[0]
    ops = plan_of(frozen, PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True)).ops
    stored = [op.unit for op in ops if op.kind == OpKind.OFFLOAD_BLOCK_INPUT]
    assert sorted(set(stored)) == ["block 2", "block 3"]
    fetched = [op.unit for op in ops if op.kind == OpKind.PREFETCH]
    # With two slots, the two blocks that have a backward are there when it begins.
    assert sorted(fetched) == sorted(UNITS)


def test_a_block_is_updated_in_its_slot_if_the_next_step_finds_it_there():
    """The next step begins with the first blocks, of which some have no backward."""
    device_updates = PlanChoices().changed(
        micro_batches=2, device_updated_units=("block 2", "block 3"), update_buffers=2
    )
    assert plan_of(FROZEN[0], device_updates).placed == ()
    resident = device_updates.changed(blocks_kept_in_slots=1)
    assert [unit for unit, _ in plan_of(FROZEN[0], resident).placed] == ["block 3"]
    others = device_updates.changed(device_updated_units=("block 0", "block 2"))
    assert [unit for unit, _ in plan_of(FROZEN[3], others).placed] == ["block 0"]
    second = device_updates.changed(device_updated_units=("block 1", "block 2"))
    plan = plan_of(("embed", "block 0"), second)
    verify_plan(plan)
    assert [unit for unit, _ in plan.placed] == ["block 1"]
    assert not any(op.kind == OpKind.PREFETCH and op.unit == "block 1" for op in plan.ops[:20])


def test_every_wait_of_such_a_plan_is_needed():
    for frozen in FROZEN[:3]:
        choices = PlanChoices().changed(
            micro_batches=2, offloaded_block_inputs=True, block_input_rings=2
        )
        assert len(find_dropped_waits(plan_of(frozen, choices))) > 10


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(blocks_per_saved_input=2), "trained whole"),
        (dict(blocks_without_recompute=3), "3 blocks keep activations, and 2 have a backward"),
        (dict(gpu_resident_units=6, graphs=True), "recorded only where all of them"),
        (dict(device_updated_units=("block 0",), update_buffers=1), "have no optimizer"),
    ],
)
def test_contradictions(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_of(FROZEN[0], PlanChoices().changed(micro_batches=2, **changes))


def test_something_is_trained():
    with pytest.raises(ValueError, match="nothing is trained"):
        plan_of(UNITS, PlanChoices().changed(micro_batches=2))

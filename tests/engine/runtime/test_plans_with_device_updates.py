"""Plans with states that are updated on the device validate, update everything once and need each
of their waits.
"""

from __future__ import annotations

import pytest

from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.grid import grid
from engine.planning.schedule.ops import DISK_LANES, Lane
from engine.planning.schedule.verify_plan import verify_plan
from tests.support.device_updates import MAIN_GRAD_PLANS
from tests.support.same_bits import find_dropped_waits

pytestmark = pytest.mark.computing


# ---------------------------------------------------------------------- plans


def plans(depth: int):
    """Plans with many updates on the device, and units of very different sizes, so that chunks
    are many.
    """
    blocks = [f"block {k}" for k in range(depth)]
    numel = {block: 100 + 10 * (k % 2) for k, block in enumerate(blocks)} | {
        "embed": 250,
        "head": 310,
    }
    for device_updates in (("embed",), ("head",), tuple(blocks[::2]), ("embed", *blocks, "head")):
        for tied in (False, True):
            for micro_batches, rounds, main_grad in (
                (1, 1, "vertical"),
                (4, 2, "device"),
                (4, 2, "host"),
            ):
                for slots, resident, kept in ((1, 0, 0), (2, 2, 1), (3, 0, 4), (2, depth, depth)):
                    for buffers in (1, 2, 3, 8) if kept else (1, 3):
                        choices = PlanChoices().changed(
                            micro_batches=micro_batches,
                            rounds=rounds,
                            main_grad=main_grad,
                            slots=slots,
                            blocks_kept_in_slots=resident,
                            blocks_without_recompute=kept,
                            device_updated_units=device_updates,
                            update_buffers=buffers,
                            offloaded_block_inputs=buffers == 2,
                            prefetch_depth=max(1, slots - 1),
                        )
                        plan = build_step_plan(blocks, tied, choices, PlaneSizes(numel=numel))
                        yield plan, numel, choices


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("depth", [4, 9])
def test_plans_with_device_updates_validate_and_update_everything_once(depth):
    for plan, numel, choices in plans(depth):
        verify_plan(plan)
        chunks = {
            unit: [op.chunk for op in plan.ops if op.kind == "device_update" and op.unit == unit]
            for unit in numel
        }
        on_host = [op.unit for op in plan.ops if op.kind == "update"]
        assert sorted(on_host) == sorted(set(numel) - set(choices.updates.device_updated_units))
        for unit in choices.updates.device_updated_units:
            covered = [k for start, stop in chunks[unit] for k in range(start, stop)]
            assert covered == list(range(numel[unit]))
            assert all(b - a <= plan.chunk_numel for a, b in chunks[unit])
            for kind in ("fetch_states", "offload_weights", "offload_states"):
                found = [op.chunk for op in plan.ops if op.kind == kind and op.unit == unit]
                assert found == chunks[unit]
        used = {op.buffer for op in plan.ops if op.kind == "device_update"}
        assert used == set(plan.update_buffers[: sum(map(len, chunks.values()))])
        assert len(plan.update_buffers) == choices.updates.update_buffers
        assert {unit for unit, _ in plan.placed} == {
            op.unit for op in plan.ops if op.kind == "device_update" and op.slot is not None
        }
        for (
            unit,
            slot,
        ) in plan.placed:  # its first use in a step finds it where the step before updated it
            own = [
                op
                for op in plan.ops
                if op.unit == unit and op.kind in ("prefetch", "embed", "forward", "loss")
            ]
            assert own[0].kind != "prefetch" and own[0].slot == slot


BLOCKS = [f"block {k}" for k in range(8)]


@pytest.mark.parametrize(
    "device_updates",
    [("embed", *BLOCKS[:3], *BLOCKS[5:7], "head"), (*BLOCKS[3:6], BLOCKS[7])],
    ids=["from the first", "of the middle"],
)
@pytest.mark.parametrize("main_grad", MAIN_GRAD_PLANS)
def test_dropping_any_single_wait_of_a_plan_with_device_updates_is_found(main_grad, device_updates):
    choices = PlanChoices().changed(
        micro_batches=2,
        device_updated_units=device_updates,
        update_buffers=3,
        blocks_without_recompute=4,
        blocks_kept_in_slots=2,
        **MAIN_GRAD_PLANS[main_grad],
    )
    sizes = PlaneSizes(numel=dict.fromkeys(BLOCKS, 100) | {"embed": 250, "head": 310})
    plan = build_step_plan(BLOCKS, False, choices, sizes)
    verify_plan(plan)
    # Sums over several rounds are at the front, others at the end of the memory that they share.
    assert (plan.arena[0][1] == 0) == (main_grad == "device")
    dropped = set(find_dropped_waits(plan))
    kinds = {kind for kind, _ in dropped}
    assert kinds >= {
        "fetch_states",
        "device_update",
        "offload_weights",
        "prefetch",
        "optimizer_step",
    }
    assert (
        "fetch_gradient" in kinds or device_updates[0] == "embed"
    )  # what embed's gradient needs comes after all others'
    if main_grad == "device":  # states over sums: neither may come while the others are needed
        assert {("fetch_states", "waits"), ("backward", "waits_previous")} <= dropped


def test_device_updates_without_buffers_and_device_updates_of_no_unit_are_refused():
    for changes in (
        dict(device_updated_units=("embed",)),
        dict(device_updated_units=("nothing",), update_buffers=1),
    ):
        with pytest.raises(ValueError, match="buffers for the optimizers"):
            build_step_plan(
                ["block 0"],
                False,
                PlanChoices().changed(**changes),
                PlaneSizes(numel={"embed": 1, "block 0": 1, "head": 1}),
            )


def test_lanes_of_device_updates_are_columns_of_the_grid():
    plan = build_step_plan(
        ["block 0", "block 1"],
        False,
        PlanChoices().changed(device_updated_units=("block 0",), update_buffers=2),
        PlaneSizes(numel={"embed": 9, "block 0": 4, "block 1": 4, "head": 9}),
    )
    text = grid(plan)
    # No gradient is kept on the GPU, nothing is on the disk, and there are no other ranks.
    without = (Lane.GRADIENTS_OUT, Lane.COLLECTIVE, *DISK_LANES)
    lanes = [lane for lane in Lane if lane not in without]
    assert text.splitlines()[0].split() == " ".join(["op", *lanes, "waits for"]).split()
    assert "device_update block 0" in text
    assert "update block 0" not in text.replace("device_update block 0", "")

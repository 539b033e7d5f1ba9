"""Laws 2 and 3 on the CPU: any plan gives the same bits, and a missing wait is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.planning.schedule.buffers import Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import EmbedAndHead, PlanChoices, PlaneSizes
from engine.planning.schedule.grid import grid
from engine.planning.schedule.ops import Lane, MainGrad
from engine.planning.schedule.verify_plan import PlanError, verify_plan
from tests.support.same_bits import (
    BASE,
    GRID,
    LATE_MOMENTS,
    SAME_BITS,
    DelayedBackend,
    assert_same_bits,
    find_dropped_waits,
    planes_after,
)

pytestmark = pytest.mark.computing


@pytest.fixture(scope="module")
def reference():
    return {
        (dtype, tied): planes_after(BASE, dtype=dtype, tied=tied)
        for dtype in ("float32", "bfloat16")
        for tied in (False, True)
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAME_BITS | LATE_MOMENTS)
def test_any_plan_gives_the_same_bits(reference, name, dtype, tied):
    choices = BASE.changed(**(SAME_BITS | LATE_MOMENTS)[name])
    assert_same_bits(planes_after(choices, dtype=dtype, tied=tied), reference[dtype, tied])


def test_dropout_draws_the_same_numbers_in_the_recompute():
    recomputed = planes_after(BASE, family="gpt2", dropout=0.2)
    assert_same_bits(
        planes_after(
            BASE.changed(blocks_kept_in_slots=3, blocks_without_recompute=3),
            family="gpt2",
            dropout=0.2,
        ),
        recomputed,
    )
    without = planes_after(BASE, family="gpt2")
    assert any(not torch.equal(a, b) for a, b in zip(recomputed, without))


def test_sum_over_rounds_in_bf16_differs_by_rounding_only(reference):
    """On the device the accumulator is fp32 over all rounds: the same sum in the same order, so the
    same bits.
    """
    vertical = planes_after(BASE, dtype="bfloat16")
    device = planes_after(BASE.changed(rounds=2, main_grad="device"), dtype="bfloat16")
    assert_same_bits(device, vertical)
    host = planes_after(BASE.changed(rounds=2, main_grad="host"), dtype="bfloat16", steps=1)
    once = planes_after(BASE, dtype="bfloat16", steps=1)
    gradients = [(a.float(), b.float()) for k, (a, b) in enumerate(zip(host, once)) if k % 5 == 4]
    norm = torch.cat([b for _, b in gradients]).norm()
    error = torch.cat([a - b for a, b in gradients]).norm() / norm
    assert 0 < error < 3e-3


@pytest.mark.parametrize(
    "lanes",
    [
        (Lane.H2D,),
        (Lane.D2H,),
        (Lane.HOST,),
        (Lane.H2D, Lane.D2H),
        (Lane.D2H, Lane.HOST),
        (Lane.H2D, Lane.HOST),
        (Lane.H2D, Lane.D2H, Lane.HOST),
        (Lane.COMPUTE,),
    ],
    ids="+".join,
)
@pytest.mark.parametrize(
    "name",
    [
        "base",
        "block inputs on the host",
        "deep prefetch",
        "one kept",
        "rounds",
        "pairs",
        "pairs on the host",
        "pairs on the host, all resident",
    ],
)
def test_delays_in_any_lane_change_nothing(reference, lanes, name):
    changes = {
        "base": {},
        "rounds": dict(rounds=2, main_grad="host", micro_batches=2),
    } | SAME_BITS
    choices = BASE.changed(**changes[name])
    expected = planes_after(choices) if name == "rounds" else reference["float32", False]
    assert_same_bits(planes_after(choices, backend=DelayedBackend(lanes)), expected)


# ---------------------------------------------------------------------- the validator


@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_plan_of_a_size_grid_validates(depth, tied):
    for choices in GRID:
        verify_plan(build_step_plan([f"block {k}" for k in range(depth)], tied, choices))


def test_dropping_any_single_wait_is_found():
    """The builder keeps only waits that nothing else implies, so every one of them is needed."""
    plan = build_step_plan(
        [f"block {k}" for k in range(4)],
        False,
        PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True, block_input_rings=2),
    )
    assert len(find_dropped_waits(plan)) > 20
    embed_and_head = build_step_plan(
        [f"block {k}" for k in range(4)],
        False,
        PlanChoices().changed(
            micro_batches=2,
            gradients_on_gpu=True,
            embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS,
        ),
        PlaneSizes(
            numel={"embed": 16, "head": 17} | {f"block {k}": 10 for k in range(4)}, embed_chunk=8
        ),
    )
    assert len(find_dropped_waits(embed_and_head)) > 20


def test_a_wrong_slot_is_found_and_shown():
    plan = build_step_plan(["block 0", "block 1"], False, PlanChoices())
    ops = list(plan.ops)
    k = next(i for i, op in enumerate(ops) if op.kind == "prefetch" and op.unit == "block 1")
    slot = Buffer(BufferKind.SLOT, number=0)
    ops[k] = dataclasses.replace(
        ops[k], slot=slot, writes=((slot, Content(ContentKind.WEIGHTS, "block 1")),)
    )
    with pytest.raises(PlanError, match="(expects|overwrites)") as raised:
        verify_plan(dataclasses.replace(plan, ops=tuple(ops)))
    (marked,) = [line for line in str(raised.value).splitlines() if line.startswith("->")]
    broken = int(str(raised.value).split()[1])
    assert marked.split()[1] == str(broken) and ops[broken].label in marked


def test_a_plan_reads_as_a_grid():
    text = grid(
        build_step_plan(["block 0", "block 1"], True, PlanChoices().changed(micro_batches=2))
    )
    assert text.splitlines()[0].split() == ["op", "H2D", "COMPUTE", "D2H", "HOST", "waits", "for"]
    assert "forward block 1[0]" in text
    assert "update head" in text
    assert "previous" in text


def test_contradicting_choices_are_refused():
    for choices in (
        PlanChoices().changed(micro_batches=3, rounds=2, main_grad="host"),
        PlanChoices().changed(blocks_without_recompute=2),
        PlanChoices().changed(main_grad=MainGrad.HOST),
        PlanChoices().changed(moments_after_weights=True, gradients_on_gpu=True),
        PlanChoices().changed(moments_after_weights=True, disk_offloaded_units=1),
    ):
        with pytest.raises(ValueError):
            build_step_plan(["block 0"], False, choices)


def test_a_buffer_is_used_as_a_whole_or_in_parts():
    """A wait between the whole and a part would not be seen to be missing."""
    plan = build_step_plan(["block 0", "block 1"], False, BASE)
    slot = Buffer(BufferKind.SLOT, number=0)
    changed = [
        dataclasses.replace(
            op, reads=tuple((b.part(1) if b == slot else b, content) for b, content in op.reads)
        )
        for op in plan.ops
    ]
    with pytest.raises(PlanError, match="uses a part of slot 0, which .* uses as a whole"):
        verify_plan(dataclasses.replace(plan, ops=tuple(changed)))

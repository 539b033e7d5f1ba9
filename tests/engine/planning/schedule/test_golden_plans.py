"""Plans of some choices stand as text beside this file: a change of the planner is a difference of
lines.

`python -m tests.engine.planning.schedule.test_golden_plans` writes them anew; read the difference
before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.planning.schedule.build import build_forward_plan, build_step_plan
from engine.planning.schedule.choices import EmbedAndHead, PlanChoices, PlaneSizes
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.verify_plan import verify_plan
from tests.support.plan_text import OP_TYPES, from_text, to_text

FOLDER = Path(__file__).parent / "golden"
BLOCKS = ["block 0", "block 1", "block 2", "block 3"]
NUMEL = dict.fromkeys(BLOCKS, 100) | {"embed": 250, "head": 310}
SMALL_OUTER = PlaneSizes(numel=NUMEL | {"embed": 180, "head": 190}, embed_chunk=90)
OF_RANKS = PlaneSizes(numel={unit: 10 * numel for unit, numel in NUMEL.items()}, rank=1)
DEVICE_UPDATES = ("embed", "block 0", "block 1", "head")

CHOICES = {
    "vertical": PlanChoices().changed(micro_batches=2),
    "host-block-inputs": PlanChoices().changed(
        micro_batches=3, offloaded_block_inputs=True, block_input_rings=2, slots=3, prefetch_depth=2
    ),
    "saved-attention": PlanChoices().changed(
        offloaded_block_inputs=True,
        block_input_rings=1,
        blocks_without_recompute=1,
        tile_tokens=16_384,
        attention_blocks=2,
        attention_bytes=7280,
    ),
    "kept-and-in-slots": PlanChoices().changed(
        micro_batches=2, blocks_without_recompute=2, blocks_kept_in_slots=1, compiled=True
    ),
    "rounds-on-the-device": PlanChoices().changed(
        micro_batches=2,
        rounds=2,
        main_grad=MainGrad.DEVICE,
        blocks_without_recompute=4,
        slots=3,
        prefetch_depth=2,
    ),
    "rounds-on-the-host": PlanChoices().changed(
        micro_batches=4, rounds=2, main_grad=MainGrad.HOST, offloaded_block_inputs=True
    ),
    "kept-gradients": PlanChoices().changed(
        micro_batches=2,
        gradients_on_gpu=True,
        embed_and_head=EmbedAndHead.SHARED_SLOT,
        device_updated_units=("block 1",),
        update_buffers=1,
    ),
    "kept-gradients-of-rounds": PlanChoices().changed(
        micro_batches=2,
        rounds=2,
        main_grad=MainGrad.DEVICE,
        gradients_on_gpu=True,
        device_updated_units=("embed", "block 1"),
        update_buffers=2,
    ),
    "gpu-resident": PlanChoices().changed(
        micro_batches=4,
        rounds=2,
        main_grad=MainGrad.DEVICE,
        gpu_resident_units=2,
        device_updated_units=("block 2",),
        update_buffers=1,
    ),
    "disk-offload": PlanChoices().changed(
        micro_batches=2, gpu_resident_units=1, disk_offloaded_units=2
    ),
    "disk-offload-and-kept-gradients": PlanChoices().changed(
        micro_batches=2, gradients_on_gpu=True, disk_offloaded_units=3
    ),
    "disk-offloaded-block-inputs": PlanChoices().changed(
        micro_batches=2,
        offloaded_block_inputs=True,
        disk_offloaded_block_inputs=2,
        disk_offloaded_units=1,
    ),
    "embed-and-head-in-kept-gradients": PlanChoices().changed(
        micro_batches=2,
        gradients_on_gpu=True,
        embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS,
        device_updated_units=("embed", "block 1"),
        update_buffers=2,
    ),
    "pairs": PlanChoices().changed(
        micro_batches=2,
        blocks_per_saved_input=2,
        offloaded_block_inputs=True,
        blocks_without_recompute=1,
        slots=3,
    ),
    "ranks": PlanChoices().changed(micro_batches=2, ranks=2),
    "ranks-with-device-updates": PlanChoices().changed(
        micro_batches=2,
        ranks=2,
        rounds=2,
        main_grad=MainGrad.DEVICE,
        gradients_on_gpu=True,
        embed_and_head=EmbedAndHead.SHARED_SLOT,
        device_updated_units=("embed", "block 1"),
        update_buffers=2,
    ),
    "ranks-with-main-grad-shards": PlanChoices().changed(
        micro_batches=2, ranks=2, rounds=2, main_grad=MainGrad.SHARDS, blocks_without_recompute=1
    ),
    "ranks-with-moments-after-weights": PlanChoices().changed(
        micro_batches=2, ranks=2, gpu_resident_units=2, moments_after_weights=True
    ),
    "ranks-with-unsharded-reads": PlanChoices().changed(
        micro_batches=2,
        ranks=2,
        unsharded_reads=True,
        device_updated_units=("embed",),
        update_buffers=1,
    ),
    "ranks-with-gpu-resident-units": PlanChoices().changed(
        micro_batches=2, ranks=2, gpu_resident_units=3
    ),
    "replicas": PlanChoices().changed(
        micro_batches=2, replicas=2, device_updated_units=("block 1",), update_buffers=1
    ),
    "replicas-of-ranks": PlanChoices().changed(
        micro_batches=2, replicas=3, ranks=2, blocks_kept_in_slots=1
    ),
    "last-blocks": PlanChoices().changed(
        micro_batches=2,
        offloaded_block_inputs=True,
        blocks_without_recompute=1,
        gpu_resident_units=1,
        slots=3,
    ),
    "frozen-in-the-middle": PlanChoices().changed(
        micro_batches=2,
        rounds=2,
        main_grad=MainGrad.DEVICE,
        gradients_on_gpu=True,
        embed_and_head=EmbedAndHead.SHARED_SLOT,
        device_updated_units=("block 1",),
        update_buffers=1,
    ),
    "updates-on-the-device": PlanChoices().changed(
        micro_batches=2, device_updated_units=DEVICE_UPDATES, update_buffers=2
    ),
}
FROZEN = {
    "last-blocks": ("embed", "block 0", "block 1", "head"),
    "frozen-in-the-middle": ("embed", "block 0", "block 2"),
}
FORWARD = {
    "forward": PlanChoices().changed(micro_batches=2),
    "forward-in-groups": PlanChoices().changed(micro_batches=3, rounds=2, blocks_kept_in_slots=2),
    "forward-held": PlanChoices().changed(micro_batches=3, rounds=2, blocks_kept_in_slots=2),
}


def plan_of(name: str) -> StepPlan:
    if name in FORWARD:
        return build_forward_plan(BLOCKS, True, FORWARD[name], held=name == "forward-held")
    sizes = (
        SMALL_OUTER
        if CHOICES[name].streaming.embed_and_head_in_kept_gradients
        else PlaneSizes(numel=NUMEL, disk_chunk_numel=30)
    )
    if name in FROZEN:
        sizes = PlaneSizes(numel=NUMEL | dict.fromkeys(FROZEN[name], 0), frozen=FROZEN[name])
    if CHOICES[name].sharding.ranks > 1:
        sizes = OF_RANKS
    return build_step_plan(BLOCKS, name == "vertical", CHOICES[name], sizes)


NAMES = [*CHOICES, *FORWARD]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_the_one_that_stands_as_text(name):
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert to_text(plan_of(name)) == text
    assert from_text(text) == plan_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_was_read_back_is_as_sound(name):
    verify_plan(from_text(to_text(plan_of(name))))


def test_the_plans_have_every_kind_of_op():
    assert {op.kind for name in NAMES for op in plan_of(name).ops} == set(OP_TYPES)


@pytest.mark.parametrize(
    "sound, broken",
    [
        ("slot 0", "slot(block 0"),
        ("slot 0", "no such kind 3"),
        ("slot 0", "slot 0/x"),
        ("slot 0", ""),
        ("slot=", "slut="),
        ("slot=", "ring="),
        ("first=yes", "first=perhaps"),
        ("compiled: no", "compiled: maybe"),
        ("compiled:", "made:"),
        ("   0 H2D    ", "   0 COMPUTE"),
        ("micro_batch=0, ", ""),
        ("\n\n", "\n"),
    ],
)
def test_what_is_no_plan_is_refused(sound, broken):
    text = to_text(plan_of("vertical"))
    assert sound in text
    with pytest.raises(ValueError):
        from_text(text.replace(sound, broken, 1))


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        (FOLDER / f"{name}.txt").write_text(to_text(plan_of(name)), encoding="utf-8")


if __name__ == "__main__":
    write()

"""Parts of a model are trained on lanes that run at once: any plan gives the same bits, whichever
lane is late. Each test also runs without a GPU (`tests.support.lanes`).
"""

from __future__ import annotations

import pytest

from engine.planning.schedule.choices import EmbedAndHead
from engine.planning.schedule.ops import Lane
from tests.support.plans_of_parts import BASE, PARTS, planes_after
from tests.support.same_bits import assert_same_bits

pytestmark = pytest.mark.computing

PLANS = {
    "kept and resident": dict(blocks_without_recompute=1, blocks_kept_in_slots=1),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "GPU-resident": dict(gpu_resident_units=3),
    "GPU-resident apart": dict(gpu_resident_units=3, gpu_resident_apart=True),
    "gradients on the GPU": dict(gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT),
}


@pytest.mark.parametrize("name", ["last block", "in the middle", "around"])
def test_any_plan_gives_the_same_bits(lanes, name):
    expected = planes_after(BASE, PARTS[name], lanes(), dtype="bfloat16")
    for changes in PLANS.values():
        choices = BASE.changed(**changes)
        assert_same_bits(planes_after(choices, PARTS[name], lanes(), dtype="bfloat16"), expected)


@pytest.mark.parametrize("late", [(Lane.COMPUTE,), (Lane.HOST,), (Lane.H2D, Lane.D2H)], ids=str)
def test_delays_change_nothing(lanes, late):
    for name in ("last block", "in the middle"):
        choices = BASE.changed(offloaded_block_inputs=True)
        expected = planes_after(choices, PARTS[name], lanes())
        assert_same_bits(planes_after(choices, PARTS[name], lanes(late)), expected)

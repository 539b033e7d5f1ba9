"""Parts of a model are trained on lanes that run at once: any plan gives the same bits, whichever
lane is late. Each test also runs without a GPU (`tests.support.lanes`).
"""

from __future__ import annotations

import dataclasses

import pytest

from engine.planning.schedule.ops import Lane
from tests.support.plans_of_parts import BASE, PARTS, planes_after
from tests.support.same_bits import assert_same_bits

pytestmark = pytest.mark.computing

PLANS = {
    "kept and resident": dict(kept_blocks=1, resident_blocks=1),
    "host boundaries": dict(host_boundaries=True, boundary_rings=1),
    "settled": dict(settled_units=3),
    "settled apart": dict(settled_units=3, settled_apart=True),
    "parked": dict(parked_gradients=True, shared_outer_slot=True),
}


@pytest.mark.parametrize("name", ["last block", "in the middle", "around"])
def test_any_plan_gives_the_same_bits(lanes, name):
    expected = planes_after(BASE, PARTS[name], lanes(), dtype="bfloat16")
    for changes in PLANS.values():
        choices = dataclasses.replace(BASE, **changes)
        assert_same_bits(planes_after(choices, PARTS[name], lanes(), dtype="bfloat16"), expected)


@pytest.mark.parametrize("late", [(Lane.COMPUTE,), (Lane.HOST,), (Lane.H2D, Lane.D2H)], ids=str)
def test_delays_change_nothing(lanes, late):
    for name in ("last block", "in the middle"):
        choices = dataclasses.replace(BASE, host_boundaries=True)
        expected = planes_after(choices, PARTS[name], lanes())
        assert_same_bits(planes_after(choices, PARTS[name], lanes(late)), expected)

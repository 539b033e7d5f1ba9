"""Block inputs on the disk, on lanes that run at once: the bits are those of block inputs in RAM,
in any plan, whichever lane is late. Each test also runs without a GPU (`tests.support.lanes`).
"""

from __future__ import annotations

import pytest

from engine.planning.layout import disk_chunks
from engine.planning.schedule.ops import DISK_LANES, Lane
from tests.support.block_inputs_on_disk import (
    LAYERS,
    ON_HOST,
    PLAN_FAMILIES,
    planes_after,
    with_block_inputs_on_disk,
)
from tests.support.lanes import find_missing_waits
from tests.support.same_bits import assert_same_bits

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("without a GPU it repeats tests/engine/runtime"),
]

LATE = ((Lane.READ,), (Lane.WRITE,), (Lane.H2D,), (Lane.D2H,), (Lane.COMPUTE,), DISK_LANES)
EACH = ON_HOST.changed(disk_offloaded_block_inputs=3 * LAYERS, micro_batches=3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Moments that are on the disk, too, have more chunks than there are ring buffers."""
    monkeypatch.setattr(disk_chunks, "DISK_CHUNK_NUMEL", 512)


@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
def test_the_bits_are_those_of_block_inputs_in_ram(lanes, plan_family, tmp_path):
    base = ON_HOST.changed(**PLAN_FAMILIES[plan_family])
    expected = planes_after(base, tmp_path, backend=lanes())
    for choices in with_block_inputs_on_disk(base, plan_family):
        assert_same_bits(planes_after(choices, tmp_path, backend=lanes()), expected)


@pytest.mark.parametrize("units", [0, 3], ids=["alone", "beside moments"])
@pytest.mark.parametrize("late", LATE, ids=str)
def test_delays_change_nothing(lanes, late, units, tmp_path):
    expected = planes_after(EACH.changed(disk_offloaded_block_inputs=0), tmp_path, backend=lanes())
    choices = EACH.changed(disk_offloaded_units=units)
    assert_same_bits(planes_after(choices, tmp_path, backend=lanes(late)), expected)


@pytest.mark.parametrize(
    "careless, slow",
    [
        (Lane.READ, Lane.WRITE),
        (Lane.WRITE, Lane.D2H),
        (Lane.H2D, Lane.READ),
        (Lane.D2H, Lane.WRITE),
    ],
)
def test_a_missing_wait_is_found(lanes, careless, slow, tmp_path):
    """The delays have teeth: without the waits of one lane they change the bits."""
    expected = planes_after(EACH, tmp_path, backend=lanes())

    def train_and_compare():
        backend = lanes((slow,), (careless,))
        assert_same_bits(planes_after(EACH, tmp_path, backend=backend), expected)

    find_missing_waits(train_and_compare)

"""Moments on the disk, on lanes that run at once: the bits are those of moments in RAM, in any
plan, whichever lane is late. Each test also runs without a GPU (`tests.support.lanes`).
"""

from __future__ import annotations

import contextlib

import pytest

from engine.errors import DiskOffloadError
from engine.planning.layout import disk_chunks
from engine.planning.schedule.ops import DISK_LANES, Lane
from tests.support.disk_offloaded_units import planes_after, run_of
from tests.support.gpu_resident_units import PLAN_FAMILIES, UNITS
from tests.support.lanes import find_missing_waits
from tests.support.same_bits import BASE, assert_same_bits
from tests.support.tiny import random_batches

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("without a GPU it repeats tests/engine/runtime"),
]

LATE = ((Lane.READ,), (Lane.WRITE,), (Lane.HOST,), (Lane.COMPUTE,), (*DISK_LANES, Lane.HOST))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A unit has more chunks than there are ring buffers."""
    monkeypatch.setattr(disk_chunks, "DISK_CHUNK_NUMEL", 512)


@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
def test_the_bits_are_those_of_moments_in_ram(lanes, plan_family, tmp_path):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    expected = planes_after(base, tmp_path, backend=lanes())
    for count in (1, 3, UNITS):
        choices = base.changed(disk_offloaded_units=count)
        assert_same_bits(planes_after(choices, tmp_path, backend=lanes()), expected)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["plane", "gradients on the GPU"])
@pytest.mark.parametrize("late", LATE, ids=str)
def test_delays_change_nothing(lanes, late, on_gpu, tmp_path):
    base = BASE.changed(gradients_on_gpu=on_gpu)
    expected = planes_after(base, tmp_path, backend=lanes(), steps=3)
    choices = base.changed(gpu_resident_units=1, disk_offloaded_units=3)
    ours = planes_after(choices, tmp_path, backend=lanes(late), steps=3)
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("careless", [Lane.READ, Lane.WRITE, Lane.HOST])
def test_a_missing_wait_is_found(lanes, careless, tmp_path):
    """The delays have teeth: without the waits of one lane they change the bits."""
    slow = {Lane.READ: Lane.WRITE, Lane.WRITE: Lane.HOST, Lane.HOST: Lane.READ}[careless]
    choices = BASE.changed(disk_offloaded_units=UNITS)
    expected = planes_after(choices, tmp_path, backend=lanes(), steps=3)

    def train_and_compare():
        backend = lanes((slow,), (careless,))
        assert_same_bits(planes_after(choices, tmp_path, backend=backend, steps=3), expected)

    find_missing_waits(train_and_compare)


@pytest.mark.parametrize("lane, mixed", [("read_chunk", False), ("write_chunk", True)])
def test_an_error_of_the_disk_ends_the_steps(lanes, lane, mixed, tmp_path, monkeypatch):
    run = run_of(BASE.changed(disk_offloaded_units=2), tmp_path, backend=lanes())
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()

    def refused(*_):
        raise DiskOffloadError("the disk is gone")

    monkeypatch.setattr(run.host_states.placement.disk, lane, refused)
    with pytest.raises(DiskOffloadError, match="the disk is gone"):
        for step in (2, 3, 4):
            run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
        run.engine.drain()
    with contextlib.suppress(DiskOffloadError):  # the lanes must have ended
        run.engine.drain()
    assert run.host_states.held.is_mixed == mixed and run.host_states.held.step == 1
    run.close()

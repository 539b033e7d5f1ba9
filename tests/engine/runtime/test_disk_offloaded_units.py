"""Moments on the disk: they have the bits that they would have in RAM, whichever units' moments are
there and whichever lanes are late.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter

import pytest
import torch

from engine.errors import DiskOffloadError
from engine.planning.layout import disk_chunks
from engine.planning.layout.disk_chunks import PAGE
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlaneSizes
from engine.planning.schedule.offloaded_updates import STATE_RINGS
from engine.planning.schedule.ops import DISK_LANES, Lane, OpKind
from engine.runtime.host.disk_file import DiskFile
from tests.support.disk_offloaded_units import planes_after, run_of
from tests.support.gpu_resident_units import PLAN_FAMILIES, UNITS
from tests.support.optimizers import ROUNDED
from tests.support.same_bits import BASE, assert_same_bits
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.tiny import random_batches

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

COUNTS = (1, 3, UNITS)
"""So many units have their moments there: the head, also some blocks, and all."""
LATE = ((Lane.READ,), (Lane.WRITE,), (Lane.HOST,), (*DISK_LANES, Lane.HOST), Lane)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A unit has more chunks than there are ring buffers."""
    monkeypatch.setattr(disk_chunks, "DISK_CHUNK_NUMEL", 512)


def test_a_step_has_more_chunks_than_ring_buffers(tmp_path):
    run = run_of(BASE.changed(disk_offloaded_units=3), tmp_path)
    kinds = Counter(op.kind for op in run.engine.plan.ops)
    assert kinds[OpKind.READ_STATES] == kinds[OpKind.WRITE_STATES] > 3 * STATE_RINGS
    assert len(run.engine.plan.state_rings) == STATE_RINGS
    run.close()


def test_a_step_is_over_once_its_moments_are_on_the_disk(tmp_path):
    """A checkpoint of the step may read them from then on."""
    run = run_of(BASE.changed(disk_offloaded_units=2), tmp_path)
    *ops, last = run.engine.plan.ops
    assert last.kind == OpKind.OPTIMIZER_STEP
    assert ops[max(op.index for op in ops if op.kind == OpKind.WRITE_STATES)].index in last.waits
    run.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "plan_family", slow_but(PLAN_FAMILIES, ("plain", "gradients on the GPU"), PLAN_SWEEP)
)
def test_the_bits_are_those_of_moments_in_ram(plan_family, tied, tmp_path):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    for dtype in ("bfloat16", "float32") if "main_grads" not in plan_family else ("bfloat16",):
        expected = planes_after(base, tmp_path, dtype=dtype, tied=tied)
        for count in COUNTS:
            choices = base.changed(disk_offloaded_units=count)
            assert_same_bits(planes_after(choices, tmp_path, dtype=dtype, tied=tied), expected)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["plane", "gradients on the GPU"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_small_moments_have_the_same_bits(optimizer, on_gpu, tmp_path):
    base = BASE.changed(gradients_on_gpu=on_gpu)
    expected = planes_after(base, tmp_path, optimizer=optimizer)
    for count in COUNTS:
        choices = base.changed(disk_offloaded_units=count)
        assert_same_bits(planes_after(choices, tmp_path, optimizer=optimizer), expected)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["plane", "gradients on the GPU"])
def test_other_units_may_live_on_the_device(on_gpu, tmp_path):
    base = BASE.changed(gradients_on_gpu=on_gpu)
    expected = planes_after(base, tmp_path)
    for gpu_resident, count in ((1, 2), (2, 3), (4, 1)):
        choices = base.changed(gpu_resident_units=gpu_resident, disk_offloaded_units=count)
        for late in ((), Lane):
            assert_same_bits(planes_after(choices, tmp_path, late), expected)


@pytest.mark.parametrize(
    "plan_family", slow_but(PLAN_FAMILIES, ("plain", "gradients on the GPU"), PLAN_SWEEP)
)
def test_a_late_lane_changes_nothing(plan_family, tmp_path):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    expected = planes_after(base, tmp_path, steps=3)
    for count, late in itertools.product((2, UNITS), LATE):
        choices = base.changed(disk_offloaded_units=count)
        assert_same_bits(planes_after(choices, tmp_path, late, steps=3), expected)


def test_a_file_system_without_direct_access_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", 0)
    choices = BASE.changed(disk_offloaded_units=3)
    expected = planes_after(BASE, tmp_path)
    assert_same_bits(planes_after(choices, tmp_path), expected)


def test_planes_move_between_ram_disk_and_device(tmp_path):
    """Whatever lives where next, the planes hold what they held."""
    run = run_of(BASE, tmp_path, dtype="bfloat16")
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()
    expected = run.kept_planes()
    units = [unit.name for unit in run.model.units]
    in_ram = run.host_states.ram.nbytes
    moves = [((), units), (units[:2], units[2:]), (units, ()), ((), units[:3]), ((), ())]
    for gpu_resident, on_disk in moves:
        run.host_states.placement.arrange(gpu_resident, run.backend, on_disk)
        assert_same_bits(run.kept_planes(), expected)
        assert (
            run.host_states.placement.gpu_resident,
            run.host_states.placement.disk_offloaded,
        ) == (
            set(gpu_resident),
            set(on_disk),
        )
        for unit in on_disk:
            with pytest.raises(KeyError):
                run.host_states.tensor(unit, "exp_avg")
    assert run.host_states.ram.nbytes == in_ram
    assert not run.host_states.placement.disk.nbytes
    run.close()


def test_bytes_of_a_plane_are_read_and_written_wherever_they_begin(tmp_path):
    run = run_of(BASE.changed(disk_offloaded_units=UNITS), tmp_path, dtype="bfloat16")
    states = run.host_states
    for plane in ("exp_avg", "exp_avg_sq"):
        size = states.nbytes("block 1", plane)
        values = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()
        states.put("block 1", plane, 0, values)
        for begin, end in ((0, size), (3, 5), (PAGE - 1, PAGE + 1), (2047, 2049), (size - 7, size)):
            assert (states.content("block 1", plane, begin, end) == values[begin:end]).all()
            values[begin:end] ^= 0x5A
            states.put("block 1", plane, begin, values[begin:end])
            assert (states.content("block 1", plane, 0, size) == values).all()
    assert not states.content("block 0", "exp_avg", 0, 999).any()
    run.close()


def test_nothing_stays_in_the_folder(tmp_path):
    run = run_of(BASE.changed(disk_offloaded_units=UNITS), tmp_path)
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()
    assert run.host_states.placement.disk.nbytes > 0
    assert list(tmp_path.iterdir()) == []
    run.close()


@pytest.mark.parametrize(
    "call, lane, words",
    [
        ("preadv", Lane.READ, "cannot be read (Input/output error)"),
        ("pwritev", Lane.WRITE, "cannot be written (Input/output error)"),
    ],
)
def test_an_error_of_the_disk_is_one_sentence(call, lane, words, tmp_path, monkeypatch):
    run = run_of(BASE.changed(disk_offloaded_units=2), tmp_path)
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()

    def refused(*_):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(DiskOffloadError) as caught:
        run.engine.train_step(2, random_batches(2, seed=2), 1e-2)
        run.engine.drain()
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)
    # A read fails before any update, a write in the middle of them.
    assert run.host_states.held.is_mixed == (lane == Lane.WRITE)
    run.close()


def test_a_full_disk_is_told_before_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DiskOffloadError, match=r"^The disk is full: moments that engine.disk keeps in "
    ):
        run_of(BASE.changed(disk_offloaded_units=2), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_too_early_is_told(tmp_path):
    file = DiskFile(tmp_path, 2 * PAGE)
    memory = memoryview(disk_offload_memory())
    file.read(memory[: 2 * PAGE], 0)
    with pytest.raises(DiskOffloadError, match="the file ends too early"):
        file.read(memory[: 2 * PAGE], PAGE)
    file.close()


def disk_offload_memory():
    from engine.runtime.host.mapped_memory import map_memory

    return map_memory(4 * PAGE)


def test_wrong_choices_are_refused():
    blocks = ["block 0", "block 1", "block 2"]
    sizes = PlaneSizes(numel=dict.fromkeys(("embed", *blocks, "head"), 64))
    for changes, words in (
        (dict(disk_offloaded_units=6), "cannot be on the disk"),
        (dict(gpu_resident_units=3, disk_offloaded_units=3), "where 3 of 5 live on the device"),
        (
            dict(disk_offloaded_units=1, device_updated_units=("embed",), update_buffers=1),
            "cannot be streamed",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            build_step_plan(blocks, False, BASE.changed(**changes), sizes)

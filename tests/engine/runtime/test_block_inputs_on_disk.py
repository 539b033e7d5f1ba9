"""Block inputs on the disk: backward finds what forward has left, however many are there and
whichever lanes are late.
"""

from __future__ import annotations

import functools
import os
from itertools import pairwise

import numpy as np
import pytest

from engine.errors import DiskOffloadError
from engine.machine.offload_folder import mount_of
from engine.planning.layout import disk_chunks
from engine.planning.layout.disk_chunks import PAGE
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlaneSizes
from engine.planning.schedule.offloaded_activations import DISK_RINGS
from engine.planning.schedule.ops import DISK_LANES, Lane, MainGrad, OpKind
from tests.support.block_inputs_on_disk import (
    LAYERS,
    ON_HOST,
    PLAN_FAMILIES,
    planes_after,
    run_of,
    with_block_inputs_on_disk,
)
from tests.support.counted import counted
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

LATE = ((Lane.READ,), (Lane.WRITE,), (Lane.D2H,), (Lane.H2D,), (*DISK_LANES, Lane.COMPUTE), Lane)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Moments that are on the disk, too, have more chunks than there are ring buffers."""
    monkeypatch.setattr(disk_chunks, "DISK_CHUNK_NUMEL", 512)


@functools.cache
def expected_planes(plan_family: str, dtype: str = "float32") -> list:
    """Returns the planes that a plan_family has with all block inputs in RAM."""
    return planes_after(ON_HOST.changed(**PLAN_FAMILIES[plan_family]), None, dtype=dtype)


@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_are_those_of_block_inputs_in_ram(plan_family, dtype, tmp_path):
    base = ON_HOST.changed(**PLAN_FAMILIES[plan_family])
    expected = expected_planes(plan_family, dtype)
    for choices in with_block_inputs_on_disk(base, plan_family):
        assert_same_bits(planes_after(choices, tmp_path, dtype=dtype), expected)


@pytest.mark.parametrize("late", LATE, ids=str)
@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
def test_a_late_lane_changes_nothing(plan_family, late, tmp_path):
    base = ON_HOST.changed(**PLAN_FAMILIES[plan_family])
    expected = expected_planes(plan_family)
    _, *several = with_block_inputs_on_disk(base, plan_family)
    for choices in several:
        assert_same_bits(planes_after(choices, tmp_path, late), expected)


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("late", [(), Lane], ids=["inline", "late"])
@pytest.mark.parametrize("plan_family", ["plain", "rounds", "gradients on the GPU", "pairs"])
def test_moments_may_be_on_the_disk_too(plan_family, late, tmp_path):
    base = ON_HOST.changed(**PLAN_FAMILIES[plan_family])
    expected = expected_planes(plan_family)
    for units in (1, 4):
        for choices in with_block_inputs_on_disk(
            base.changed(disk_offloaded_units=units), plan_family
        ):
            assert_same_bits(planes_after(choices, tmp_path, late), expected)


def test_a_file_system_without_direct_access_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", 0)
    choices = ON_HOST.changed(disk_offloaded_block_inputs=3)
    expected = planes_after(ON_HOST, tmp_path)
    assert_same_bits(planes_after(choices, tmp_path), expected)


def test_block_inputs_on_the_disk_are_spread_over_the_pass(tmp_path):
    choices = ON_HOST.changed(disk_offloaded_block_inputs=10, micro_batches=4)
    run = run_of(choices, tmp_path)
    ops = run.engine.plan.ops
    written = [(op.unit, op.micro_batch) for op in ops if op.kind == OpKind.WRITE_BLOCK_INPUT]
    assert written == [(f"block {block}", turn) for block in range(LAYERS) for turn in (1, 3)]
    read = [(op.unit, op.micro_batch) for op in ops if op.kind == OpKind.READ_BLOCK_INPUT]
    assert read == [(f"block {4 - block}", turn) for block in range(LAYERS) for turn in (1, 3)]
    assert len(run.engine.plan.disk_rings) == DISK_RINGS
    assert (
        run.engine.saved_block_inputs.file_bytes == 10 * PAGE
    )  # 24 x 32 floats are less than a page
    run.close()


@pytest.mark.parametrize("count", [0, 1, 7, 12, 23, 24])
@pytest.mark.parametrize("rounds", [1, 2])
def test_any_number_is_spread_evenly(rounds, count):
    sums = MainGrad.DEVICE if rounds > 1 else MainGrad.VERTICAL
    choices = ON_HOST.changed(
        micro_batches=8, rounds=rounds, main_grad=sums, blocks_without_recompute=2
    )
    found = choices.changed(disk_offloaded_block_inputs=count).block_inputs_on_disk(5)
    assert len(found) == count
    together = 8 // rounds
    places = sorted(
        (turn // together * 3 + block) * together + turn % together for block, turn in found
    )
    gaps = {after - before for before, after in pairwise(places)}
    assert len(gaps) < 2 or max(gaps) - min(gaps) == 1


def test_reads_are_ahead_of_backward(tmp_path):
    """Every buffer is being filled or full before the first block input is fetched from one."""
    choices = ON_HOST.changed(disk_offloaded_block_inputs=LAYERS * 4, micro_batches=4)
    run = run_of(choices, tmp_path)
    ops = run.engine.plan.ops
    reads = [op.index for op in ops if op.kind == OpKind.READ_BLOCK_INPUT]
    fetches = [op.index for op in ops if op.kind == OpKind.FETCH_BLOCK_INPUT]
    assert reads[DISK_RINGS - 1] < fetches[0]
    for fetch, read in zip(fetches, reads[DISK_RINGS:]):
        assert ops[read].waits[-1] == fetch == read - 1
    run.close()


def test_what_was_written_is_counted_in_whole_pages(tmp_path):
    """Shorter micro-batches write less, and evaluation writes nothing."""
    choices = ON_HOST.changed(disk_offloaded_block_inputs=3)
    run = run_of(choices, tmp_path, tokens=24 * 100)
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()
    assert run.host_states.placement.written_bytes == (0, 3 * PAGE)
    run.engine.evaluate(random_batches(2, seed=1))
    assert run.host_states.placement.written_bytes == (0, 3 * PAGE)
    assert run.engine.saved_block_inputs.file_bytes > 3 * 50 * PAGE
    assert list(tmp_path.iterdir()) == []
    run.close()


def test_the_kernel_counts_the_bytes_that_steps_write(tmp_path):
    mount = mount_of(tmp_path)
    if mount is None or mount.kind not in ("ext4", "xfs"):
        pytest.skip("the kernel counts bytes of disks alone")
    choices = ON_HOST.changed(micro_batches=6, disk_offloaded_block_inputs=6 * LAYERS)
    run = run_of(choices, tmp_path)
    before = counted()["write_bytes"]
    for step in range(1, 6):
        run.engine.train_step(step, random_batches(6, seed=step), 1e-2)
    run.engine.drain()
    written = counted()["write_bytes"] - before
    assert run.host_states.placement.written_bytes == (0, 5 * 6 * LAYERS * PAGE)
    assert written == pytest.approx(5 * 6 * LAYERS * PAGE, rel=0.02)
    run.close()


@pytest.mark.parametrize(
    "call, words",
    [
        ("preadv", "cannot be read (Input/output error)"),
        ("pwritev", "cannot be written (Input/output error)"),
    ],
)
def test_an_error_of_the_disk_is_one_sentence_and_nothing_is_applied(
    call, words, tmp_path, monkeypatch
):
    run = run_of(ON_HOST.changed(disk_offloaded_block_inputs=2), tmp_path)
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()
    before = run.kept_planes()

    def refused(*_):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(DiskOffloadError) as caught:
        run.engine.train_step(2, random_batches(2, seed=2), 1e-2)
        run.engine.drain()
    assert str(caught.value).startswith(
        f"Block inputs that engine.disk keeps in {tmp_path} {words}"
    )
    assert not run.host_states.held.is_mixed
    assert_same_bits(run.kept_planes(), before)
    run.close()


def test_a_full_disk_is_told_before_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DiskOffloadError, match=r"^The disk is full: block inputs that engine.disk keeps"
    ):
        run_of(ON_HOST.changed(disk_offloaded_block_inputs=2), tmp_path)


def test_a_folder_is_needed():
    plain = plain_model(tiny_config("qwen3"))
    with pytest.raises(DiskOffloadError, match="set engine.disk to one"):
        streamed(plain, ON_HOST.changed(disk_offloaded_block_inputs=2))


def test_an_engine_that_cannot_be_built_frees_its_file(tmp_path, monkeypatch):
    from engine.runtime.step import streaming_engine

    def short(*_):
        raise MemoryError

    monkeypatch.setattr(streaming_engine, "gradient_rings", short)
    before = np.array(sorted(os.listdir("/proc/self/fd")))
    with pytest.raises(MemoryError):
        run_of(ON_HOST.changed(disk_offloaded_block_inputs=2), tmp_path)
    assert np.array_equal(before, np.array(sorted(os.listdir("/proc/self/fd"))))


def test_wrong_choices_are_refused():
    blocks = [f"block {index}" for index in range(LAYERS)]
    sizes = PlaneSizes(numel=dict.fromkeys(("embed", *blocks, "head"), 64))
    for changes, words in (
        (
            dict(disk_offloaded_block_inputs=11),
            "11 block inputs cannot be on the disk where a step keeps 10",
        ),
        (dict(disk_offloaded_block_inputs=5, blocks_without_recompute=3), "where a step keeps 4"),
        (dict(disk_offloaded_block_inputs=7, blocks_per_saved_input=2), "where a step keeps 6"),
        (
            dict(disk_offloaded_block_inputs=1, offloaded_block_inputs=False),
            "they are on the device",
        ),
        (dict(disk_offloaded_block_inputs=1, ranks=2), "is for one rank"),
    ):
        with pytest.raises(ValueError, match=words):
            build_step_plan(blocks, False, ON_HOST.changed(**changes), sizes)

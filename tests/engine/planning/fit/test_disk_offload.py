"""Moments on the disk in plans and reports: only what does not fit goes there, and its bytes, its
time and its wear are told before a run starts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.machine import disk_rates, offload_folder
from engine.machine.disk_rates import DRAINED_BYTES, DiskRates, store_disk_rates, with_disk
from engine.machine.known_machines import named_machine
from engine.machine.offload_folder import check_offload_folder, mount_of
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import (
    disk_offloaded_bytes,
    gradient_ring_bytes,
    plane_items,
    state_bytes,
)
from engine.planning.fit.choose import choose
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.pool import Held
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import FitStatus
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.layout import disk_chunks
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import DISK_LANES, OpKind
from engine.text import GIB
from engine.tools.cli.pool_text import pool_as_text
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.optimizers import IN_CHUNKS
from tests.support.tiny import plain_model, streamed, tiny_config

ENOUGH = 1 << 50


def chosen_with(ram: float, gpu: float = 23, disk: int = ENOUGH, **changes):
    job = Job(
        big_shape().with_optimizer(changes.get("train__optimizer", "adamw")),
        config(**{"engine__disk": "/disk", "train__batch_size": 16} | changes),
        1024,
    )
    return choose(job, Target("cuda", gpu * GIB, round(ram * GIB), FAST_RATES, disk), coarse=True)


# ---------------------------------------------------------------------- plans


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_sums_of_the_first_and_last_units_are_those_of_each_unit(optimizer):
    shape = shape_of(streamed(plain_model(tiny_config("llama")), PlanChoices()).model)
    shape = shape.with_optimizer(optimizer)
    sizes = shape.states
    for count in range(len(shape.units) + 1):
        last = shape.units[len(shape.units) - count :]
        chunks = [disk_chunks.disk_chunk_count(unit.numel) for unit in last]
        assert sizes.last_disk_chunks[count] == sum(chunks)
        counts = [unit.state_counts for unit in last]
        assert sizes.last_state_ring_bytes[count] == disk_chunks.state_ring_bytes(counts, optimizer)
        planes = sizes.plane_bytes(len(shape.units) - count)
        for plane, size in planes.items():
            assert size == sum(sizes.unit_bytes(unit)[plane] for unit in last)


def test_nothing_goes_to_the_disk_that_fits_in_ram():
    assert chosen_with(ram=150).choices.placement.disk_offloaded_units == 0
    # Units that live on a large card need no RAM either.
    assert chosen_with(ram=61, gpu=139).choices.placement.disk_offloaded_units == 0


def test_the_overflow_alone_goes_to_the_disk():
    counts = []
    for ram in (61, 70, 80):
        choices = chosen_with(ram=ram).choices
        counts.append(choices.placement.disk_offloaded_units)
        shape, free = big_shape(), (ram - 3) * GIB
        assert state_bytes(shape, choices) <= free
        assert not choices.updates.device_updated_units
        fewer = choices.changed(disk_offloaded_units=choices.placement.disk_offloaded_units - 1)
        assert state_bytes(shape, fewer) > free - GIB, "one unit fewer would have fitted"
    assert counts == sorted(counts, reverse=True) and counts[-1] > 0


def test_a_disk_without_room_takes_nothing():
    assert chosen_with(ram=61, disk=GIB).choices.placement.disk_offloaded_units == 0
    assert chosen_with(ram=61, disk=0).choices.placement.disk_offloaded_units == 0


def test_the_disk_works_from_the_norm_to_the_last_update():
    found = chosen_with(ram=61)
    rates = with_disk(FAST_RATES, config(engine__disk="/disk"))
    micro_batch = MicroBatch(found.micro_batch_size, 1024)
    plan, timing = predicted_step(big_shape(), found.choices, rates, micro_batch, "cuda")
    begin = next(timing.ends[op.index] for op in plan.ops if op.kind == OpKind.CLIP)
    end = max(timing.ends[op.index] for op in plan.ops if op.kind == OpKind.UPDATE)
    for lane in DISK_LANES:
        spans = [
            (timing.starts[op.index], timing.ends[op.index]) for op in plan.ops if op.lane == lane
        ]
        busy = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans)
        assert busy >= 0.9 * (end - begin)


@pytest.mark.parametrize("optimizer", IN_CHUNKS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_bytes_are_the_host_states_and_the_engine_s(optimizer, on_gpu, tmp_path, monkeypatch):
    from engine.planning.fit import buffer_sizes

    for place in (disk_chunks, buffer_sizes):
        monkeypatch.setattr(place, "DISK_CHUNK_NUMEL", 512)
    plain = plain_model(tiny_config("qwen3"))
    for gpu_resident, count in ((0, 0), (0, 2), (1, 4), (0, 5)):
        choices = PlanChoices().changed(
            micro_batches=2,
            disk_offloaded_units=count,
            gpu_resident_units=gpu_resident,
            gradients_on_gpu=on_gpu,
        )
        run = streamed(plain, choices, dtype="bfloat16", optimizer=optimizer, disk=tmp_path)
        shape = shape_of(run.model).with_optimizer(optimizer)
        rings = run.engine._state_rings.nbytes + run.engine._gradient_rings.nbytes
        assert state_bytes(shape, choices) == run.host_states.ram.nbytes + rings
        items = plane_items(shape, choices)
        assert sum(item.bytes for item in items) == state_bytes(shape, choices)
        assert gradient_ring_bytes(shape, choices) == run.engine._gradient_rings.nbytes
        on_disk = run.host_states.placement.disk.nbytes
        assert on_disk <= disk_offloaded_bytes(shape, choices)
        assert bool(on_disk) == bool(count)
        run.close()


# ---------------------------------------------------------------------- reports


def report_of(**changes):
    machine = named_machine("RTX 4090", 64)
    quiet = {"output.checkpoint": "none", "output.export": False, "train.steps": 1000}
    job = config(train__batch_size=16, **changes).with_values(quiet)
    return estimate(job, machine, big_shape())


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_a_report_tells_what_is_on_the_disk_and_what_it_costs():
    without = report_of()
    assert without.status == FitStatus.DOES_NOT_FIT and without.disk_offload is None
    offered = without.suggestions[-1]
    assert offered.changes == {"engine.disk": "FOLDER"}
    assert "of moments on the disk, written in each step" in offered.text
    assert "% of a drive's rated life in this run" in offered.text
    report = report_of(**offered_changes(offered))
    assert report.status != FitStatus.DOES_NOT_FIT
    found = report.disk_offload
    assert found is not None and found.run_bytes == 1000 * found.step_bytes
    assert found.rated_share == pytest.approx(found.run_bytes / 600e12)
    kinds = {item.kind: item for item in report.host.items}
    assert "are on the disk" in kinds[MemoryItem.EXP_AVG].note
    assert kinds[MemoryItem.STATES_RING].bytes > 0
    on_disk = report.pool.living_in(PartName.DISK)
    assert [each.placement.planes_in(PartName.DISK) for each in on_disk] == [("moments",)] * len(
        on_disk
    )
    assert sum(len(each.numbers) for each in on_disk) == report.choices["disk_offloaded_units"]
    for part in report.pool.parts:
        of_items = {
            PartName.HOST: report.host,
            PartName.GPU: report.gpu,
            PartName.DISK: report.disk,
        }
        assert part.total == of_items[part.name].total
    *_, disk = report.pool.parts
    held = {share.units: share.bytes for share in disk.shares if share.held == Held.MODEL}
    assert list(held) == on_disk and sum(held.values()) == found.step_bytes
    moments = {item.kind: item for item in report.disk.items}[MemoryItem.DISK_OFFLOADED_MOMENTS]
    assert moments.note == f"{found.kinds[0].words}; on the disk of engine.disk"
    text = pool_as_text(report.pool, None)
    assert sum("moments on disk" in line for line in text) == len(on_disk)
    # Where the runs are on another drive, the disk of the runs has no share of moments.
    apart = replace(disk, shares=tuple(share for share in disk.shares if share.units is None))
    text = pool_as_text(replace(report.pool, parts=(*report.pool.parts[:-1], apart)), None)
    assert sum("moments on disk" in line for line in text) == len(on_disk)
    reported = report.to_dict()["disk_offload"]
    assert reported["step_bytes"] == found.step_bytes and len(reported["sentences"]) == 3
    assert "TB" in reported["sentences"][1] and "assumed" in reported["sentences"][2]


def offered_changes(suggestion) -> dict:
    return {name.replace(".", "__"): value for name, value in suggestion.changes.items()}


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_a_faster_disk_makes_shorter_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "cache"))
    slow = report_of(engine__disk=str(tmp_path))
    store_disk_rates(tmp_path, DiskRates(4e9, 4e9, DRAINED_BYTES))
    fast = report_of(engine__disk=str(tmp_path))
    assert fast.time["step_seconds"] < slow.time["step_seconds"] / 2
    assert fast.disk_offload.rates.is_drained and fast.disk_offload.rates.origin == "measured"
    store_disk_rates(tmp_path, DiskRates(4e9, 4e9, 10**9))
    assert "before any cache was full" in disk_rates.stored_disk_rates(tmp_path).origin


# ---------------------------------------------------------------------- folders


TABLE = """/dev/sda1 / ext4 rw 0 0
server:/export {at} {kind} rw,relatime 0 0
"""


@pytest.mark.parametrize(
    "kind, words",
    [
        ("btrfs", "copy on write"),
        ("zfs", "copy on write"),
        ("bcachefs", "copy on write"),
        ("nfs4", "of the network"),
        ("nfs", "of the network"),
        ("cifs", "of the network"),
        ("smb3", "of the network"),
        ("9p", "of the network"),
        ("ceph", "of the network"),
        ("fuse.sshfs", "of the network"),
        ("fuse.gocryptfs", "FUSE"),
        ("tmpfs", "in RAM"),
    ],
)
def test_file_systems_that_cannot_take_moments_are_refused_by_name(
    tmp_path, monkeypatch, kind, words
):
    folder = tmp_path / "a folder"
    folder.mkdir()
    table = tmp_path / "self" / "mounts"
    table.parent.mkdir()
    table.write_text(TABLE.format(at=str(folder).replace(" ", "\\040"), kind=kind))
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_offload_folder(str(folder))
    assert f"is on {kind}, " in str(caught.value) and words in str(caught.value)
    assert str(caught.value).startswith("engine.disk: ")
    for accepted in ("ext4", "xfs", "overlay"):
        table.write_text(TABLE.format(at=str(folder).replace(" ", "\\040"), kind=accepted))
        assert check_offload_folder(str(folder)) == folder
    assert mount_of(folder / "inside").path == str(folder)
    assert mount_of(tmp_path).kind == "ext4"


def test_a_folder_that_is_missing_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        check_offload_folder(str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        check_offload_folder(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="the name is empty"):
        config(engine__disk=" ")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(offload_folder.tempfile, "TemporaryFile", refused)
    with pytest.raises(ConfigError, match=r"nothing can be written in .*Permission denied"):
        check_offload_folder(str(tmp_path))

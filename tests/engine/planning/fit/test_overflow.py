"""Block inputs on the disk in plans and reports: only the overflow goes there, where that is faster
than moments, and its bytes, its time and its wear are told before a run starts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.machine.disk_rates import with_disk
from engine.machine.known_machines import named_machine
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import (
    disk_offloaded_input_bytes,
    disk_rings_bytes,
    offloaded_input_bytes,
    state_bytes,
)
from engine.planning.fit.choose import HOST_RESERVE_BYTES, choose, least_choices
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import Cost, MicroBatch, step_seconds
from engine.planning.fit.fill_memory import MemoryFiller
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.optimizer_placement import wait_for_block_inputs
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import FitStatus, Requirements, SessionFacts
from engine.planning.fit.simulate_step import predicted_seconds
from engine.planning.fit.strategy import USABLE_RESERVE_BYTES
from engine.planning.layout import disk_chunks
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane, MainGrad
from engine.planning.shape.model_shape import ModelShape
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.tiny import plain_model, streamed, tiny_config

ENOUGH = 1 << 50


SMALL_MOMENTS = big_shape().with_optimizer("adamw_8bit")
"""Without block inputs on the disk, this model lacks RAM for large steps whatever its moments
do.
"""


def chosen_with(
    ram: float,
    rows: int,
    length: int = 1024,
    shape: ModelShape = SMALL_MOMENTS,
    disk: int = ENOUGH,
):
    settings = {"train__batch_size": rows, "data__max_seq_len": length}
    job = Job(shape, config(engine__disk="/disk", **settings), length)
    gpu = 79 if length > 1024 else 23
    return choose(job, Target("cuda", gpu * GIB, round(ram * GIB), FAST_RATES, disk), coarse=True)


def ram_of(found: Chosen, length: int = 1024, shape: ModelShape = SMALL_MOMENTS) -> int:
    tokens = found.micro_batch_size * length
    saved_block_inputs = offloaded_input_bytes(shape, found.choices, tokens)
    assert saved_block_inputs == found.offloaded_input_bytes
    return saved_block_inputs + state_bytes(shape, found.choices)


# ---------------------------------------------------------------------- plans


def test_nothing_goes_to_the_disk_that_fits_in_ram():
    assert chosen_with(130, 512).choices.activations.disk_offloaded_block_inputs == 0


@pytest.mark.parametrize("ram, rows, length", [(90, 512, 1024), (70, 512, 1024), (100, 8, 1 << 17)])
def test_the_overflow_alone_goes_to_the_disk(ram, rows, length):
    found = chosen_with(ram, rows, length)
    choices = found.choices
    assert (
        choices.activations.disk_offloaded_block_inputs > 0
        and choices.placement.disk_offloaded_units == 0
    )
    free = ram * GIB - HOST_RESERVE_BYTES
    assert ram_of(found, length) <= free
    fewer = choices.changed(
        disk_offloaded_block_inputs=choices.activations.disk_offloaded_block_inputs - 1
    )
    tokens = found.micro_batch_size * length
    more = offloaded_input_bytes(SMALL_MOMENTS, fewer, tokens) + state_bytes(SMALL_MOMENTS, fewer)
    assert more > free, "one block input fewer would have fitted"


def test_less_ram_sends_more_there():
    counts = []
    for ram in (90, 80, 70):
        found = chosen_with(ram, 512)
        tokens = found.micro_batch_size * 1024
        counts.append(disk_offloaded_input_bytes(SMALL_MOMENTS, found.choices, tokens))
    assert 0 < counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize(
    "ram, rows, length",
    [(128, 512, 1024), (118, 512, 1024), (61, 256, 1024), (61, 16, 1024)],
)
def test_no_step_is_longer_than_with_moments_alone(monkeypatch, ram, rows, length):
    """Here moments in fp32 are enough. Block inputs are taken where they make steps no longer, as
    far
    as the closed form can tell: `choose` simulates no plan here.
    """
    rates = with_disk(FAST_RATES, config(engine__disk="/disk"))

    def seconds(found: Chosen) -> float:
        micro_batch = MicroBatch(found.micro_batch_size, length)
        return predicted_seconds(big_shape(), found.choices, rates, micro_batch, "cuda")

    found = chosen_with(ram, rows, length, big_shape())
    monkeypatch.setattr(MemoryFiller, "_disk_offloaded_block_inputs", lambda *_: None)
    monkeypatch.setattr(
        MemoryFiller, "_without_block_inputs_in_ram", lambda _, candidate: candidate
    )
    alone = chosen_with(ram, rows, length, big_shape())
    assert (
        alone.choices.placement.disk_offloaded_units > 0
        and alone.choices.activations.disk_offloaded_block_inputs == 0
    )
    assert seconds(found) <= 1.06 * seconds(alone)


def test_block_inputs_are_taken_where_the_step_hides_them():
    choices = chosen_with(160, 8, 1 << 17, big_shape()).choices
    assert (
        choices.activations.disk_offloaded_block_inputs > 0
        and choices.placement.disk_offloaded_units == 0
    )


def test_both_go_there_where_neither_alone_is_enough():
    found = chosen_with(44, 512)
    choices = found.choices
    assert (
        choices.placement.disk_offloaded_units > 0
        and choices.activations.disk_offloaded_block_inputs > 0
    )
    assert ram_of(found) <= 44 * GIB - HOST_RESERVE_BYTES


def test_a_disk_without_room_takes_nothing():
    for disk in (0, GIB):
        choices = chosen_with(80, 512, disk=disk).choices
        assert (
            choices.activations.disk_offloaded_block_inputs
            == choices.placement.disk_offloaded_units
            == 0
        )
    some = chosen_with(80, 512)
    needed = disk_offloaded_input_bytes(SMALL_MOMENTS, some.choices, some.micro_batch_size * 1024)
    assert chosen_with(80, 512, disk=needed).choices == some.choices


def test_the_minimum_keeps_nothing_on_the_disk_that_is_on_the_device():
    job = Job(SMALL_MOMENTS, config(engine__disk="/disk", train__batch_size=512), 1024)
    found = least_choices(job, Target("cuda", 23 * GIB, 70 * GIB, FAST_RATES, ENOUGH))
    assert any(each.choices.activations.disk_offloaded_block_inputs for each in found)
    for each in found:
        assert (
            each.choices.activations.offloaded_block_inputs
            or not each.choices.activations.disk_offloaded_block_inputs
        )


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("share", [0, 1, 2, 4])
def test_the_closed_form_is_near_the_simulation(rounds, share, pairs):
    """The disk of a step at 1 GB/s is idle, half busy or what the step waits for."""
    rates = with_disk(FAST_RATES, config(engine__disk="/disk"))
    micro_batch = MicroBatch(8, 8192)
    choices = PlanChoices().changed(
        micro_batches=4,
        rounds=rounds,
        offloaded_block_inputs=True,
        main_grad=MainGrad.VERTICAL if rounds == 1 else MainGrad.DEVICE,
        blocks_per_saved_input=pairs,
        disk_offloaded_block_inputs=share * 28 // pairs,
        slots=4,
        prefetch_depth=3,
    )
    cost = Cost(big_shape(), rates, micro_batch, compiled=False)
    closed = step_seconds(cost, choices, wait_for_block_inputs(cost, choices))
    simulated = predicted_seconds(big_shape(), choices, rates, micro_batch, "cuda")
    assert closed == pytest.approx(simulated, rel=0.12)


# ---------------------------------------------------------------------- bytes


def test_block_inputs_have_the_disk_alone_and_moments_share_it():
    rates = replace(
        FAST_RATES, disk_read=1e9, disk_write=1e9, disk_read_alone=2e9, disk_write_alone=4e9
    )
    cost = Cost(big_shape(), rates, MicroBatch(4, 1024), True)
    size = 4 * 1024 * 3584 * 2
    assert cost.block_inputs_on_disk(Lane.READ, 3) == 3 * size / 2e9
    assert cost.block_inputs_on_disk(Lane.WRITE, 3) == 3 * size / 4e9
    assert cost.on_disk(Lane.READ, size) == cost.on_disk(Lane.WRITE, size) == size / 1e9
    with_block_inputs = PlanChoices().changed(
        micro_batches=4, offloaded_block_inputs=True, disk_offloaded_block_inputs=100, compiled=True
    )
    slow = replace(rates, disk_read_alone=1e9, disk_write_alone=1e9)
    shape, micro_batch = big_shape(), MicroBatch(4, 1024)
    seconds, longer = (
        predicted_seconds(shape, with_block_inputs, each, micro_batch, "cuda")
        for each in (rates, slow)
    )
    assert seconds < longer


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_are_the_engine_s(tmp_path, dtype, pairs):
    plain, tokens = plain_model(tiny_config("qwen3")), 24 * 7
    for count in (0, 1, 2, 4, 6 if pairs == 1 else 4):
        choices = PlanChoices().changed(
            micro_batches=2,
            offloaded_block_inputs=True,
            blocks_per_saved_input=pairs,
            disk_offloaded_block_inputs=count,
        )
        run = streamed(plain, choices, dtype=dtype, disk=tmp_path, tokens=tokens)
        shape, kept = shape_of(run.model), run.engine.saved_block_inputs
        assert run.engine.block_input_bytes == offloaded_input_bytes(shape, choices, tokens)
        assert kept.file_bytes == disk_offloaded_input_bytes(shape, choices, tokens)
        rings = len(run.engine.plan.disk_rings) * disk_chunks.whole_pages(
            tokens * 32 * shape.item_bytes
        )
        assert disk_rings_bytes(shape, choices, tokens) == rings
        run.close()


# ---------------------------------------------------------------------- reports


def report_of(**changes):
    machine = named_machine("RTX 4090", 96)
    quiet = {"output.checkpoint": "none", "output.export": False, "train.steps": 1000}
    settings = {"train__batch_size": 512, "train__optimizer": "adamw_8bit"} | changes
    job = config(**settings).with_values(quiet)
    return estimate(job, machine, big_shape())


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_a_report_offers_and_tells_what_is_on_the_disk():
    without, report = report_of(), report_of(engine__disk="/disk")
    assert without.status == FitStatus.DOES_NOT_FIT and without.disk_offload is None
    offered = without.suggestions[-1]
    assert offered.changes == {"engine.disk": "FOLDER"}
    assert "of block inputs on the disk, written in each step" in offered.text
    assert report.status != FitStatus.DOES_NOT_FIT
    (kind,) = report.disk_offload.kinds
    assert kind.kind == MemoryItem.DISK_OFFLOADED_BLOCK_INPUTS
    assert (
        report.disk_offload.run_bytes == 1000 * report.disk_offload.step_bytes == 1000 * kind.bytes
    )
    items = {item.kind: item for item in report.host.items}
    assert items[MemoryItem.DISK_RINGS].bytes > 0
    assert items[MemoryItem.HOST_BLOCK_INPUTS].bytes > 0
    on_disk = {item.kind: item for item in report.disk.items}[
        MemoryItem.DISK_OFFLOADED_BLOCK_INPUTS
    ]
    assert on_disk.bytes == kind.bytes
    assert on_disk.note == f"{kind.words}; on the disk of engine.disk"
    of_disk = next(part for part in report.pool.parts if part.name == PartName.DISK)
    assert of_disk.total == report.disk.total


def test_typical_rows_wear_the_drive_less_than_full_ones():
    """Space is kept for full rows; a step writes what its rows need."""
    machine, job = named_machine("RTX 4090", 128), config(engine__disk="/disk")
    choices = PlanChoices().changed(
        micro_batches=4, offloaded_block_inputs=True, disk_offloaded_block_inputs=50
    )
    chosen = Chosen(choices, 4, 128, (), 0)
    facts = SessionFacts(typical_length=lambda _: 256, steps=10)
    requirements = Requirements(
        job, machine, big_shape(), replace(chosen, offloaded_input_bytes=GIB), facts
    )
    assert requirements.disk_offload is not None
    (kind,) = requirements.disk_offload.kinds
    assert kind.bytes == 50 * 4 * 1024 * 3584 * 2 == 4 * kind.step_bytes
    assert requirements.disk_offload.run_bytes == 10 * kind.step_bytes
    assert requirements.disk_offload.sentences()[0].startswith(
        "50 of the 112 block inputs of a step are on the disk, in /disk: "
    )


def test_an_offload_of_both_kinds_tells_each():
    machine = named_machine("RTX 4090", 128)
    job = config(engine__disk="/disk", train__steps=1000)
    choices = PlanChoices().changed(
        micro_batches=4,
        offloaded_block_inputs=True,
        disk_offloaded_block_inputs=50,
        disk_offloaded_units=3,
    )
    requirements = Requirements(
        job, machine, big_shape(), Chosen(choices, 4, 128, (), GIB), SessionFacts()
    )
    assert requirements.disk_offload is not None
    moments, saved_block_inputs = requirements.disk_offload.kinds
    first, second, wear, _ = requirements.disk_offload.sentences()
    assert first.startswith("Moments of the last 2 blocks and the head are on the disk, in /disk")
    assert second.startswith("50 of the 112 block inputs of a step are on the disk, in /disk")
    assert requirements.disk_offload.step_bytes == moments.bytes + saved_block_inputs.bytes
    assert f"{1000 * requirements.disk_offload.step_bytes / 1e12:,.1f} TB" in wear
    assert "of moments and " in requirements.disk_offload.in_words


def test_what_is_filled_to_the_last_is_tried_before_the_disk():
    found = chosen_with(130, 512)
    ram = (ram_of(found) + HOST_RESERVE_BYTES - USABLE_RESERVE_BYTES // 2) / GIB
    assert chosen_with(ram, 512).choices.activations.disk_offloaded_block_inputs == 0

"""The pool of memory as bars and sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.shared.pool_labels import (
    FREE,
    cost_in_a_sentence,
    held_text,
    places_text,
    pool_bar,
)
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool import Held, Pool, PoolPart, Share, units_by_place
from engine.planning.fit.pool_costs import Cost, Costs, Work
from engine.planning.schedule.choices import PlanChoices
from engine.text import GIB

SPLIT = units_by_place(30, PlanChoices().changed(gpu_resident_units=14, blocks_kept_in_slots=2))
IN_RAM = units_by_place(30, PlanChoices())
GPU = PoolPart(
    PartName.GPU,
    80 * GIB,
    (
        Share(Held.MODEL, 40 * GIB, SPLIT[0]),
        Share(Held.COPY, GIB, SPLIT[2]),
        Share(Held.STEP, 20 * GIB),
        Share(Held.PROGRAM, 3 * GIB),
    ),
)
RAM = PoolPart(
    PartName.HOST,
    50 * GIB,
    (
        Share(Held.MODEL, 40 * GIB, SPLIT[1]),
        Share(Held.MODEL, 6 * GIB, SPLIT[2]),
        Share(Held.MODEL, 7 * GIB, SPLIT[3]),
        Share(Held.STEP, 7 * GIB),
    ),
)
POOL = Pool((GPU, RAM), tuple(SPLIT))
NONE = dict.fromkeys(Work, 0.0)


def test_a_bar_is_as_long_as_what_there_is_and_its_segments_fill_it():
    drawn = pool_bar(GPU)
    assert [each["held"] for each in drawn["segments"]] == [
        "model",
        "copy",
        "step",
        "program",
        FREE,
    ]
    assert [each["share"] for each in drawn["segments"]] == [0.5, 0.0125, 0.25, 0.0375, 0.2]
    assert [each["label"] for each in drawn["segments"]] == ["embed, blocks 0–12", "", "", "", ""]
    assert drawn["limit"] is None and drawn["segments"][-1]["text"] == "free: 16.0 GiB"


def test_neighbors_in_the_same_place_are_one_segment():
    (model, step) = pool_bar(RAM)["segments"]
    assert (model["label"], model["share"]) == ("blocks 13–27, head", round(53 / 60, 4))
    assert model["text"] == "blocks 13 to 27 and head: weights, moments and gradients: 53.0 GiB"
    assert step["text"] == "working memory: 7.00 GiB"


def test_where_more_is_needed_than_there_is_the_bar_says_where_that_ends():
    drawn = pool_bar(RAM)
    assert drawn["limit"] == round(50 / 60, 4)
    assert FREE not in [each["held"] for each in drawn["segments"]]
    assert pool_bar(replace(RAM, limit=None))["limit"] is None


def test_planes_that_live_elsewhere_than_the_rest_are_named():
    on_gpu = units_by_place(30, PlanChoices().changed(gradients_on_gpu=True))
    part = PoolPart(PartName.GPU, 20 * GIB, (Share(Held.MODEL, 14 * GIB, on_gpu[0]),))
    (gradients, _) = pool_bar(part)["segments"]
    assert gradients["label"] == "gradients"
    assert gradients["text"] == "the whole model: gradients: 14.0 GiB"
    assert held_text(part) == "the whole model: gradients: 14.0 GiB; free: 6.00 GiB"


def test_places_in_sentences():
    assert places_text(SPLIT, on_gpu=True) == (
        "Embed and blocks 0 to 12 live on the GPU, blocks 13 to 27 and head in RAM.",
        "These pass through the GPU unit by unit in each step. The weights of blocks 26 to 27 stay "
        "there from forward to backward.",
    )
    assert places_text(IN_RAM, on_gpu=True) == (
        "The model stays in RAM and streams through the GPU.",
        "",
    )
    whole = units_by_place(30, PlanChoices().changed(gpu_resident_units=30))
    assert places_text(whole, on_gpu=True)[0] == "The whole model lives on the GPU."
    cpu = places_text(IN_RAM, on_gpu=False)
    assert cpu == ("Runs on the CPU; everything stays in RAM.", "")
    apart = units_by_place(30, PlanChoices().changed(gpu_resident_units=8, gpu_resident_apart=True))
    assert places_text(apart, on_gpu=True)[0] == (
        "Embed and 7 of blocks 3 to 27 live on the GPU, 21 of blocks 0 to 26 and head in RAM."
    )
    embed = units_by_place(30, PlanChoices().changed(gpu_resident_units=1, gradients_on_gpu=True))
    shown, more = places_text(embed, on_gpu=True)
    assert shown == "Embed lives on the GPU, blocks 0 to 27 and head in RAM."
    assert more.endswith("Gradients wait on the GPU until they are applied.")


@pytest.mark.parametrize("units", [SPLIT, IN_RAM])
def test_of_a_job_that_does_not_fit_nothing_lives_anywhere(units):
    shown, _ = places_text(units, on_gpu=True, fits=False)
    assert "would" in shown and "lives" not in shown and "stays" not in shown
    shown, _ = places_text(units, on_gpu=False, fits=False)
    assert shown == "Would run on the CPU; everything would stay in RAM."


def test_moments_on_the_disk_are_told_of():
    """The disk is the third part. Units whose moments live there need nothing else."""
    (every,) = IN_RAM
    on_disk = replace(every, placement=replace(every.placement, moments=PartName.DISK))
    shown, more = places_text([on_disk], on_gpu=True)
    assert shown == "The whole model lives in RAM, except for moments that are on the disk."
    assert more.endswith("The moments of the whole model live on the disk.")
    part = PoolPart(PartName.DISK, None, (Share(Held.MODEL, 57 * GIB, on_disk),))
    (moments,) = pool_bar(part)["segments"]
    assert (moments["label"], moments["share"]) == ("moments", 1.0)


def test_costs_in_sentences():
    gpu = Cost(NONE | {Work.GPU_OPTIMIZER: 0.034}, NONE)
    ram = Cost(
        NONE | {Work.TO_GPU: 0.9, Work.TO_HOST: 0.36, Work.HOST_OPTIMIZER: 0.63},
        NONE | {Work.HOST_OPTIMIZER: 0.244},
    )
    by_units = ((SPLIT[0], gpu), (SPLIT[1], ram), (SPLIT[2], Cost(NONE, NONE)))
    costs = Costs(1.82, (*by_units, (SPLIT[3], Cost(NONE, NONE))))
    shown = cost_in_a_sentence(POOL, PartName.GPU, costs)
    assert shown == "A step: the optimizer takes 0.034 s; these units are not moved."
    assert cost_in_a_sentence(POOL, PartName.HOST, costs) == (
        "A step, beside computing: copies over the bus 1.3 s and the optimizer on the CPU 0.63 s; "
        "the GPU waits 0.24 s for that (13 %)."
    )
    assert cost_in_a_sentence(POOL, PartName.DISK, costs) == ""
    hidden = Costs(1.82, ((SPLIT[1], Cost(ram.busy, NONE)),))
    shown = cost_in_a_sentence(POOL, PartName.HOST, hidden)
    assert shown.endswith("; the GPU does not wait for that.")


def test_what_the_disk_costs_is_told_of_the_disk_alone():
    units = units_by_place(30, PlanChoices().changed(disk_offloaded_units=18))
    assert [each.placement.moments for each in units] == [PartName.HOST, PartName.DISK]
    host = Cost(NONE | {Work.HOST_OPTIMIZER: 1.0}, NONE | {Work.HOST_OPTIMIZER: 0.5})
    disk = Cost(
        NONE | {Work.HOST_OPTIMIZER: 2.0, Work.DISK: 72.0},
        NONE | {Work.HOST_OPTIMIZER: 0.7, Work.DISK: 36.0},
    )
    pool = Pool((), tuple(units))
    costs = Costs(61.0, ((units[0], host), (units[1], disk)))
    assert cost_in_a_sentence(pool, PartName.DISK, costs) == (
        "A step, beside computing: reads and writes 72 s; the GPU waits 36 s for that (59 %)."
    )
    assert cost_in_a_sentence(pool, PartName.HOST, costs) == (
        "A step, beside computing: the optimizer on the CPU 3 s; the GPU waits 1.2 s for that "
        "(2 %)."
    )

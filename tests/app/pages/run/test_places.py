"""Where the units of a run live, by the plan that was recorded."""

from __future__ import annotations

import pytest

from app.pages.run.places import places
from engine.planning.schedule.choices import PlanChoices
from engine.runs.record.events import PlanBuilt, RunStarted
from engine.runs.record.snapshot import RunSnapshot
from tests.app.verdict.made_runs import fold

UNITS = ["embed", *(f"block {k}" for k in range(8)), "head"]


def seen(choices: dict, device: str = "cuda", units: list[str] | None = None) -> RunSnapshot:
    return fold(
        PlanBuilt(choices=choices),
        RunStarted(name="run", device=device, units=UNITS if units is None else units),
    )


def test_rows_say_what_lives_where_and_what_updates_it():
    homes = ("block 4", "head")
    choices = PlanChoices().changed(
        gpu_resident_units=3, blocks_kept_in_slots=2, device_updated_units=homes, update_buffers=4
    )
    found = places(seen(choices.to_dict()))
    assert (
        found["caption"]
        == "Embed and blocks 0 to 1 live on the GPU, blocks 2 to 7 and head in RAM."
    )
    assert found["rows"] == [
        ["embed and blocks 0 to 1", "GPU", "GPU"],
        ["blocks 2 to 5", "RAM", "CPU; 1 of them: GPU"],
        ["blocks 6 to 7", "RAM", "CPU"],
        ["head", "RAM", "GPU"],
    ]
    on_gpu = places(seen(PlanChoices().changed(gradients_on_gpu=True).to_dict()))
    assert on_gpu["rows"] == [["the whole model", "RAM, gradients: GPU", "CPU"]]


def test_on_a_cpu_everything_is_in_ram():
    found = places(seen(PlanChoices().to_dict(), device="cpu"))
    assert found["caption"] == "Runs on the CPU; everything stays in RAM."
    assert found["rows"] == [["the whole model", "RAM", "CPU"]]


def test_a_record_of_an_earlier_version_had_no_unit_on_the_gpu():
    found = places(seen({"rounds": 1, "slots": 2}))
    assert found["rows"] == [["the whole model", "RAM", "CPU"]]


@pytest.mark.parametrize("damage", [-3, "many", None, 1e9, [1], 10**30, True])
def test_a_damaged_record_is_read_as_far_as_it_goes(damage):
    choices = {
        "gpu_resident_units": damage,
        "blocks_kept_in_slots": damage,
        "device_updated_units": damage,
    }
    rows = places(seen(choices | {"gradients_on_gpu": damage}))["rows"]
    assert rows and all(isinstance(text, str) for row in rows for text in row)


def test_without_a_plan_or_units_nothing_is_said():
    assert places(seen({})) is None
    assert places(seen(PlanChoices().to_dict(), units=[])) is None

"""What the terminal says of a plan: while it trains, and when it is asked whether a job fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine
from engine.model.build.shape_of_run import shape_of_run
from engine.paths import PROGRAM_ROOT
from engine.planning.fit.report import estimate
from engine.planning.schedule.choices import PlanChoices
from engine.tools.cli.check_report import report_as_text
from engine.tools.cli.train import plan_text

MACHINE = named_machine("H200", 128)
OLD = {
    "micro_batches": 1,
    "micro_batch_size": 8,
    "blocks_kept_in_slots": 0,
    "offloaded_block_inputs": True,
}
NEW = OLD | {
    "micro_batches": 4,
    "micro_batch_size": 37,
    "rounds": 4,
    "blocks_kept_in_slots": 11,
    "blocks_without_recompute": 20,
    "offloaded_block_inputs": False,
    "compiled": True,
    "device_updated_units": ["embed", "block 0", "block 1"],
    "update_buffers": 4,
    "predicted_seconds": 11.46,
}


# ------------------------------------------------------------------ the Plan line of a run


def test_the_plan_in_a_line():
    assert plan_text(NEW) == (
        "4 micro-batches of 37 rows, 4 rounds, 11 blocks kept in slots, 20 blocks with activations "
        "kept, block inputs on the device, compiled kernels, 3 units updated on the GPU, 11.5 s a "
        "step predicted"
    )


def test_what_a_plan_does_not_name_is_left_out():
    assert (
        plan_text(OLD)
        == "1 micro-batch of 8 rows, 0 blocks kept in slots, block inputs on the host"
    )
    empty = OLD | {
        "rounds": 1,
        "blocks_without_recompute": 1,
        "compiled": False,
        "device_updated_units": [],
        "predicted_seconds": None,
    }
    assert plan_text(empty) == (
        "1 micro-batch of 8 rows, 1 round, 0 blocks kept in slots, 1 block with activations "
        "kept, block inputs on the host, eager kernels"
    )
    assert plan_text(OLD | {"compiled": None, "device_updated_units": None}) == plan_text(OLD)


def test_what_the_planner_gives_is_what_is_said():
    choices = PlanChoices().changed(
        device_updated_units=("embed",), update_buffers=2, compiled=True
    ).to_dict() | {"micro_batch_size": 2}
    text = plan_text(choices)
    assert "compiled kernels, 1 unit updated on the GPU" in text and "predicted" not in text


# ------------------------------------------------------------------ the Plan section of `check`


@pytest.fixture(scope="module")
def report():
    config = TrainConfig.load(PROGRAM_ROOT / "presets" / "starter.yaml")
    return estimate(config, MACHINE, shape_of_run(config))


def plan_section(report, choices=None, time=None, without=()):
    choices = {
        name: value
        for name, value in (report.choices | (choices or {})).items()
        if name not in without
    }
    text = report_as_text(
        replace(report, choices=choices, time=report.time | (time or {})), MACHINE
    )
    lines = text.splitlines()
    return [line.strip() for line in lines[lines.index("Plan") + 1 :]]


def test_check_says_where_units_are_updated_and_what_a_step_takes(report):
    homes, blocks = ["embed", "block 0"], report.model["blocks"]
    lines = plan_section(
        report,
        {
            "compiled": True,
            "rounds": 4,
            "device_updated_units": homes,
            "update_buffers": 4,
            "gpu_resident_units": 0,
        },
        {"tokens_per_step": 148_000, "step_seconds": 11.46, "estimated": False},
    )
    assert ", 4 rounds, " in lines[0] and lines[0].endswith(", compiled kernels")
    assert (
        lines[2]
        == f"updated on the GPU: 2 of {blocks + 2} units, their states there in pieces, 4 at a time"
    )
    assert lines[4] == "about 11.5 s a step, 12,900 tokens/s, predicted"


def test_check_says_so_where_the_host_updates_everything(report):
    lines = plan_section(
        report,
        {
            "compiled": False,
            "rounds": 1,
            "device_updated_units": [],
            "update_buffers": 0,
            "gpu_resident_units": 0,
        },
        {"step_seconds": None},
    )
    assert ", 1 round, " in lines[0] and lines[0].endswith(", eager kernels")
    assert lines[2] == "all units are updated on the host"
    assert not any("predicted" in line for line in lines)


def test_check_leaves_out_what_is_not_known(report):
    time = {name: value for name, value in report.time.items() if name != "step_seconds"}
    lines = plan_section(
        replace(report, time=time),
        without=(
            "compiled",
            "device_updated_units",
            "update_buffers",
            "rounds",
            "blocks_without_recompute",
        ),
    )
    assert ", 1 round, " in lines[0] and "kernels" not in lines[0]
    assert "0 of 6 blocks keep their activations" in lines[1] and "TFLOP" in lines[2]
    assert not any(word in line for line in lines for word in ("updated", "predicted", "None"))

"""Runs whose block inputs do not fit in RAM: the planner itself sends the overflow to the disk, the
run writes what a run in RAM writes, and what it says of the disk is what was measured.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from engine.planning.fit import buffer_sizes, choose, simulate_step, strategy
from engine.planning.fit.memory_items import MemoryItem, PartName, items_of
from engine.planning.layout import disk_chunks
from engine.planning.layout.disk_chunks import PAGE
from engine.planning.schedule.offloaded_activations import DISK_RINGS
from engine.runs.record.events import FitReported, ForecastChecked, LogLine, PlanBuilt, RunEnded
from engine.text import GIB
from engine.training.loop import planning
from engine.training.loop.run import Run, resume_run
from tests.support.disk_offloading import train
from tests.support.gpu_resident_runs import Written
from tests.support.trained_runs import events_of, execute, files_of

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

RAM = 64 * GIB
ON_HOST: dict[str, Any] = {
    "engine.activation_checkpointing": "offload",
    "train.batch_size": 12,
    "output.eval_every": 3,
}
BLOCK_INPUTS = 3 * 6
"""The model has three blocks, and a step six micro-batches."""


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory) -> tuple[Run, Written]:
    """Returns a run with all block inputs in RAM, and what it has written."""
    run = train(tmp_path_factory.mktemp("in-ram"), "runs", **ON_HOST)
    assert events_of(run, PlanBuilt)[0].choices["disk_offloaded_block_inputs"] == 0
    return run, Written.by(run)


def host_items(run: Run) -> dict[MemoryItem, int]:
    report = events_of(run, FitReported)[-1].report
    return {item.kind: item.bytes for item in items_of(report, PartName.HOST)}


@pytest.fixture
def shrink(monkeypatch, in_ram):
    """Returns a function after which RAM holds the planes of the run and so many of its
    block inputs.
    """
    items = host_items(in_ram[0])
    each = items[MemoryItem.HOST_BLOCK_INPUTS] // BLOCK_INPUTS
    planes = sum(size for kind, size in items.items() if kind.is_plane)
    machine, memory = planning._machine_for, planning.sample_host_memory

    def shrunk(held: int) -> int:
        monkeypatch.setattr(choose, "HOST_RESERVE_BYTES", RAM - planes - held * each)
        for module in (choose, strategy):
            monkeypatch.setattr(module, "USABLE_RESERVE_BYTES", 0)
        monkeypatch.setattr(
            planning,
            "_machine_for",
            lambda *each: dataclasses.replace(machine(*each), ram_available=RAM),
        )
        monkeypatch.setattr(planning, "sample_host_memory", lambda: (memory()[0], RAM))
        return each

    return shrunk


@pytest.mark.parametrize("held", [15, 9, DISK_RINGS])
def test_what_does_not_fit_goes_to_the_disk_and_changes_no_bit(tmp_path, in_ram, shrink, held):
    each = shrink(held)
    run = train(tmp_path, "runs", **ON_HOST)
    choices = events_of(run, PlanBuilt)[0].choices
    assert choices["disk_offloaded_block_inputs"] == BLOCK_INPUTS + DISK_RINGS - held
    assert choices["disk_offloaded_units"] == 0
    assert Written.by(run) == in_ram[1] and in_ram[1].files
    assert list((tmp_path / "disk").iterdir()) == []
    items = host_items(run)
    assert items.get(MemoryItem.HOST_BLOCK_INPUTS, 0) == (held - DISK_RINGS) * each
    assert items[MemoryItem.DISK_RINGS] == DISK_RINGS * each


def test_what_a_run_says_of_the_disk_is_what_was_measured(tmp_path, shrink):
    each = shrink(9)
    run = train(tmp_path, "runs", **ON_HOST)
    count = BLOCK_INPUTS + DISK_RINGS - 9
    report = events_of(run, FitReported)[-1].report
    assert report["disk_offload"]["run_bytes"] == 8 * report["disk_offload"]["step_bytes"]
    assert report["disk_offload"]["step_bytes"] == count * each and each % PAGE == 0
    first, wear, _ = report["disk_offload"]["sentences"]
    assert first.startswith(f"{count} of the {BLOCK_INPUTS} block inputs of a step are on the disk")
    assert "The run of 8 steps writes" in wear
    found = events_of(run, ForecastChecked)[-1].quantities["disk_offloaded_bytes"]
    assert found["predicted"] == found["measured"] == count * each
    reported = [event.text for event in events_of(run, LogLine)]
    assert any(text.startswith(f"{count} block inputs of a step, ") for text in reported)
    assert any(
        "This session has written" in text and "of block inputs to" in text for text in reported
    )


@pytest.mark.parametrize("before, after", [(18, 6), (6, 18), (12, 5)])
def test_another_number_may_go_there_at_a_resume(tmp_path, in_ram, shrink, before, after):
    shrink(before)
    run = train(tmp_path, "moves", at_step={3: "stop"}, **ON_HOST)
    shrink(after)
    again = resume_run(tmp_path / "moves", run.folder.id)
    execute(again)
    first, *_, last = (event.choices for event in events_of(again, PlanBuilt))
    assert first["disk_offloaded_block_inputs"] != last["disk_offloaded_block_inputs"]
    assert files_of(again)[8] == in_ram[1].files[8]


def test_moments_go_there_too_where_all_block_inputs_are_not_enough(
    tmp_path, in_ram, shrink, monkeypatch
):
    for place in (disk_chunks, buffer_sizes, simulate_step):
        monkeypatch.setattr(place, "DISK_CHUNK_NUMEL", 1024)
    shrink(-4)
    run = train(tmp_path, "runs", **ON_HOST)
    choices = events_of(run, PlanBuilt)[0].choices
    assert choices["disk_offloaded_units"] > 0
    assert choices["disk_offloaded_block_inputs"] == BLOCK_INPUTS
    kinds = events_of(run, FitReported)[-1].report["disk_offload"]["kinds"]
    assert [kind["what"] for kind in kinds] == ["moments", "block inputs"]
    assert any(
        "of moments and" in event.text and "of block inputs to" in event.text
        for event in events_of(run, LogLine)
    )
    assert Written.by(run) == in_ram[1]


def failing_at(step: int, call: str, monkeypatch) -> None:
    """Makes reads or writes of block inputs fail from this step on."""
    from engine.runtime.step.pinned_buffers import SavedBlockInputs

    seen: list[str] = []
    plain = getattr(SavedBlockInputs, "read" if call == "preadv" else "write")

    def fail(self, op, numel):
        seen.append(op.unit)
        if seen.count("block 0") > (step - 1) * 6:
            monkeypatch.setattr(os, call, refused)
        plain(self, op, numel)

    def refused(*_):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(SavedBlockInputs, plain.__name__, fail)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_no_finished_step_is_lost_where_the_disk_fails(
    tmp_path: Path, in_ram, shrink, monkeypatch, call
):
    """Block inputs are read and written before any update of their step."""
    shrink(DISK_RINGS)
    with monkeypatch.context() as broken:
        failing_at(5, call, broken)
        run = train(tmp_path, "fails", **ON_HOST | {"output.checkpoint_every": 3})
    ended = events_of(run, RunEnded)[-1]
    assert ended.state == "failed" and ended.error_type == "DiskOffloadError"
    assert ended.reason.startswith("Block inputs that engine.disk keeps in ")
    assert "step 4 is saved" in ended.reason
    assert "\n" not in ended.reason and list((tmp_path / "disk").iterdir()) == []
    again = resume_run(tmp_path / "fails", run.folder.id)
    execute(again)
    assert files_of(again)[8] == in_ram[1].files[8]

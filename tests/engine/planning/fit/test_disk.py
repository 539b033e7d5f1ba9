"""What checkpoints take of the disk, and what helps where it is too small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine, with_figures
from engine.planning.fit.checkpoint_sizes import RECORD_BYTES, checkpoints_at_once, copy_bytes
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.fit.report import FitReport, estimate
from engine.planning.fit.requirements import FitStatus, SessionFacts
from engine.text import GIB
from tests.support.chosen import big_shape, config

SHAPE = big_shape()
FULL = SHAPE.states.checkpoint_bytes()
WEIGHTS = SHAPE.states.checkpoint_bytes("weights")
EXPORT = SHAPE.export_bytes("bfloat16")
MACHINE = with_figures(named_machine("H200", 512), disk_gib=1)
STEPS = {"train__steps": 100, "output__checkpoint_every": 10}


def reported(disk: int, before: int = 0, **values) -> tuple[TrainConfig, FitReport]:
    """Returns a configuration and its report on a machine with so many bytes of disk."""
    asked = config(**STEPS | values)
    facts = SessionFacts(checkpoints_before=before)
    return asked, estimate(asked, replace(MACHINE, disk_free=disk), SHAPE, facts)


def disk_items(report: FitReport) -> dict[MemoryItem, int]:
    return {item.kind: item.bytes for item in report.disk.items}


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_kinds_take_what_their_planes_take():
    assert SHAPE.states.checkpoint_bytes() == 12 * SHAPE.gradient_numel
    assert SHAPE.states.checkpoint_bytes("weights") == 4 * SHAPE.gradient_numel
    assert SHAPE.states.checkpoint_bytes("none") == 0
    plain = {MemoryItem.EXPORT: EXPORT, MemoryItem.RECORD: RECORD_BYTES}
    for kind, taken in (("full", 3 * FULL), ("weights", 3 * WEIGHTS), ("none", 0)):
        _, report = reported(1 << 50, output__checkpoint=kind)
        items = disk_items(report)
        assert items.pop(MemoryItem.CHECKPOINTS, 0) == taken and items == plain
        copies = [i for i in report.host.items if i.kind == MemoryItem.STAGING_BUFFERS]
        assert sum(i.bytes for i in copies) <= taken // 3 * 1.01 and bool(copies) == (taken > 0)


@pytest.mark.parametrize(
    ("values", "before", "at_once"),
    [
        ({}, 0, 3),
        ({"output__checkpoint_every": 0}, 0, 1),
        ({"output__checkpoint_every": 0}, 1, 2),
        ({"output__checkpoint_every": 100}, 0, 1),
        ({"output__checkpoint_every": 60}, 0, 2),
        ({"output__checkpoint_every": 60}, 1, 3),
        ({"output__keep_checkpoints": 1}, 0, 2),
        ({"output__keep_checkpoints": 1}, 3, 4),
        ({"train__steps": None, "train__epochs": 1}, 0, 3),
        ({"output__checkpoint": "none"}, 2, 0),
    ],
)
def test_how_many_checkpoints_are_on_the_disk_at_once(values, before, at_once):
    assert checkpoints_at_once(config(**STEPS | values), before) == at_once


def test_copies_hold_no_more_than_the_kind_writes():
    for kind, most in (("full", FULL), ("weights", WEIGHTS), ("none", 0)):
        asked = config(**STEPS, output__checkpoint=kind)
        room = copy_bytes(asked, SHAPE, 0, 1 << 50, keeps_best=True)
        assert most <= room <= 1.01 * most  # nothing is evaluated
        asked = asked.with_values({"output.eval_every": 10})
        assert copy_bytes(asked, SHAPE, 0, 1 << 50, keeps_best=False) == room
        with_best = copy_bytes(asked, SHAPE, 0, 1 << 50, keeps_best=True)
        assert WEIGHTS <= with_best - room <= 1.01 * WEIGHTS


@pytest.mark.parametrize(
    ("disk", "changes"),
    [
        (2 * FULL + EXPORT, {"output.keep_checkpoints": 1}),
        (FULL + EXPORT, {"output.checkpoint_every": 0}),
        (FULL, {"output.checkpoint_every": 0, "output.export": False}),
        (2 * WEIGHTS, {"output.checkpoint": "weights", "output.checkpoint_every": 0}),
        (
            WEIGHTS,
            {
                "output.checkpoint": "weights",
                "output.checkpoint_every": 0,
                "output.export": False,
            },
        ),
        (EXPORT, {"output.checkpoint": "none"}),
    ],
    ids=["two", "one", "one alone", "weights", "weights alone", "export"],
)
def test_a_small_disk_has_a_suggestion_that_loses_little(disk, changes):
    disk += 2 * RECORD_BYTES
    asked, report = reported(disk)
    assert report.status == FitStatus.DOES_NOT_FIT
    assert not any("No setting makes" in reason for reason in report.reasons)
    assert report.suggestions[0].changes == changes, [r.text for r in report.suggestions]
    for suggestion in report.suggestions:
        after = estimate(
            asked.with_values(suggestion.changes), replace(MACHINE, disk_free=disk), SHAPE
        )
        assert after.status != FitStatus.DOES_NOT_FIT and after.disk.total <= disk


def test_a_run_without_an_export_gets_one_in_place_of_checkpoints():
    _, report = reported(EXPORT + 2 * RECORD_BYTES, output__export=False)
    wanted = {"output.checkpoint": "none", "output.export": True}
    assert [suggestion.changes for suggestion in report.suggestions] == [wanted]
    assert "nothing of a run that stops is kept" in report.suggestions[0].text


def test_a_disk_for_nothing_has_no_suggestion():
    _, report = reported(EXPORT // 2)
    assert not report.suggestions and any("No setting makes" in r for r in report.reasons)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_checkpoint_of_an_earlier_session_counts():
    """A disk for one checkpoint does not hold the next one beside that of the session before."""
    disk = FULL + EXPORT + GIB
    values = {"output__checkpoint_every": 0}
    assert reported(disk, **values)[1].status != FitStatus.DOES_NOT_FIT
    _, resumed = reported(disk, before=1, **values)
    assert resumed.status == FitStatus.DOES_NOT_FIT
    assert resumed.suggestions[0].changes["output.checkpoint"] == "weights"


@pytest.mark.parametrize(
    ("values", "copies"),
    [
        ({"output__eval_every": 10}, 2),
        ({"output__eval_every": 100}, 1),
        ({"output__eval_every": 10, "train__steps": None, "train__epochs": 1}, 2),
        ({"output__eval_every": 0}, 0),
        ({"output__eval_every": 10, "output__keep_best": "none"}, 0),
        ({"output__eval_every": 10, "data__eval_fraction": 0.0}, 0),
    ],
)
def test_the_best_weights_are_counted_before_a_run_starts(values, copies):
    _, report = reported(1 << 50, **values)
    assert disk_items(report).get(MemoryItem.BEST, 0) == copies * WEIGHTS


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_a_disk_without_room_for_the_best_weights_only_costs_these():
    """The run fits without them, and the report says that they are not kept."""
    rest = 3 * FULL + EXPORT + RECORD_BYTES
    _, report = reported(rest + 2 * WEIGHTS - 1, output__eval_every=10)
    assert MemoryItem.BEST not in disk_items(report) and report.disk.total == rest
    assert report.status != FitStatus.DOES_NOT_FIT
    shown = [reason for reason in report.reasons if "no room for the best weights" in reason]
    assert len(shown) == 1 and "the weights of the last step are exported" in shown[0]
    _, whole = reported(rest + 2 * WEIGHTS, output__eval_every=10)
    assert whole.disk.total == rest + 2 * WEIGHTS
    # It fits only just, so the report offers to leave them out.
    offered = [suggestion.changes for suggestion in whole.suggestions]
    assert {"output.keep_best": "none"} in offered or whole.status == FitStatus.FITS
    assert not any("best weights (" in reason for reason in whole.reasons)

"""A run that waits for space says why and what can be done. A disk that really fills up is in
test_full_disk.py.
"""

from __future__ import annotations

import engine.runs.record.recorder
import engine.training.loop.disk_space
import engine.training.loop.memory_watch
import engine.training.loop.planning
from app.shared.run_bar import ShownRun, run_bar
from engine.errors import DiskFullError
from engine.runs.record.snapshot import RunSnapshot
from engine.training.loop.disk_space import DiskSpaceWatch, wait_text


def test_where_there_seems_to_be_space_it_is_tried_less_often(monkeypatch, tmp_path):
    lacks = DiskFullError("", str(tmp_path), needed=5, free=7, full="The disk quota is used up")
    watch = DiskSpaceWatch(lacks)
    assert not watch.found()
    monkeypatch.setattr(engine.training.loop.disk_space, "AGAIN_SECONDS", 0.0)
    assert watch.found()
    assert "which did not take it; free some disk space" in wait_text(lacks, 6, is_stopping=False)


def test_a_bar_offers_what_such_a_run_can_take():
    for lacks, actions, saves in (
        ("record", ["stop", "discard"], False),
        ("checkpoint", ["save", "stop", "discard"], True),
        ("stop", ["save", "stop", "discard"], False),
    ):
        bar = run_bar(
            RunSnapshot(state="paused", reason="The disk is full.", lacks_space_for=lacks),
            ShownRun("r", "Run", True),
        )
        assert (bar["sentence"], bar["actions"], bar["waits"], bar["stop_saves"]) == (
            "The disk is full.",
            actions,
            True,
            saves,
        )
    waiting = RunSnapshot(state="paused", reason="The disk is full.", lacks_space_for="record")
    bar = run_bar(waiting, ShownRun("r", "Run", True, "save"))
    assert (bar["sentence"], bar["actions"]) == ("The disk is full.", ["stop", "discard"]), (
        "a request hides no other"
    )
    bar = run_bar(waiting, ShownRun("r", "Run", False))
    assert bar["actions"] == ["resume"]
    assert bar["stop_saves"]
    assert not bar["waits"]
    bar = run_bar(RunSnapshot(state="paused"), ShownRun("r", "Run", True))
    assert "Resume continues at once" in bar["sentence"]
    assert "resume" in bar["actions"]
    assert not bar["waits"]

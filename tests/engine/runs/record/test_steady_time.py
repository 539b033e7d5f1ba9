"""Durations are right although somebody sets the clock of the machine in mid-run."""

from __future__ import annotations

import json

import pytest

from app.shared.charts.axes import places
from app.shared.run_row import run_row
from app.verdict.judge import verdict
from app.verdict.outcome import how_it_ended
from engine.runs.record.events import (
    LogLine,
    MemorySampled,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.listing import list_runs
from tests.support.clocks import DAYS_40, Clocks
from tests.support.folded import fold
from tests.support.run_folders import CONFIG

SETTINGS = (DAYS_40, -DAYS_40, -3.0, 0.5)
BEGIN = 1_760_000_000.0


def folded(path) -> RunSnapshot:
    return fold(replay(path))


def trained(folder, clocks: Clocks, set_by: float, ended: str = "finished") -> RunSnapshot:
    """A run of four steps of 5 s whose clock is set after the second one."""
    recorder = RunRecorder(folder, folder.id)
    recorder.emit(StateChanged("preparing"))
    clocks.pass_by(10)
    recorder.emit(RunStarted(total_steps=4))
    for step in range(1, 5):
        if step == 3:
            clocks.set_by(set_by)
        clocks.pass_by(5)
        recorder.emit(StepFinished(step, loss=1.0, seconds=5.0))
        recorder.emit(MemorySampled(step, host_rss=1, power=360.0))
    recorder.emit(LogLine("info", "done"))
    recorder.emit(RunEnded(ended))
    recorder.close()
    return recorder.snapshot


@pytest.mark.parametrize("set_by", SETTINGS)
def test_a_clock_that_is_set_in_mid_run_changes_no_duration(tmp_path, monkeypatch, set_by):
    clocks = Clocks(monkeypatch)
    folder = create_run(tmp_path, CONFIG)
    live = trained(folder, clocks, set_by)
    lines = [json.loads(line) for line in folder.events_path.read_text().splitlines()]
    assert [line["elapsed"] for line in lines] == [0, 10, 15, 15, 20, 20, 25, 25, 30, 30, 30, 30]
    # What the wall clock told is recorded as it was, for display.
    assert (lines[0]["time"], lines[-1]["time"]) == (BEGIN, BEGIN + 30 + set_by)
    again = folded(folder.events_path)
    assert again == live
    assert again.seconds == pytest.approx(30)
    assert list(places(again, again.steps, "time")) == pytest.approx([15e3, 20e3, 25e3, 30e3])
    # Three intervals of 5 s at 360 W.
    assert again.energy == pytest.approx(1.5)
    assert again.log[-1].time == BEGIN + 30 + set_by
    (run,) = list_runs(tmp_path)
    assert run.seconds == pytest.approx(30) and run_row(run)["at_work"] == "30 s"
    assert how_it_ended(again, "finished") == "Finished 4 steps in 30 s."
    assert verdict(again, "finished").main.text.startswith("Finished 4 steps")


@pytest.mark.parametrize("set_by", SETTINGS)
def test_a_clock_that_was_set_does_not_count_in_a_resume(tmp_path, monkeypatch, set_by):
    """Between two sessions, only the wall clock tells how long the run has rested."""
    clocks = Clocks(monkeypatch)
    folder = create_run(tmp_path, CONFIG)
    trained(folder, clocks, set_by, "stopped")
    clocks.wall += 1000.0
    clocks.even = 7.0  # the machine was started anew
    recorder = RunRecorder(folder, folder.id)
    recorder.emit(StateChanged("preparing"))
    recorder.emit(RunStarted(total_steps=6, resumed_step=4))
    clocks.set_by(-set_by)
    for step in (5, 6):
        clocks.pass_by(5)
        recorder.emit(StepFinished(step, loss=1.0, seconds=5.0))
    recorder.emit(RunEnded())
    recorder.close()
    snapshot = folded(folder.events_path)
    assert snapshot == recorder.snapshot
    assert (snapshot.sessions, snapshot.seconds) == (2, pytest.approx(40))
    x = list(places(snapshot, snapshot.steps, "time"))
    assert x == pytest.approx([15e3, 20e3, 25e3, 30e3, 1035e3, 1040e3])
    (run,) = list_runs(tmp_path)
    assert run.seconds == pytest.approx(40)


def test_a_clock_that_is_set_back_between_two_sessions_makes_no_time_negative(
    tmp_path, monkeypatch
):
    clocks = Clocks(monkeypatch)
    folder = create_run(tmp_path, CONFIG)
    trained(folder, clocks, 0.0, "stopped")
    clocks.set_by(-DAYS_40)
    recorder = RunRecorder(folder, folder.id)
    recorder.emit(StateChanged("preparing"))
    clocks.pass_by(5)
    recorder.emit(RunEnded("stopped"))
    recorder.close()
    assert recorder.snapshot.seconds == pytest.approx(35)
    (run,) = list_runs(tmp_path)
    assert run.seconds == pytest.approx(35)


@pytest.mark.parametrize("elapsed", ["-1.0", '"5"', "1e300", "NaN", "[]"])
def test_a_line_whose_elapsed_cannot_be_is_damaged(tmp_path, monkeypatch, elapsed):
    folder = create_run(tmp_path, CONFIG)
    trained(folder, Clocks(monkeypatch), 0.0)
    lines = folder.events_path.read_text().splitlines()
    lines[4] = lines[4].replace('"elapsed":20.0', f'"elapsed":{elapsed}')
    assert elapsed in lines[4]
    folder.events_path.write_text("".join(f"{line}\n" for line in lines))
    snapshot = folded(folder.events_path)
    assert snapshot.damaged_lines == 1 and snapshot.seconds == pytest.approx(30)

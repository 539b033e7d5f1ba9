"""Whichever byte of a run's record is changed, the list of runs, the replay and the run's screen
still work.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import replace

import pytest

from app.pages.run.run_overview import details
from app.pages.run.run_watch import Watch
from app.session.followed_run import FollowedRun
from app.shared.run_row import run_row
from engine.runs.record import lines
from engine.runs.record.events import LogLine, RunStarted, StepFinished
from engine.runs.record.following import Follower, replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import DAMAGED_SHOWN, RunSnapshot
from engine.runs.summaries.listing import summarize
from engine.tools.cli.runs import runs_as_text
from engine.training.loop.run import start_run
from tests.support.damaged_records import DAMAGE, STEPS, line_of
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.synthetic_run import cannot_apply_step, run_events, step_finished
from tests.support.trained_runs import execute

SEEDS, CHANGES = range(4), 150
BYTES = b'0123456789eE.-+"{}[],: \n\x00\xffatn'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("damaged")
    run = start_run(make_config(place), place / "runs")
    assert execute(run).state == "finished"
    return run.folder


@pytest.mark.slow("it tries a fault at many moments of a run")
@pytest.mark.parametrize("seed", SEEDS)
def test_one_damaged_byte_hides_no_run(run, tmp_path, seed):
    generator, whole = random.Random(seed), run.events_path.read_bytes()
    # Otherwise most of the changes would fall into long lines (the plan's grid, timelines).
    places, start = [], 0
    for line in whole.splitlines(keepends=True):
        places += range(start, start + min(len(line), 500))
        start += len(line)
    folder = RunFolder(tmp_path / "runs" / run.id)
    folder.path.mkdir(parents=True)
    shutil.copy(run.path / "config.yaml", folder.path)
    for _ in range(CHANGES):
        damaged, place = bytearray(whole), generator.choice(places)
        damaged[place] = (
            generator.choice(BYTES)
            if generator.random() < 0.5
            else damaged[place] ^ 1 << generator.randrange(8)
        )
        folder.events_path.write_bytes(damaged)
        where = (
            f"byte {place} of {bytes(whole[max(0, place - 30) : place + 20])!r} became "
            f"{bytes(damaged[place : place + 1])!r}"
        )
        try:
            assert run.id in runs_as_text(tmp_path / "runs", False)
            assert json.loads(runs_as_text(tmp_path / "runs", True))[0]["id"] == run.id
            snapshot = fold(replay(folder.events_path))
            assert snapshot.progress >= 0.0
            assert len(list(replay(folder.events_path))) == len(
                Follower(folder.events_path).read_new()
            )
            answer = json.loads(
                b"{"
                + asyncio.run(Watch(FollowedRun(folder, lambda: False)).answer(0, "step"))
                + b"}"
            )
        except Exception as error:
            raise AssertionError(where) from error
        assert answer["run_id"] == run.id and "loss" in answer["parts"], where


# ---------------------------------------------------------------------- lines of every kind, in the

WRONG_VALUES = {
    "state_changed": [{"state": "on_holiday"}, {"state": ["running"]}, {"reason": None}],
    "run_ended": [{"state": "on_holiday"}, {"reason": {}}],
    "exact_match_measured": [{"samples": [1]}, {"moment": []}],
    "plan_built": [{"choices": [1]}, {"choices": {"predicted_seconds": "9"}}, {"grid": 3}],
    "data_prepared": [{"summary": [1]}],
    "run_started": [{"units": 3}, {"units": [1]}, {"resumed_step": "3"}, {"resumed_step": 10**30}],
    "job_progressed": [{"job": 3}, {"message": None}, {"done": True}],
    "unit_norms": [{"step": 61, "norms": 3}],
    "step_finished": [
        {"step": 61, "loss": 10**400},
        {"step": 61, "tokens": 1 << 62},
        {"step": 61, "exposed": {"h2d": "x"}},
    ],
    "log_line": [{"text": ["x"]}, {"time": 10**400}, {"seq": 10**30}],
    "prompts_answered": [{"answers": {}}],
}
"""These fields parse, but their types or values could not be drawn."""
DAMAGE |= {
    f"{kind.partition('_')[2]} {number}": json.dumps(
        {"kind": kind, "run_id": "r", "seq": 9, "time": 1.0} | values
    ).encode()
    for kind, several in WRONG_VALUES.items()
    for number, values in enumerate(several)
}
NEWER = b'{"kind":"of_a_newer_version","run_id":"r","seq":1,"time":1.0,"step":7}'


@pytest.fixture
def written(tmp_path):
    """Returns an invented run that is over, and the lines of its record."""
    folder = RunFolder(tmp_path / "runs" / "written")
    folder.path.mkdir(parents=True)
    make_config(tmp_path).save(folder.path / "config.yaml")
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(STEPS):
        recorder.emit(event)
    recorder.close()
    return folder, folder.events_path.read_bytes().splitlines(keepends=True)


def the_line(name):
    return {"a backward step": line_of(3), "a far step": line_of(10**9)}.get(name, DAMAGE[name])


@pytest.mark.parametrize("place", ["middle", "end"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_line_hides_no_other(written, name, place):
    folder, lines = written
    at = len(lines) // 2 if place == "middle" else len(lines)
    folder.events_path.write_bytes(b"".join([*lines[:at], the_line(name) + b"\n", *lines[at:]]))
    watch = Watch(FollowedRun(folder, lambda: False))
    answer = json.loads(b"{" + asyncio.run(watch.answer(0, "step")) + b"}")
    assert answer["parts"]["loss"]["data"][0]["x"] == list(range(1, STEPS + 1))
    assert answer["bar"]["state"] == summarize(folder).state == "finished"
    if (place, "step" in name) != (
        "end",
        True,
    ):  # the list reads the last step from the end and has no other step to compare it with
        assert summarize(folder).step == STEPS
    assert [
        "Record",
        "1 line could not be read (see Log), so a curve may lack a point",
    ] in (answer["parts"]["details"]["facts"])
    assert any(
        "is damaged" in line["text"] or "which cannot be" in line["text"]
        for line in [*watch.log()["entries"], *watch.log()["damage"]]
    )


def test_damage_is_seen_while_a_run_is_followed(written):
    folder, lines = written
    folder.events_path.write_bytes(b"")
    follower, snapshot = Follower(folder.events_path), RunSnapshot()
    damage = [the_line(name) + b"\n" for name in DAMAGE if name != "a long line"]
    for number, line in enumerate(lines):
        with open(folder.events_path, "ab") as file:
            file.write(line[:10])
            file.flush()
            for record in follower.read_new():
                snapshot.apply(record)
            file.write(
                line[10:]
                + (damage[number // 10 % len(damage)] if number > 20 and number % 10 == 0 else b"")
            )
        for record in follower.read_new():
            snapshot.apply(record)
    assert list(snapshot.steps.step) == list(range(1, STEPS + 1)) and snapshot.state == "finished"
    again = fold(replay(folder.events_path))
    assert again == snapshot
    assert snapshot.damaged_lines == sum(1 for k in range(21, len(lines)) if k % 10 == 0)


def test_half_of_a_surrogate_pair_is_shown_and_breaks_nothing(written):
    folder, lines = written
    line = {
        "kind": "log_line",
        "run_id": "r",
        "seq": 9,
        "time": 1.0,
        "text": "caf\udce9 \U0001f600",
    }
    folder.events_path.write_bytes(b"".join([*lines, json.dumps(line).encode() + b"\n"]))
    watch = Watch(FollowedRun(folder, lambda: False))
    asyncio.run(watch.answer(0, "step"))
    assert watch.log()["entries"][-1]["text"] == "caf? \U0001f600" and not watch.log()["damage"]


def test_a_record_that_cannot_be_applied_costs_no_other(written, monkeypatch, capsys):
    folder, _ = written
    cannot_apply_step(monkeypatch, 7)
    watch = Watch(FollowedRun(folder, lambda: False))
    answer = json.loads(b"{" + asyncio.run(watch.answer(0, "step")) + b"}")
    assert answer["parts"]["loss"]["data"][0]["x"] == [
        step for step in range(1, STEPS + 1) if step != 7
    ]
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert sum("cannot be shown" in line["text"] for line in watch.log()["damage"]) == 1


def test_a_run_that_cannot_be_shown_hides_no_other(written):
    folder, _ = written
    run = summarize(folder)
    assert run_row(run)["state"] == "finished"
    for wrong in ({"state": "on_holiday"}, {"state": ["x"]}, {"loss": "x"}, {"step": None}):
        row = run_row(replace(run, **wrong))
        assert (
            row["state"] == "unreadable"
            and row["reason"]
            and row["actions"] == ["details", "delete"]
        ), wrong
    assert run_row(replace(run, seconds=float("nan")))["at_work"] == "–"


def test_a_thousand_damaged_lines_leave_space_in_the_log(written):
    folder, lines = written
    folder.events_path.write_bytes(b"".join([*lines[:-1], *[b"garbage\n"] * 1000, lines[-1]]))
    snapshot = fold(replay(folder.events_path))
    assert snapshot.damaged_lines == 1000
    assert dict(details(snapshot)["facts"])["Record"].startswith("1,000 lines")
    assert sum("damaged" in entry.text for entry in snapshot.log) == DAMAGED_SHOWN


def test_what_a_newer_version_wrote_is_no_damage(written):
    folder, lines = written
    folder.events_path.write_bytes(b"".join([*lines[:40], NEWER + b"\n", *lines[40:]]))
    snapshot = fold(replay(folder.events_path))
    assert snapshot.damaged_lines == 0 and list(snapshot.steps.step) == list(range(1, STEPS + 1))


def test_a_resume_whose_first_line_is_damaged_is_followed_all_the_same(tmp_path):
    recorder = RunRecorder(tmp_path, "written")
    for event in run_events(30, total=60, ended=None):
        recorder.emit(event)
    for step in range(21, 61):  # from the checkpoint of step 20, but nothing says so
        recorder.emit(step_finished(step, 60))
    snapshot = recorder.snapshot
    recorder.close()
    assert snapshot.step == 60 and snapshot.damaged_lines == 1
    assert list(snapshot.steps.step) == list(range(1, 61))


def test_a_hole_in_the_record_is_followed_by_the_rest(written):
    folder, lines = written
    folder.events_path.write_bytes(b"".join([*lines[:40], b"swallowed\n", *lines[90:]]))
    snapshot = fold(replay(folder.events_path))
    assert snapshot.step == STEPS and snapshot.state == "finished"


def test_a_resume_of_a_damaged_record_goes_on_counting(written):
    folder, lines = written
    folder.events_path.write_bytes(b"".join(lines[:40]) + b"\x00" * (50 << 20))
    recorder = RunRecorder(folder.path, folder.id)
    assert recorder.emit(LogLine(text="next")).seq == 41
    recorder.emit(RunStarted(total_steps=STEPS, resumed_step=5))
    recorder.emit(step_finished(6, STEPS))
    recorder.close()
    assert list(recorder.snapshot.steps.step) == [1, 2, 3, 4, 5, 6]
    assert (folder.path / "events.torn").stat().st_size == (50 << 20) + 1
    assert [r.event.step for r in replay(folder.events_path) if isinstance(r.event, StepFinished)][
        -1
    ] == 6


def test_lines_behind_one_that_is_too_long_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 64)
    monkeypatch.setattr(lines, "_PASSED_OVER", 10)
    path = tmp_path / "runs" / "run" / "events.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"first\n" + b"x" * 200 + b"\nsecond\n")
    taken = []
    added = lines.AddedLines(path, taken.clear)
    added.read(lambda line, offset: taken.append((line, offset)))
    with path.open("ab") as file:
        file.write(b"third\nnot yet whole")
    added.read(lambda line, offset: taken.append((line, offset)))
    assert taken == [(b"first\n", 0), (b"\n", 6), (b"second\n", 207), (b"third\n", 214)]

"""The app's session handles the one run in its process, several people who control it at once, and
runs in other processes.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from app.session.engine_calls import EngineCalls
from app.session.session import Session
from engine.errors import RunError
from engine.runs.record.control import CommandReader
from engine.runs.record.events import ControlReceived, RunEnded
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.support.routes import wait_for
from tests.support.sessions import CONFIG, at_once, call, finished_run, get, post
from tests.support.synthetic_run import run_events

# ------------------------------------------------------------------ the one run of this process


def test_a_run_runs_in_its_own_thread_and_can_be_watched(session, engine):
    run_id = session.start(CONFIG)
    assert session.active_id == run_id
    for _ in range(3):
        engine.runs[0].may_step.release()
    wait_for(lambda: get(session, f"/api/live/{run_id}").json()["bar"]["step"] == "3 of 10")
    assert get(session, f"/api/live/{run_id}").json()["bar"]["state"] == "running"
    session.request(run_id, "stop")
    wait_for(lambda: session.active_id is None)
    assert get(session, f"/api/live/{run_id}").json()["bar"]["state"] == "stopped"
    assert engine.runs[0].commands == ["stop"]


def test_a_second_start_says_why_not(session, engine):
    session.start(CONFIG)
    with pytest.raises(RunError, match="^Fake is training. This run can start after it."):
        session.start(CONFIG)
    other = finished_run(session, run_events(5, total=10, ended="stopped"))
    with pytest.raises(RunError, match="can start after it"):
        session.resume(other.id)
    engine.runs[0].asked.set()
    wait_for(lambda: session.why_not_start() is None)
    session.start(CONFIG)


def test_a_start_that_is_refused_leaves_the_place_free(tmp_path):
    def refuse(config, runs_dir):
        raise RunError("It does not fit.")

    session = Session(tmp_path, EngineCalls(start_run=refuse))
    with pytest.raises(RunError, match="does not fit"):
        session.start(CONFIG)
    assert session.why_not_start() is None


def test_a_run_that_gets_no_thread_leaves_the_place_free(session, engine, monkeypatch):
    stopped = finished_run(session, run_events(5, total=10, ended="stopped"))

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for start in (lambda: session.start(CONFIG), lambda: session.resume(stopped.id)):
            with pytest.raises(RunError, match="no further thread"):
                start()
    assert session.why_not_start() is None and [run.id for run in session.runs()] == [stopped.id]
    session.start(CONFIG)


def test_a_server_that_ends_starts_nothing_while_it_waits_for_its_jobs(session, engine):
    from app.main import end  # gradio takes seconds to import

    session.start(CONFIG)
    session.queue.add(CONFIG)
    waited = threading.Event()

    def work(job):
        engine.runs[0].asked.set()
        wait_for(lambda: session.active_id is None)
        session.queue.poll()
        waited.set()
        return ""

    session.jobs.start("The work", work)
    end(session)
    assert waited.is_set()
    assert len(engine.runs) == 1
    assert len(session.queue.listed()) == 1
    session.queue.go_on()
    assert session.active_id is None


def test_closing_the_server_stops_and_saves(session, engine):
    session.start(CONFIG)
    session.close()
    assert session.active_id is None and engine.runs[0].commands == ["stop"]


def test_resume_of_a_stopped_run_is_a_new_session_of_it(session, engine):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    assert post(session, f"/api/runs/{folder.id}/control", {"command": "resume"}).json() == {
        "run_id": folder.id
    }
    assert session.active_id == folder.id


# ------------------------------------------------------------------ several people at once


def ends_of(folder):
    return [
        record.event.state
        for record in replay(folder.events_path)
        if isinstance(record.event, RunEnded)
    ]


def test_twenty_who_press_stop_at_once_end_a_run_once(session, engine):
    run_id = session.start(CONFIG)
    wait_for(session.follow(run_id).folder.is_running)
    assert at_once(20, lambda _: session.request(run_id, "stop")) == [run_id] * 20
    wait_for(lambda: session.active_id is None)
    assert at_once(20, lambda _: session.request(run_id, "stop")) == [run_id] * 20, (
        "it has what they ask for"
    )
    assert ends_of(engine.runs[0].folder) == ["stopped"]


def test_twenty_who_press_resume_at_once_start_one_session(session, engine):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    assert (
        at_once(20, lambda _: session.request(folder.id, "resume", "stopped")) == [folder.id] * 20
    )
    assert len(engine.runs) == 1
    wait_for(folder.is_running)
    session.request(folder.id, "stop")
    wait_for(lambda: session.active_id is None)
    assert ends_of(folder) == ["stopped", "stopped"]


def test_twenty_who_press_start_at_once_start_one_run(session, engine):
    answers = at_once(20, lambda _: session.start(CONFIG))
    assert len(engine.runs) == 1 and answers.count(engine.runs[0].id) == 1
    assert all(
        "can start after it" in str(answer) for answer in answers if isinstance(answer, RunError)
    )


def test_different_wishes_at_once_have_one_outcome(session, engine):
    run_id = session.start(CONFIG)
    wait_for(session.follow(run_id).folder.is_running)
    commands = ("stop", "pause", "discard", "resume")
    answers = at_once(20, lambda number: session.request(run_id, commands[number % 4], "paused"))
    assert all(answer == run_id or str(answer).endswith(".") for answer in answers)
    wait_for(lambda: session.active_id is None)
    assert len(engine.runs) == 1 and len(ends_of(engine.runs[0].folder)) == 1


@pytest.mark.parametrize(
    "ended, command, text",
    [
        ("stopped", "discard", "has ended already"),
        ("finished", "stop", "has ended already"),
        ("stopped", "pause", "has ended already"),
        (None, "stop", "its program ended. Resume"),
    ],
)
def test_who_comes_too_late_is_told_how_it_ended(session, ended, command, text):
    folder = finished_run(session, run_events(5, total=10, ended=ended))
    answer = post(
        session, f"/api/runs/{folder.id}/control", {"command": command, "seen": "running"}
    )
    assert answer.status_code == 409 and text in answer.json()["error"]


def test_the_end_of_a_pause_does_not_bring_back_what_another_has_stopped(session, engine):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    answer = post(
        session, f"/api/runs/{folder.id}/control", {"command": "resume", "seen": "paused"}
    )
    assert answer.status_code == 409
    assert "no longer paused" in answer.json()["error"]
    assert not engine.runs


def test_a_stop_stays_shown_while_another_asks_for_a_pause(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        requests = [
            ("POST", f"/api/runs/{folder.id}/control", {"command": command})
            for command in ("stop", "pause")
        ]
        assert (
            call(session, *requests, ("GET", f"/api/live/{folder.id}", None))[-1].json()["bar"][
                "pending"
            ]
            == "stop"
        )


def test_a_command_that_is_read_as_taken_before_it_is_noted_is_not_shown(
    session, engine, monkeypatch
):
    run_id = session.start(CONFIG)
    run = engine.runs[0]
    page = f"/api/live/{run_id}"
    wait_for(lambda: get(session, page).json()["bar"]["state"] == "running")
    followed = session.follow(run_id)

    def taken_at_once(command):
        recorder.emit(ControlReceived(command=command))
        followed.has_news = True
        get(session, page)

    recorder = RunRecorder(run.folder.path, run_id)
    with monkeypatch.context() as patch:
        patch.setattr(run, "request", taken_at_once)
        session.request(run_id, "save")
    recorder.close()
    assert get(session, page).json()["bar"]["pending"] is None


# ------------------------------------------------------------------ runs of other processes


def test_commands_reach_a_run_that_another_owner_holds(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        reader = CommandReader(folder)
        assert (
            post(session, f"/api/runs/{folder.id}/control", {"command": "pause"}).status_code == 200
        )
        assert reader.read_new() == ["pause"]
        assert get(session, f"/api/live/{folder.id}").json()["bar"]["pending"] == "pause"
    answer = post(session, f"/api/runs/{folder.id}/control", {"command": "pause"})
    assert answer.status_code == 409 and "Fake cannot pause" in answer.json()["error"]


def test_a_run_of_another_process_blocks_start_while_it_goes_on(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        with pytest.raises(RunError, match="Fake is training"):
            session.start(CONFIG)
        assert get(session, f"/api/live/{folder.id}").json()["active"] == folder.id
    session.start(CONFIG)


def test_when_the_machine_is_free_again_is_known_while_a_run_goes_on(session, monkeypatch):
    assert session.free_at() is None
    snapshot = SimpleNamespace(seconds_left=90.0, state="running")
    monkeypatch.setattr(type(session), "busy_id", property(lambda _: "a-run"))
    monkeypatch.setattr(session, "follow", lambda _: SimpleNamespace(snapshot=snapshot))
    at = session.free_at()
    assert 88 <= at - time.time() <= 150 and at % 60 == 0
    snapshot.state = "paused"
    assert session.free_at() is None

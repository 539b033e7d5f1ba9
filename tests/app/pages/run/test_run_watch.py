"""The Live tab receives the state of a run while it is in progress and when it is over."""

from __future__ import annotations

import json

import pytest

from app.pages.run.run_figures import FIGURES
from engine.runs.record.events import RunEnded, StateChanged
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.support.routes import wait_for
from tests.support.sessions import CONFIG, call, finished_run, get, post
from tests.support.synthetic_run import run_events


def test_a_growing_record_is_followed(session):
    folder = create_run(session.runs_dir, CONFIG)
    events = run_events(20, total=40, ended=None)
    with folder.lock():
        recorder = RunRecorder(folder.path, folder.id)
        for event in events[:30]:
            recorder.emit(event)
        first = get(session, f"/api/live/{folder.id}").json()
        assert first["seq"] == 30
        for event in events[30:]:
            recorder.emit(event)
        wait_for(lambda: get(session, f"/api/live/{folder.id}").json()["seq"] == len(events))
        recorder.close()
    wait_for(lambda: get(session, f"/api/live/{folder.id}").json()["bar"]["state"] == "interrupted")


def test_only_what_changed_is_sent(session):
    folder = finished_run(session)
    whole = get(session, f"/api/live/{folder.id}").json()
    assert set(whole["parts"]) >= {
        "loss",
        "optimizer",
        "throughput",
        "memory",
        "timeline",
        "details",
    }
    assert whole["server_id"] == session.server_id and whole["active"] is None
    seen = get(session, f"/api/live/{folder.id}?since={whole['seq']}").json()
    assert seen["parts"] == {} and seen["bar"] == whole["bar"]


def test_parts_are_serialized_once_for_all_tabs(session, monkeypatch):
    import app.pages.run.run_watch

    built = []
    real = dict(app.pages.run.run_watch.FIGURES)
    monkeypatch.setattr(
        app.pages.run.run_watch,
        "FIGURES",
        {name: lambda *a, name=name: built.append(name) or real[name](*a) for name in real},
    )
    folder = finished_run(session)
    answers = call(session, *[("GET", f"/api/live/{folder.id}", None)] * 10)
    assert len({answer.content for answer in answers}) == 1
    assert sorted(built) == sorted(real)


def test_both_axes_keep_up(session):
    folder = finished_run(session)
    step, again, time_axis = call(
        session,
        ("GET", f"/api/live/{folder.id}?axis=step", None),
        ("GET", f"/api/live/{folder.id}?axis=time&since=99999", None),
        ("GET", f"/api/live/{folder.id}?axis=time", None),
    )
    assert step.json()["parts"]["loss"]["layout"]["xaxis"]["title"]["text"] == "step"
    assert again.json()["parts"] == {}
    assert time_axis.json()["parts"]["loss"]["layout"]["xaxis"]["type"] == "date"


def test_a_run_without_a_record_yet_can_be_looked_at(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        answer = get(session, f"/api/live/{folder.id}").json()
    assert answer["bar"]["state"] == "preparing" and answer["run_id"] == folder.id
    assert set(answer["parts"]) >= {
        "loss",
        "optimizer",
        "throughput",
        "memory",
        "timeline",
        "details",
    }


@pytest.mark.parametrize("run_id", ["nothing-here", "..", "..%2F..%2Fetc", "%00", ".login.key"])
def test_unknown_runs_and_paths_are_refused_in_a_sentence(session, run_id):
    answer = get(session, f"/api/live/{run_id}")
    assert answer.status_code == 404
    assert post(session, f"/api/runs/{run_id}/control", {"command": "stop"}).status_code in (
        404,
        409,
    )


def test_a_damaged_record_is_told(session):
    folder = finished_run(session)
    with open(folder.events_path, "ab") as file:
        file.write(b"not json\n")
    answer = get(session, f"/api/live/{folder.id}")
    assert answer.status_code == 200 and answer.json()["bar"]["state"] == "finished"
    assert "1 line of the record could not be read" in answer.json()["bar"]["remarks"][0]
    log = get(session, f"/api/runs/{folder.id}/log").json()
    assert sum("events.jsonl is damaged" in entry["text"] for entry in log["entries"]) == 1
    assert log["damage"] == []


def test_a_page_without_an_address_opens_the_active_or_else_the_newest_run(session, engine):
    assert get(session, "/api/live").json()["run_id"] is None
    folder = finished_run(session)
    session._list.forget()
    assert get(session, "/api/live").json()["run_id"] == folder.id
    run_id = session.start(CONFIG)
    assert get(session, "/api/live").json()["run_id"] == run_id


def test_answers_are_json_that_any_reader_takes(session):
    folder = finished_run(session)
    text = get(session, f"/api/live/{folder.id}").text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_empty_figures_of_a_run_that_is_over_promise_no_step(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        recorder = RunRecorder(folder.path, folder.id)
        recorder.emit(StateChanged("preparing"))
        active = get(session, f"/api/live/{folder.id}").json()["parts"]
        recorder.emit(RunEnded("failed", "The data set has no rows."))
        recorder.close()
    wait_for(lambda: get(session, f"/api/live/{folder.id}").json()["bar"]["state"] == "failed")
    answer = get(session, f"/api/live/{folder.id}").json()
    absent = {"power", "accuracy", "preference"}  # without data
    drawn = {*FIGURES, "timeline"} - absent
    assert all("Appears with" in words_of(active[name]) for name in drawn)
    assert all(words_of(answer["parts"][name]).startswith("No step was") for name in drawn)
    assert answer["diagnosis"]["text"] == "The data set has no rows."
    assert answer["bar"]["begins_anew"] is True


def words_of(figure) -> str:
    """Returns the sentence that stands in place of an empty figure."""
    return figure["layout"]["annotations"][0]["text"]

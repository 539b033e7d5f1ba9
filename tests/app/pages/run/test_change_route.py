"""A run is changed through the app's routes."""

from __future__ import annotations

import pytest

from engine.config.changes import Change
from engine.runs.record.control import CommandReader
from engine.runs.record.events import SettingsChanged
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.support.routes import wait_for
from tests.support.sessions import CONFIG, get, post
from tests.support.synthetic_run import run_events


def test_a_change_goes_to_the_run(session, engine):
    run_id = session.start(CONFIG.with_values({"train.learning_rate": 1e-4}))
    engine.runs[0].may_step.release()
    wait_for(lambda: get(session, f"/api/live/{run_id}").json()["bar"]["state"] == "running")
    bar = get(session, f"/api/live/{run_id}").json()["bar"]
    assert "change" in bar["actions"]
    rest = {"done": bar["settings"]["done"], "falls": True}
    assert bar["settings"] == {"learning_rate": 1e-4, "steps": 10} | rest
    assert post(session, f"/api/runs/{run_id}/change", {"values": {"train.steps": 50}}).json() == {
        "run_id": run_id
    }
    assert engine.runs[0].commands == [Change({"train.steps": 50})]


@pytest.mark.parametrize(
    "values, text",
    [
        (None, "names what to change"),
        ({"train.batch_size": 8}, "cannot be changed"),
        ({"train.steps": 0}, "train.steps"),
        ({"train.learning_rate": -1.0}, "train.learning_rate"),
        ({"train.learning_rate": "<b>"}, "not a number"),
    ],
)
def test_a_wrong_change_is_refused_in_a_sentence(session, engine, values, text):
    run_id = session.start(CONFIG)
    answer = post(session, f"/api/runs/{run_id}/change", {"values": values})
    assert answer.status_code == 409
    assert text in answer.json()["error"]
    assert engine.runs[0].commands == []


def test_a_run_of_another_process_is_changed_by_its_control_file_and_its_new_settings_are_shown(
    session,
):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        reader, recorder = CommandReader(folder), RunRecorder(folder.path, folder.id)
        for event in run_events(20, total=40, ended=None):
            recorder.emit(event)
        assert get(session, f"/api/live/{folder.id}").json()["bar"]["settings"]["steps"] == 40
        fewer = post(session, f"/api/runs/{folder.id}/change", {"values": {"train.steps": 19}})
        assert fewer.status_code == 409 and "fewer than the 20" in fewer.json()["error"]
        assert (
            post(
                session, f"/api/runs/{folder.id}/change", {"values": {"train.steps": 60}}
            ).status_code
            == 200
        )
        assert reader.read_new() == [Change({"train.steps": 60})]
        shown = get(session, f"/api/live/{folder.id}").json()["bar"]["sentence"]
        assert shown == "Edit requested: used from the next step on."
        CONFIG.with_values({"train.learning_rate": 3e-4}).save(folder.path / "config.yaml")
        recorder.emit(SettingsChanged(21, {"train.steps": 60, "train.learning_rate": 3e-4}, 60))
        recorder.close()
        session.follow(folder.id).note_request("save", 0)  # reads the record at once
        bar = get(session, f"/api/live/{folder.id}").json()["bar"]
        assert bar["settings"] == {
            "learning_rate": 3e-4,
            "steps": 60,
            "done": 20,
            "falls": True,
        }
        assert bar["step"] == "20 of 60"

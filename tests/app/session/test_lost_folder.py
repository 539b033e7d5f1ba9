"""The run bar tells that a run's folder vanished, whether or not a page was open at the time."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from app.session.session import Session
from engine.runs.record.events import RunStarted, StateChanged
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.support.folders import make_config
from tests.support.routes import wait_for
from tests.support.sessions import CONFIG, finished_run, get, post
from tests.support.synthetic_run import run_events, step_finished

pytestmark = pytest.mark.slow("it tries a fault at many moments of a run")

SECONDS = 60


def live(session, run_id):
    return get(session, f"/api/live/{run_id}").json()


def told(path):
    return (
        f"The run's folder {path} is gone: it was deleted or renamed, or its disk was unmounted; "
        "put it back and resume the run, or start a new one."
    )


@pytest.mark.parametrize("is_watched", [True, False], ids=["with a page", "without a page"])
@pytest.mark.parametrize("is_renamed", [True, False], ids=["renamed", "deleted"])
def test_a_run_of_this_process_ends_and_the_bar_says_why(tmp_path, is_watched, is_renamed):
    with contextlib.closing(Session(tmp_path / "runs")) as session:
        _lose_a_run(session, tmp_path, is_watched, is_renamed)


def _lose_a_run(session, tmp_path, is_watched, is_renamed):
    config = make_config(tmp_path, **{"train.steps": 100_000, "train.schedule": "constant"})
    run_id = session.start(config)
    path = session.runs_dir / run_id
    wait_for(lambda: b'"step_finished"' in (path / "events.jsonl").read_bytes(), SECONDS)
    if is_watched:
        wait_for(lambda: live(session, run_id)["bar"]["state"] == "running")  # it may be saving
    if is_renamed:
        path.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(path)
    wait_for(lambda: session.active_id is None, SECONDS)
    wait_for(lambda: live(session, run_id)["bar"]["state"] == "failed")
    shown = live(session, run_id)
    assert shown["bar"]["sentence"] == shown["diagnosis"]["text"] == told(path)
    assert shown["bar"]["actions"] == [] and shown["diagnosis"]["advice"] == ""
    assert shown["bar"]["tone"] == "bad" and shown["active"] is None
    assert not path.exists() and session.runs() == []
    answer = post(session, f"/api/runs/{run_id}/control", {"command": "resume"})
    assert answer.status_code == 409 and "does not exist" in answer.json()["error"]
    # The next run may start, and one that is put back is shown as it is.
    assert session.why_not_start() is None
    if is_renamed:
        (tmp_path / "elsewhere").rename(path)
        # It had saved nothing, so a new run takes its settings.
        wait_for(lambda: "Duplicate" in live(session, run_id)["diagnosis"]["advice"])
        wait_for(lambda: [run.state for run in session.runs()] == ["failed"])


def test_so_it_is_with_a_run_of_another_process(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        recorder = RunRecorder(folder.path, folder.id)
        for event in (RunStarted(name="n", total_steps=9), StateChanged("running")):
            recorder.emit(event)
        recorder.emit(step_finished(1, 9))
        assert live(session, folder.id)["bar"]["state"] == "running"
        shutil.rmtree(folder.path)
        wait_for(lambda: live(session, folder.id)["bar"]["state"] == "failed")
        recorder.close()
    bar = live(session, folder.id)["bar"]
    assert bar["sentence"] == told(folder.path) and bar["step"] == "1 of 9"


@pytest.mark.parametrize("ended", ["finished", "stopped", None])
def test_a_run_that_nobody_executes_is_simply_gone(session, ended):
    folder = finished_run(session, run_events(5, total=5, ended=ended))
    assert live(session, folder.id)["bar"]["state"] == (ended or "interrupted")
    shutil.rmtree(folder.path)
    answer = get(session, f"/api/live/{folder.id}")
    assert answer.status_code == 404 and "does not exist" in answer.json()["error"]


def test_a_run_that_ended_well_here_is_simply_gone_too(session, engine):
    run_id = session.start(CONFIG)
    session.request(run_id, "stop")
    wait_for(lambda: session.active_id is None)
    shutil.rmtree(session.runs_dir / run_id)
    assert get(session, f"/api/live/{run_id}").status_code == 404

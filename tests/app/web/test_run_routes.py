"""The Runs tab is tested through its routes: the list, a run's name and details, deletion and
export.
"""

from __future__ import annotations

import shlex
import threading
import time

import pytest

from app.session import run_list as run_list_module
from app.session.session import Session
from engine.config.export_choice import ExportChoice
from engine.errors import RunError
from engine.runs.events import StateChanged
from engine.runs.folder import open_run
from engine.runs.recorder import RunRecorder
from tests.support.routes import wait_for
from tests.support.sessions import CONFIG, at_once, finished_run, get, post
from tests.support.synthetic_run import run_events

# ------------------------------------------------------------------ the list


def test_the_list_of_runs(session):
    folder = finished_run(session, name="<b>bold</b>")
    listed = get(session, "/api/runs").json()["runs"]
    assert [run["id"] for run in listed] == [folder.id]
    assert listed[0]["name"] == "<b>bold</b>" and listed[0]["state"] == "finished"


@pytest.mark.parametrize("body", [[], {"command": 3}, {}, {"command": "explode"}])
def test_wrong_requests_are_refused_in_a_sentence(session, body):
    folder = finished_run(session)
    answer = post(session, f"/api/runs/{folder.id}/control", body)
    assert answer.status_code == 409 and answer.json()["error"]


def test_many_who_ask_at_once_have_the_runs_read_once(session, monkeypatch):
    finished_run(session)
    reads, read = [], run_list_module.list_runs

    def slowly(runs_dir):
        reads.append(runs_dir)
        time.sleep(0.05)
        return read(runs_dir)

    monkeypatch.setattr(run_list_module, "list_runs", slowly)
    monkeypatch.setattr(run_list_module, "LIST_SECONDS", 60.0)
    assert {len(rows) for rows in at_once(10, lambda number: session.runs_to_show())} == {
        1
    } and len(reads) == 1
    monkeypatch.setattr(run_list_module, "saved_steps", None)
    assert session.runs_to_show()[0][1].can_talk is False, (
        "nothing of a run is looked up outside the list that is kept"
    )
    session._list.forget()
    monkeypatch.undo()
    finished_run(session)
    assert len(session.runs()) == 2


def test_a_row_offers_to_talk_where_there_are_weights(session, engine):
    _, saved, exported = (finished_run(session) for _ in range(3))  # the first has no weights
    (saved.checkpoints_path / "step-40").mkdir(parents=True)
    exported.export_path.mkdir()
    (exported.export_path / "config.json").write_text("{}")

    def talks():
        session._list.forget()
        return {
            row["id"]
            for row in get(session, "/api/runs").json()["runs"]
            if "talk" in row["actions"]
        }

    assert talks() == {saved.id, exported.id}
    (saved.path / "config.yaml").write_text("{")
    paused = session.start(CONFIG)
    wait_for(open_run(session.runs_dir, paused).events_path.exists)
    assert talks() == {exported.id}
    recorder = RunRecorder(engine.runs[0].folder.path, paused)
    recorder.emit(StateChanged(state="paused"))
    recorder.close()
    assert talks() == {exported.id, paused}


def test_a_run_is_deleted_unless_it_is_going_on(session):
    folder = finished_run(session)
    assert (
        "delete"
        in next(row for row in get(session, "/api/runs").json()["runs"] if row["id"] == folder.id)[
            "actions"
        ]
    )
    with folder.lock():
        answer = post(session, f"/api/runs/{folder.id}/delete", {})
        assert answer.status_code == 409 and folder.path.exists()
    assert post(session, f"/api/runs/{folder.id}/delete", {}).status_code == 200
    assert not folder.path.exists() and get(session, "/api/runs").json()["runs"] == []
    assert get(session, f"/api/live/{folder.id}").status_code == 404


def test_damaged_runs_are_listed_beside_the_others(session):
    good, damaged, gone = (finished_run(session) for _ in range(3))
    (damaged.path / "config.yaml").write_bytes(b"\xff{")
    (damaged.path / "about.json").write_text("{")
    (gone.path / "config.yaml").unlink()
    rows = {row["id"]: row for row in get(session, "/api/runs").json()["runs"]}
    assert rows[good.id]["state"] == "finished"
    for folder in (damaged, gone):
        assert rows[folder.id]["state"] == "unreadable" and rows[folder.id]["actions"] == [
            "details",
            "delete",
        ]
        found = get(session, f"/api/runs/{folder.id}/details").json()
        assert found["commands"] == [] and bool(found["config_problem"]) == (folder is gone)


def test_an_interrupted_run_can_be_resumed_from_the_list(session):
    folder = finished_run(session, run_events(5, total=10, ended=None))
    (row,) = get(session, "/api/runs").json()["runs"]
    assert row["state"] == "interrupted" and "resume" in row["actions"] and folder.id == row["id"]


# ------------------------------------------------------------------ names and details


def test_a_run_is_renamed_in_the_list_and_in_the_bar(session):
    folder = finished_run(session)
    get(session, f"/api/live/{folder.id}")
    answer = post(
        session, f"/api/runs/{folder.id}/describe", {"name": " Better ", "note": "as it <i>was</i>"}
    )
    assert answer.json() == {"name": "Better", "note": "as it <i>was</i>"}
    (row,) = get(session, "/api/runs").json()["runs"]
    assert (row["id"], row["name"], row["note"]) == (folder.id, "Better", "as it <i>was</i>")
    wait_for(lambda: get(session, f"/api/live/{folder.id}").json()["bar"]["name"] == "Better")
    bar = get(session, f"/api/live/{folder.id}").json()["bar"]
    assert bar["note"] == "as it <i>was</i>" and "Better" in bar["title"]
    for wrong in ({"name": "x"}, {"name": 1, "note": ""}, {"name": "a\nb", "note": ""}):
        assert post(session, f"/api/runs/{folder.id}/describe", wrong).status_code == 409
    assert post(session, "/api/runs/none/describe", {"name": "", "note": ""}).status_code == 409


def test_the_details_of_a_run_are_its_exact_settings_and_commands(session):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    (folder.path / "stderr.txt").write_text("a warning\n")
    found = get(session, f"/api/runs/{folder.id}/details").json()
    assert (
        found["config"] == (folder.path / "config.yaml").read_text()
        and found["config_name"] == "Fake"
    )
    runs = str(session.runs_dir)
    assert [command["text"] for command in found["commands"]] == [
        f"python launch.py train --resume {folder.id} --runs-dir {runs}",
        f"python launch.py train {runs}/{folder.id}/config.yaml --runs-dir {runs}",
    ]
    assert found["printed"] == ["a warning"]
    finished = get(session, f"/api/runs/{finished_run(session).id}/details").json()
    assert [command["label"] for command in finished["commands"]] == [
        "A new run with the same settings"
    ]
    assert get(session, "/api/runs/none/details").status_code == 404


def test_the_commands_are_quoted_for_a_shell(tmp_path, engine):
    session = Session(tmp_path / "my runs; $HOME", engine.calls())
    folder = finished_run(session)
    (command,) = get(session, f"/api/runs/{folder.id}/details").json()["commands"]
    assert shlex.split(command["text"])[3:] == [
        str(folder.path / "config.yaml"),
        "--runs-dir",
        str(session.runs_dir),
    ]


# ------------------------------------------------------------------ export


def test_export_is_a_job(session, engine, tmp_path):
    folder = finished_run(session)
    job = post(session, f"/api/runs/{folder.id}/export", {"folder": str(tmp_path / "model")}).json()
    wait_for(lambda: get(session, f"/api/jobs/{job['id']}").json()["state"] == "done")
    done = get(session, f"/api/jobs/{job['id']}").json()
    assert done["result"] == f"Exported the model of step 7 to {tmp_path / 'model'}."
    assert (done["done"], done["total"]) == (1, 2)
    assert engine.asked == [(folder.id, tmp_path / "model", ExportChoice())]
    assert post(session, f"/api/runs/{folder.id}/export", {"folder": " "}).status_code == 409


def test_a_failed_job_says_why_and_jobs_take_turns(session):
    folder = finished_run(session)
    gate = threading.Event()
    session.jobs.start("The export of x", lambda job: gate.wait(5) and "")
    with pytest.raises(RunError, match="The export of x is still under way"):
        session.export(folder.id, "somewhere")
    gate.set()
    wait_for(lambda: session.jobs.find(1).state == "done")
    job = session.export(folder.id, "full")
    wait_for(lambda: job.state == "failed")
    assert job.error == "The disk is full."
    assert get(session, "/api/jobs/99").status_code == 404

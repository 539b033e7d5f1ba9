"""A run on several GPUs gets a process of its own whenever it is started or resumed: one that fails
on a GPU may take its process along. The processes here are pretended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest

from app.session import detached
from app.session.detached import is_starting
from app.session.engine_calls import EngineCalls
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.runs.record.events import RunEnded, RunStarted
from engine.runs.record.following import replay
from engine.runs.record.run_folder import create_run, open_run
from tests.support.routes import wait_for
from tests.support.sessions import get
from tests.support.synthetic_run import records, step_finished, write_events

VALUES = {"name": "Both", "model": {"source": "m"}, "data": {"source": "d"}}
CONFIG = TrainConfig.from_dict(VALUES | {"engine": {"gpus": 2}})
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def never(*_):
    raise AssertionError("it runs in this process")


@pytest.fixture
def started(monkeypatch):
    """The folders that got a process, which sleeps."""
    folders = []

    def command(folder):
        if folder.id not in folders:
            folders.append(folder.id)
        return SLEEPS

    monkeypatch.setattr(detached, "train_command", command)
    return folders


def session_of(tmp_path, resume_run=never):
    return Session(tmp_path, EngineCalls(start_run=never, resume_run=resume_run))


def ended(tmp_path, config=CONFIG):
    """A run that has stopped after two steps of nine."""
    folder = create_run(tmp_path, config)
    steps = [step_finished(step, 9) for step in (1, 2)]
    events = [RunStarted(total_steps=9), *steps, RunEnded("stopped", "Stopped by a person.")]
    write_events(folder.events_path, records(events, folder.id))
    manifest = folder.checkpoints_path / "step-2"
    manifest.mkdir(parents=True)
    return folder


def end(folder):
    process = json.loads((folder.path / "detached.json").read_text())["pid"]
    os.kill(process, 9)


def bar(session, run_id):
    return get(session, f"/api/live/{run_id}").json()["bar"]


def test_start_means_a_process(tmp_path, started):
    session = session_of(tmp_path)
    for gpus in (2, "auto"):
        run_id = session.start(CONFIG.with_values({"engine.gpus": gpus}))
        folder = open_run(tmp_path, run_id)
        assert started[-1] == run_id and session.active_id is None
        assert session.busy_id == run_id and bar(session, run_id)["state"] == "preparing"
        end(folder)
        # Its end is recorded under the run's lock, which counts as running.
        wait_for(lambda: folder.events_path.exists() and session.why_not_start() is None)
        wait_for(lambda: session.runs()[0].state == "failed")
    with pytest.raises(AssertionError, match="in this process"):
        session.start(CONFIG.with_values({"engine.gpus": 1}))


def test_a_resume_is_told_until_its_process_writes(tmp_path, started):
    closed = []
    owned = SimpleNamespace(close=lambda: closed.append(True))
    session = session_of(tmp_path, lambda *_: owned)
    folder = ended(tmp_path)
    assert bar(session, folder.id)["state"] == "stopped"
    session.request(folder.id, "resume")
    assert started == [folder.id] and closed == [True]
    shown = bar(session, folder.id)
    assert (shown["state"], shown["sentence"]) == ("preparing", "Its process is starting.")
    assert "resume" not in shown["actions"]
    (listed,) = session.runs()
    assert listed.state == "preparing" and session.busy_id == folder.id
    assert session.resume(folder.id) == folder.id and len(started) == 1
    with pytest.raises(RunError, match="is starting; stop it first"):
        session.delete(folder.id)
    # Its first line ends that, and the record tells the rest.
    with folder.events_path.open("ab") as file:
        file.write(b'{"kind":"state_changed","run_id":"r","seq":9,"time":1,"state":"preparing"}\n')
    assert not is_starting(folder)
    end(folder)


def test_a_process_that_ends_before_it_writes_is_a_failure_of_the_resume(tmp_path, started):
    session = session_of(tmp_path, lambda *_: SimpleNamespace(close=lambda: None))
    folder = ended(tmp_path)
    before = folder.events_path.read_bytes()
    session.request(folder.id, "resume")
    wait_for(lambda: is_starting(folder))
    end(folder)

    def last():
        return list(replay(folder.events_path))[-1].event

    wait_for(lambda: last().state == "failed")
    assert "was ended by SIGKILL before the run began" in last().reason
    assert folder.events_path.read_bytes().startswith(before)
    time.sleep(0.05)
    size = folder.events_path.stat().st_size
    Session(tmp_path).runs()  # nobody tells it twice
    assert folder.events_path.stat().st_size == size
    assert bar(session, folder.id)["state"] == "failed"


def test_what_speaks_against_a_resume_is_no_failure_of_the_run(tmp_path, started):
    def refuse(*_):
        raise RunError("it has finished")

    session = session_of(tmp_path, refuse)
    folder = ended(tmp_path)
    before = folder.events_path.read_bytes()
    with pytest.raises(RunError, match="it has finished"):
        session.resume(folder.id)
    assert not started and folder.events_path.read_bytes() == before


def test_a_run_of_one_gpu_is_resumed_here(tmp_path, started):
    session = session_of(tmp_path)
    folder = ended(tmp_path, CONFIG.with_values({"engine.gpus": 1}))
    with pytest.raises(AssertionError, match="in this process"):
        session.resume(folder.id)
    assert not started

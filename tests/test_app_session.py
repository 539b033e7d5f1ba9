from __future__ import annotations

import asyncio
import json
import shlex
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette

from app import session as session_module
from app.job_routes import job_routes
from app.run_routes import run_routes
from app.session import EngineCalls, Session
from engine.config import TrainConfig
from engine.errors import RunError
from engine.events import ControlReceived, RunEnded, RunStarted, StateChanged
from engine.recorder import RunRecorder, replay
from engine.runs import CommandReader, create_run, open_run
from tests.synthetic_run import run_events, step_finished

CONFIG = TrainConfig.from_dict({"name": "Fake", "model": {"source": "m"}, "data": {"source": "d"}})


class FakeRun:
    """Steps when told to; obeys like `engine.job.Run`."""

    def __init__(self, folder):
        self.id, self.folder = folder.id, folder
        self.commands: list[str] = []
        self.may_step, self.asked = threading.Semaphore(0), threading.Event()

    def execute(self):
        with self.folder.lock():
            recorder = RunRecorder(self.folder.path, self.id)
            recorder.emit(RunStarted(name="Fake", total_steps=10))
            recorder.emit(StateChanged(state="running"))
            step = recorder.snapshot.step
            while step < 10 and not self.asked.is_set():
                if self.may_step.acquire(timeout=0.01):
                    step += 1
                    recorder.emit(step_finished(step, 10))
            for command in self.commands:
                recorder.emit(ControlReceived(command=command if isinstance(command, str) else "change"))
            recorder.emit(RunEnded(state="stopped" if self.asked.is_set() else "finished"))
            recorder.close()

    def request(self, command):
        self.commands.append(command)
        if command != "resume":  # which means nothing to one that is going on
            self.asked.set()

    def close(self):
        pass


class FakeEngine:
    """Keeps the runs it made; `asked` are the arguments of the other calls."""

    def __init__(self):
        self.runs: list[FakeRun] = []
        self.asked: list[tuple] = []

    def calls(self):
        return EngineCalls(start_run=lambda config, runs_dir: self.make(create_run(runs_dir, config)),
                           resume_run=lambda runs_dir, run_id: self.make(open_run(runs_dir, run_id)),
                           export_run=self.export)

    def make(self, folder):
        self.runs.append(FakeRun(folder))
        return self.runs[-1]

    def export(self, runs_dir, run_id, folder, checkpoint=None, progress=None):
        progress(1, 2)
        if folder.name == "full":
            raise RunError("The disk is full.")
        self.asked.append((run_id, folder, checkpoint))
        return SimpleNamespace(step=7, skipped=())


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def session(tmp_path, engine):
    session = Session(tmp_path / "runs", engine.calls())
    yield session
    session.close()


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never became true"
        time.sleep(0.005)


def call(session, *requests):
    """Answers of (method, path, json) requests to the session's routes, one after the other in one event loop."""
    async def go():
        transport = httpx.ASGITransport(Starlette(routes=run_routes(session) + job_routes(session.jobs)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(go())


def get(session, path):
    return call(session, ("GET", path, None))[0]


def post(session, path, body):
    return call(session, ("POST", path, body))[0]


def finished_run(session, events=None, **config):
    folder = create_run(session.runs_dir, CONFIG.with_values(config))
    recorder = RunRecorder(folder.path, folder.id)
    for event in events or run_events(60):
        recorder.emit(event)
    recorder.close()
    return folder


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
    run_id = session.start(CONFIG)
    with pytest.raises(RunError, match=f"{run_id} is running here"):
        session.start(CONFIG)
    other = finished_run(session, run_events(5, total=10, ended="stopped"))
    with pytest.raises(RunError, match="one run at a time"):
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
        session.queue.look()
        waited.set()
        return ""

    session.jobs.start("The work", work)
    end(session)
    assert waited.is_set() and len(engine.runs) == 1 and len(session.queue.listed()) == 1
    session.queue.go_on()
    assert session.active_id is None


def test_closing_the_server_stops_and_saves(session, engine):
    session.start(CONFIG)
    session.close()
    assert session.active_id is None and engine.runs[0].commands == ["stop"]


def test_resume_of_a_stopped_run_is_a_new_session_of_it(session, engine):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    assert post(session, f"/api/runs/{folder.id}/control", {"command": "resume"}).json() == {"run_id": folder.id}
    assert session.active_id == folder.id


# ------------------------------------------------------------------ several people at once


def at_once(count, act):
    """What `act(number)` returned or raised, of so many threads that begin together."""
    gate, answers = threading.Barrier(count), [None] * count

    def one(number):
        gate.wait()
        try:
            answers[number] = act(number)
        except RunError as error:
            answers[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def ends_of(folder):
    return [record.event.state for record in replay(folder.events_path) if isinstance(record.event, RunEnded)]


def test_twenty_who_press_stop_at_once_end_a_run_once(session, engine):
    run_id = session.start(CONFIG)
    wait_for(lambda: session.watch(run_id).folder.is_running())
    assert at_once(20, lambda _: session.request(run_id, "stop")) == [run_id] * 20
    wait_for(lambda: session.active_id is None)
    assert at_once(20, lambda _: session.request(run_id, "stop")) == [run_id] * 20, "it has what they ask for"
    assert ends_of(engine.runs[0].folder) == ["stopped"]


def test_twenty_who_press_resume_at_once_start_one_session(session, engine):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    assert at_once(20, lambda _: session.request(folder.id, "resume", "stopped")) == [folder.id] * 20
    assert len(engine.runs) == 1
    wait_for(folder.is_running)
    session.request(folder.id, "stop")
    wait_for(lambda: session.active_id is None)
    assert ends_of(folder) == ["stopped", "stopped"]


def test_twenty_who_press_start_at_once_start_one_run(session, engine):
    answers = at_once(20, lambda _: session.start(CONFIG))
    assert len(engine.runs) == 1 and answers.count(engine.runs[0].id) == 1
    assert all("one run at a time" in str(answer) for answer in answers if isinstance(answer, RunError))


def test_different_wishes_at_once_have_one_outcome(session, engine):
    run_id = session.start(CONFIG)
    wait_for(lambda: session.watch(run_id).folder.is_running())
    commands = ("stop", "pause", "discard", "resume")
    answers = at_once(20, lambda number: session.request(run_id, commands[number % 4], "paused"))
    assert all(answer == run_id or str(answer).endswith(".") for answer in answers)
    wait_for(lambda: session.active_id is None)
    assert len(engine.runs) == 1 and len(ends_of(engine.runs[0].folder)) == 1


@pytest.mark.parametrize("ended, command, said", [
    ("stopped", "discard", "has ended already"), ("finished", "stop", "has ended already"),
    ("stopped", "pause", "has ended already"), (None, "stop", "its program ended. Resume")])
def test_who_comes_too_late_is_told_how_it_ended(session, ended, command, said):
    folder = finished_run(session, run_events(5, total=10, ended=ended))
    answer = post(session, f"/api/runs/{folder.id}/control", {"command": command, "seen": "running"})
    assert answer.status_code == 409 and said in answer.json()["error"]


def test_the_end_of_a_pause_does_not_bring_back_what_another_has_stopped(session, engine):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    answer = post(session, f"/api/runs/{folder.id}/control", {"command": "resume", "seen": "paused"})
    assert answer.status_code == 409 and "no longer paused" in answer.json()["error"] and not engine.runs


def test_a_stop_stays_shown_while_another_asks_for_a_pause(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        requests = [("POST", f"/api/runs/{folder.id}/control", {"command": command}) for command in ("stop", "pause")]
        assert call(session, *requests, ("GET", f"/api/live/{folder.id}", None))[-1].json()["bar"]["pending"] == "stop"


def test_a_command_that_is_read_as_taken_before_it_is_noted_is_not_shown(session, engine, monkeypatch):
    run_id = session.start(CONFIG)
    run = engine.runs[0]
    page = f"/api/live/{run_id}"
    wait_for(lambda: get(session, page).json()["bar"]["state"] == "running")
    watch = session.watch(run_id)

    def taken_at_once(command):
        recorder.emit(ControlReceived(command=command))
        watch._read_at = 0.0
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
        assert post(session, f"/api/runs/{folder.id}/control", {"command": "pause"}).status_code == 200
        assert reader.read_new() == ["pause"]
        assert get(session, f"/api/live/{folder.id}").json()["bar"]["pending"] == "pause"
    answer = post(session, f"/api/runs/{folder.id}/control", {"command": "pause"})
    assert answer.status_code == 409 and "not running" in answer.json()["error"]


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


# ------------------------------------------------------------------ what pages are sent


def test_only_what_changed_is_sent(session):
    folder = finished_run(session)
    whole = get(session, f"/api/live/{folder.id}").json()
    assert set(whole["parts"]) >= {"loss", "optimizer", "throughput", "memory", "timeline", "details"}
    assert whole["server_id"] == session.server_id and whole["active"] is None
    seen = get(session, f"/api/live/{folder.id}?since={whole['seq']}").json()
    assert seen["parts"] == {} and seen["bar"] == whole["bar"]


def test_parts_are_serialised_once_for_all_tabs(session, monkeypatch):
    import app.watch

    built = []
    real = dict(app.watch.FIGURES)
    monkeypatch.setattr(app.watch, "FIGURES", {
        name: lambda *a, name=name: built.append(name) or real[name](*a) for name in real})
    folder = finished_run(session)
    answers = call(session, *[("GET", f"/api/live/{folder.id}", None)] * 10)
    assert len({answer.content for answer in answers}) == 1
    assert sorted(built) == sorted(real)


def test_both_axes_keep_up(session):
    folder = finished_run(session)
    step, again, time_axis = call(session, ("GET", f"/api/live/{folder.id}?axis=step", None),
                                  ("GET", f"/api/live/{folder.id}?axis=time&since=99999", None),
                                  ("GET", f"/api/live/{folder.id}?axis=time", None))
    assert step.json()["parts"]["loss"]["layout"]["xaxis"]["title"]["text"] == "step"
    assert again.json()["parts"] == {}
    assert time_axis.json()["parts"]["loss"]["layout"]["xaxis"]["type"] == "date"


def test_a_run_without_a_record_yet_can_be_looked_at(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        answer = get(session, f"/api/live/{folder.id}").json()
    assert answer["bar"]["state"] == "preparing" and answer["run_id"] == folder.id
    assert set(answer["parts"]) >= {"loss", "optimizer", "throughput", "memory", "timeline", "details"}


@pytest.mark.parametrize("run_id", ["nothing-here", "..", "..%2F..%2Fetc", "%00", ".login.key"])
def test_unknown_runs_and_paths_are_refused_in_a_sentence(session, run_id):
    answer = get(session, f"/api/live/{run_id}")
    assert answer.status_code == 404
    assert post(session, f"/api/runs/{run_id}/control", {"command": "stop"}).status_code in (404, 409)


def test_a_damaged_record_is_told(session):
    folder = finished_run(session)
    with open(folder.events_path, "ab") as file:
        file.write(b"not json\n")
    answer = get(session, f"/api/live/{folder.id}")
    assert answer.status_code == 200 and answer.json()["bar"]["state"] == "finished"
    assert "events.jsonl is damaged" in answer.text


def test_a_page_without_an_address_opens_the_active_or_else_the_newest_run(session, engine):
    assert get(session, "/api/live").json()["run_id"] is None
    folder = finished_run(session)
    session._look_again()
    assert get(session, "/api/live").json()["run_id"] == folder.id
    run_id = session.start(CONFIG)
    assert get(session, "/api/live").json()["run_id"] == run_id


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


# ------------------------------------------------------------------ long work


def test_export_is_a_job(session, engine, tmp_path):
    folder = finished_run(session)
    job = post(session, f"/api/runs/{folder.id}/export", {"folder": str(tmp_path / "model")}).json()
    wait_for(lambda: get(session, f"/api/jobs/{job['id']}").json()["state"] == "done")
    done = get(session, f"/api/jobs/{job['id']}").json()
    assert done["result"] == f"Exported the model of step 7 to {tmp_path / 'model'}."
    assert (done["done"], done["total"]) == (1, 2)
    assert engine.asked == [(folder.id, tmp_path / "model", None)]
    assert post(session, f"/api/runs/{folder.id}/export", {"folder": " "}).status_code == 409


def test_many_who_ask_at_once_have_the_runs_read_once(session, monkeypatch):
    finished_run(session)
    reads, read = [], session_module.list_runs

    def slowly(runs_dir):
        reads.append(runs_dir)
        time.sleep(0.05)
        return read(runs_dir)

    monkeypatch.setattr(session_module, "list_runs", slowly)
    monkeypatch.setattr(session_module, "LIST_SECONDS", 60.0)
    assert {len(rows) for rows in at_once(10, lambda number: session.runs_to_show())} == {1} and len(reads) == 1
    monkeypatch.setattr(session_module, "folders_by_step", None)
    assert session.runs_to_show()[0][1] is False, "nothing of a run is looked up outside the list that is kept"
    session._look_again()
    monkeypatch.undo()
    finished_run(session)
    assert len(session.runs()) == 2


def test_a_row_offers_to_talk_where_there_are_weights(session, engine):
    bare, saved, exported = (finished_run(session) for _ in range(3))
    (saved.checkpoints_path / "step-40").mkdir(parents=True)
    exported.export_path.mkdir()
    (exported.export_path / "config.json").write_text("{}")

    def talks():
        session._look_again()
        return {row["id"] for row in get(session, "/api/runs").json()["runs"] if "talk" in row["actions"]}

    assert talks() == {saved.id, exported.id}
    (saved.path / "config.yaml").write_text("{")
    paused = session.start(CONFIG)
    wait_for(lambda: open_run(session.runs_dir, paused).events_path.exists())
    assert talks() == {exported.id}
    recorder = RunRecorder(engine.runs[0].folder.path, paused)
    recorder.emit(StateChanged(state="paused"))
    recorder.close()
    assert talks() == {exported.id, paused}


def test_a_run_is_deleted_unless_it_is_going_on(session):
    folder = finished_run(session)
    assert "delete" in next(row for row in get(session, "/api/runs").json()["runs"] if row["id"] == folder.id)["actions"]
    with folder.lock():
        answer = post(session, f"/api/runs/{folder.id}/delete", {})
        assert answer.status_code == 409 and folder.path.exists()
    assert post(session, f"/api/runs/{folder.id}/delete", {}).status_code == 200
    assert not folder.path.exists() and get(session, "/api/runs").json()["runs"] == []
    assert get(session, f"/api/live/{folder.id}").status_code == 404


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


def test_answers_are_json_that_any_reader_takes(session):
    folder = finished_run(session)
    text = get(session, f"/api/live/{folder.id}").text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ------------------------------------------------------------------ names, details, damage


def test_a_run_is_renamed_in_the_list_and_in_the_bar(session):
    folder = finished_run(session)
    get(session, f"/api/live/{folder.id}")
    answer = post(session, f"/api/runs/{folder.id}/describe", {"name": " Better ", "note": "as it <i>was</i>"})
    assert answer.json() == {"name": "Better", "note": "as it <i>was</i>"}
    row, = get(session, "/api/runs").json()["runs"]
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
    assert found["config"] == (folder.path / "config.yaml").read_text() and found["config_name"] == "Fake"
    runs = str(session.runs_dir)
    assert [command["text"] for command in found["commands"]] == [
        f"python launch.py train --resume {folder.id} --runs-dir {runs}",
        f"python launch.py train {runs}/{folder.id}/config.yaml --runs-dir {runs}"]
    assert found["printed"] == ["a warning"]
    finished = get(session, f"/api/runs/{finished_run(session).id}/details").json()
    assert [command["label"] for command in finished["commands"]] == ["A new run with the same settings"]
    assert get(session, "/api/runs/none/details").status_code == 404


def test_the_commands_are_quoted_for_a_shell(tmp_path, engine):
    session = Session(tmp_path / "my runs; $HOME", engine.calls())
    folder = finished_run(session)
    command, = get(session, f"/api/runs/{folder.id}/details").json()["commands"]
    assert shlex.split(command["text"])[3:] == [str(folder.path / "config.yaml"), "--runs-dir", str(session.runs_dir)]


def test_damaged_runs_are_listed_beside_the_others(session):
    good, damaged, gone = (finished_run(session) for _ in range(3))
    (damaged.path / "config.yaml").write_bytes(b"\xff{")
    (damaged.path / "about.json").write_text("{")
    (gone.path / "config.yaml").unlink()
    rows = {row["id"]: row for row in get(session, "/api/runs").json()["runs"]}
    assert rows[good.id]["state"] == "finished"
    for folder in (damaged, gone):
        assert rows[folder.id]["state"] == "unreadable" and rows[folder.id]["actions"] == ["details", "delete"]
        found = get(session, f"/api/runs/{folder.id}/details").json()
        assert found["commands"] == [] and bool(found["config_problem"]) == (folder is gone)


def test_an_interrupted_run_can_be_resumed_from_the_list(session):
    folder = finished_run(session, run_events(5, total=10, ended=None))
    row, = get(session, "/api/runs").json()["runs"]
    assert row["state"] == "interrupted" and "resume" in row["actions"] and folder.id == row["id"]


def test_a_run_of_another_process_blocks_start_while_it_goes_on(session):
    folder = create_run(session.runs_dir, CONFIG)
    with folder.lock():
        with pytest.raises(RunError, match=f"{folder.id} is running in a process of its own"):
            session.start(CONFIG)
        assert get(session, f"/api/live/{folder.id}").json()["active"] == folder.id
    session.start(CONFIG)

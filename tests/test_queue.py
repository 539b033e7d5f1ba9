"""Runs that wait for their turn: order, what survives a restart, and that one which cannot start holds up no other."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest
from starlette.applications import Starlette

from app.queue import DAMAGED_FILE, QUEUE_FILE, RunQueue
from app.queue_routes import queue_routes
from app.session import EngineCalls, Session
from engine.config import TrainConfig
from engine.errors import RunError
from tests.test_app_session import FakeEngine, wait_for

CONFIG = TrainConfig.from_dict({"name": "Fake", "model": {"source": "m"}, "data": {"source": "d"}})


def named(name):
    return CONFIG.with_values({"name": name})


class Place:
    """Where one run at a time can be; `started` are the names, in order."""

    def __init__(self, free=True):
        self.free, self.started, self.refused = free, [], {}
        self.lock = threading.Lock()

    def start(self, config):
        with self.lock:
            if config.name in self.refused:
                raise self.refused[config.name]
            if not self.free:
                raise RunError("One is running.")
            self.free = False
            self.started.append(config.name)
            return config.name

    def why_not(self):
        return None if self.free else "One is running."

    def end(self, queue):
        self.free = True
        queue.look()


@pytest.fixture
def place():
    return Place(free=False)


@pytest.fixture
def queue(tmp_path, place):
    queue = RunQueue(tmp_path, place.start, place.why_not)
    yield queue
    queue.close()


def names(queue):
    return [queued.name for queued in queue.listed()]


def test_runs_start_in_turn_as_the_one_before_ends(queue, place):
    assert [queue.add(named(name)) for name in "abc"] == [1, 2, 3]
    assert names(queue) == ["a", "b", "c"] and place.started == []
    for started in ("a", "ab", "abc"):
        place.end(queue)
        wait_for(lambda: place.started == list(started) and names(queue) == list("abc")[len(started):])
    place.end(queue)
    queue.add(named("d"))  # after the queue was empty for a while
    wait_for(lambda: place.started == list("abcd"))


def test_a_run_of_another_process_that_ends_makes_room_too(queue, place, monkeypatch):
    monkeypatch.setattr("app.queue.LOOK_SECONDS", 0.02)
    queue.add(named("a"))
    place.free = True  # nobody tells
    wait_for(lambda: place.started == ["a"])


def test_order_and_removal(queue):
    for name in "abc":
        queue.add(named(name))
    a, b, c = (queued.id for queued in queue.listed())
    queue.move_up(c)
    queue.move_up(a)
    assert names(queue) == ["a", "c", "b"]
    queue.move_up(a)
    queue.remove(c)
    assert names(queue) == ["a", "b"]
    for change in (queue.remove, queue.move_up):
        with pytest.raises(RunError, match="not in the queue any more"):
            change(c)
    queue.remove(a), queue.remove(b)
    assert names(queue) == []


def test_one_that_cannot_start_says_why_and_holds_up_no_other(queue, place, capsys):
    place.refused = {"a": RunError("There is no file d."), "b": ZeroDivisionError("oops")}
    for name in "abc":
        queue.add(named(name))
    place.end(queue)
    wait_for(lambda: place.started == ["c"])
    wait_for(lambda: names(queue) == ["a", "b"])
    assert [queued.problem for queued in queue.listed()] == ["There is no file d.",
                                                             "It could not be started (ZeroDivisionError: oops)."]
    assert "ZeroDivisionError" in capsys.readouterr().err
    place.end(queue)  # those two do not try again
    assert queue.add(named("d")) == 1
    wait_for(lambda: place.started == ["c", "d"])


def test_whoever_is_quicker_takes_no_place_in_the_queue(tmp_path):
    place = Place(free=False)
    asked = iter([None])  # once it looks free, then it is taken
    queue = RunQueue(tmp_path, place.start, lambda: next(asked, "One is running."))
    queue.add(named("a"))
    wait_for(lambda: next(asked, "over") == "over")
    assert names(queue) == ["a"] and queue.listed()[0].problem == ""
    queue.close()


def test_a_restart_loses_nothing_and_starts_nothing(tmp_path, queue, place):
    queue.add(named("a"))
    queue.add(named("b"))
    queue.close()
    place.free = True
    again = RunQueue(tmp_path, place.start, place.why_not)
    assert names(again) == ["a", "b"] and again.is_held
    assert again.add(named("c")) == 3
    again.look()
    assert place.started == []
    again.go_on()
    wait_for(lambda: place.started == ["a"] and names(again) == ["b", "c"])
    again.close()


def test_nothing_is_held_once_everything_of_before_is_removed(tmp_path, queue, place):
    queue.add(named("a"))
    queue.close()
    again = RunQueue(tmp_path, place.start, place.why_not)
    again.remove(again.listed()[0].id)
    assert not again.is_held
    again.close()


@pytest.mark.parametrize("content", ["{", "[1]", '[{"id": 1}]', '{"a": 1}', '[{"id":"a","name":"b"}]'])
def test_a_damaged_file_is_put_aside_and_told(tmp_path, place, content):
    (tmp_path / QUEUE_FILE).write_text(content)
    queue = RunQueue(tmp_path, place.start, place.why_not)
    assert names(queue) == [] and not queue.is_held and "it is damaged" in queue.problem
    assert (tmp_path / DAMAGED_FILE).read_text() == content
    queue.add(named("a"))
    assert [queued["name"] for queued in json.loads((tmp_path / QUEUE_FILE).read_text())] == ["a"]
    queue.close()


def test_what_cannot_be_kept_is_not_queued(tmp_path, place):
    (tmp_path / "file").write_text("")
    queue = RunQueue(tmp_path / "file", place.start, place.why_not)
    with pytest.raises(RunError, match="cannot be written"):
        queue.add(CONFIG)
    assert names(queue) == []


# ------------------------------------------------------------------ with a session


def call(session, path):
    async def go():
        transport = httpx.ASGITransport(Starlette(routes=queue_routes(session)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json={})

    return asyncio.run(go())


def test_the_session_starts_what_is_queued_when_its_run_ends(tmp_path):
    engine = FakeEngine()
    session = Session(tmp_path / "runs", engine.calls())
    first = session.start(CONFIG)
    session.queue.add(named("next"))
    session.queue.add(named("last"))
    session.request(first, "stop")
    wait_for(lambda: len(engine.runs) == 2 and session.active_id == engine.runs[1].id)
    assert engine.runs[1].folder.config.name == "next"
    wait_for(lambda: names(session.queue) == ["last"])
    session.close()
    assert len(engine.runs) == 2 and names(session.queue) == ["last"], "closing starts nothing"


def test_a_start_that_the_engine_refuses_is_told_in_the_queue(tmp_path):
    def refuse(config, runs_dir):
        raise RunError("A run folder cannot be made.")

    session = Session(tmp_path / "runs", EngineCalls(start_run=refuse))
    session.queue.add(CONFIG)
    wait_for(lambda: [queued.problem for queued in session.queue.listed()] == ["A run folder cannot be made."])
    row, = call(session, "/api/queue/continue").json()["queue"]["rows"]
    assert (row["name"], row["model"], row["data"], row["problem"]) == ("Fake", "m", "d", "A run folder cannot be made.")
    assert call(session, f"/api/queue/{row['id']}/up").status_code == 200
    assert call(session, f"/api/queue/{row['id']}/remove").json()["queue"]["rows"] == []
    answer = call(session, f"/api/queue/{row['id']}/remove")
    assert answer.status_code == 409 and "not in the queue" in answer.json()["error"]
    session.close()

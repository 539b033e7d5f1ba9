"""Queued runs start in order and survive a restart, and a run that cannot start does not hold up
the others.
"""

from __future__ import annotations

import json
import threading

import pytest

from app.pages.runs.queue_routes import queue_routes, queue_rows
from app.session.engine_calls import EngineCalls
from app.session.queue import QUEUE_FILE, RunQueue
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.runs.summaries.about import write_about
from engine.runs.summaries.names import new_run
from tests.support.routes import send, wait_for
from tests.support.sessions import CONFIG, FakeEngine, named


class Place:
    """A `Place` has space for one run at a time; `started` lists the names in order, and `detached`
    those in separate processes.
    """

    def __init__(self, free=True):
        self.free, self.started, self.refused, self.detached = free, [], {}, []
        self.lock = threading.Lock()

    def start(self, queued):
        config, detached = TrainConfig.from_dict(queued.config), queued.detached
        with self.lock:
            if config.name in self.refused:
                raise self.refused[config.name]
            if not self.free:
                raise RunError("One is running.")
            self.free = False
            self.started.append(config.name)
            self.detached += [config.name] if detached else []
            return config.name

    def why_not(self):
        return None if self.free else "One is running."

    def end(self, queue):
        self.free = True
        queue.poll()


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
        wait_for(
            lambda: place.started == list(started) and names(queue) == list("abc")[len(started) :]
        )
    place.end(queue)
    queue.add(named("d"))  # after the queue has been empty for a while
    wait_for(lambda: place.started == list("abcd"))


def test_a_run_of_another_process_that_ends_makes_room_too(queue, place, monkeypatch):
    monkeypatch.setattr("app.session.queue.POLL_SECONDS", 0.02)
    queue.add(named("a"))
    place.free = True  # without a notification
    wait_for(lambda: place.started == ["a"])


def test_repeats_get_names_of_their_own_in_the_queue_and_beside_earlier_runs(tmp_path, queue):
    new_run(tmp_path, named("Starter"))
    for _ in range(2):
        queue.add(named("Starter"))
    queue.add(named("Starter"), resumes="an earlier one")
    assert names(queue) == ["Starter 2", "Starter 3", "Starter"]
    ended = new_run(tmp_path, named("Ended"))
    queue.add(named("Ended"), resumes=ended.id)
    write_about(ended, "Renamed while it waits", "")
    assert names(queue)[-1] == "Renamed while it waits"
    assert queue.listed()[1].config["name"] == "Starter 3"


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
        with pytest.raises(RunError, match="has left the queue"):
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
    assert [queued.problem for queued in queue.listed()] == [
        "There is no file d.",
        "It could not be started (ZeroDivisionError: oops).",
    ]
    assert "ZeroDivisionError" in capsys.readouterr().err
    place.end(queue)  # those two are not tried again
    assert queue.add(named("d")) == 1
    wait_for(lambda: place.started == ["c", "d"])


def test_whoever_is_quicker_takes_no_place_in_the_queue(tmp_path):
    place = Place(free=False)
    asked = iter([None])  # it seems free once and is then taken
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
    again.poll()
    assert place.started == []
    again.go_on()
    wait_for(lambda: place.started == ["a"] and names(again) == ["b", "c"])
    again.close()


def test_a_queued_run_can_be_one_in_a_process_of_its_own(tmp_path, queue, place):
    for name in "abc":
        queue.add(named(name))
    a, b, _ = (queued.id for queued in queue.listed())
    queue.set_detached(a, True), queue.set_detached(b, True), queue.set_detached(b, False)
    for started in ("a", "ab", "abc"):
        place.end(queue)
        wait_for(lambda: place.started == list(started))
    assert place.detached == ["a"]
    with pytest.raises(RunError, match="has left the queue"):
        queue.set_detached(a, True)


class Elsewhere:
    """The run `away` belongs to another process and continues across a restart; `by_itself` says
    how it will end.
    """

    def __init__(self, place, by_itself=True):
        self.place, self.by_itself = place, by_itself

    def queue(self, runs_dir):
        return RunQueue(
            runs_dir,
            self.place.start,
            self.place.why_not,
            lambda: None if self.place.free else "away",
            lambda run_id: self.by_itself and run_id == "away",
        )


def test_after_a_restart_the_queue_goes_on_behind_a_run_that_went_on_all_the_while(
    tmp_path, queue, place
):
    queue.add(named("a")), queue.add(named("b"))
    queue.set_detached(queue.listed()[1].id, True)
    queue.close()
    again = Elsewhere(place).queue(tmp_path)
    assert not again.is_held
    assert again.behind == "away"
    assert [queued.detached for queued in again.listed()] == [False, True]
    place.end(again)
    wait_for(lambda: place.started == ["a"] and again.behind is None)
    place.end(again)
    wait_for(lambda: place.detached == ["b"])
    again.close()


@pytest.fixture
def behind_a_stopped_run(tmp_path, queue, place):
    """Returns a queue with `a` after a restart, behind a run that a person will stop."""
    queue.add(named("a"))
    queue.close()
    again = Elsewhere(place, by_itself=False).queue(tmp_path)
    yield again
    again.close()


def test_it_is_held_where_a_person_stops_that_run(behind_a_stopped_run, place):
    again = behind_a_stopped_run
    place.end(again)
    wait_for(lambda: again.is_held and again.behind is None)
    again.poll()
    again.add(named("b"))
    assert place.started == []
    again.go_on()
    wait_for(lambda: place.started == ["a"])


def test_a_person_may_say_that_it_goes_on_before_that_run_has_ended(behind_a_stopped_run, place):
    behind_a_stopped_run.go_on()
    place.end(behind_a_stopped_run)
    wait_for(lambda: place.started == ["a"])


def test_what_was_held_stays_held_whatever_goes_on_at_the_next_restart(tmp_path, queue, place):
    queue.add(named("a"))
    queue.close()
    place.free = True
    RunQueue(tmp_path, place.start, place.why_not).close()  # nothing is running: it is held
    place.free = False
    again = Elsewhere(place).queue(tmp_path)
    assert again.is_held and again.behind is None
    again.go_on()
    again.close()
    assert not json.loads((tmp_path / QUEUE_FILE).read_text())["held"]


def test_nothing_is_held_once_everything_of_before_is_removed(tmp_path, queue, place):
    queue.add(named("a"))
    queue.close()
    again = RunQueue(tmp_path, place.start, place.why_not)
    again.remove(again.listed()[0].id)
    assert not again.is_held
    again.close()


@pytest.mark.parametrize(
    "content", ["{", "[1]", '[{"id": 1}]', '{"a": 1}', '[{"id":"a","name":"b"}]']
)
def test_a_damaged_file_is_put_aside_and_told(tmp_path, place, content):
    (tmp_path / QUEUE_FILE).write_text(content)
    queue = RunQueue(tmp_path, place.start, place.why_not)
    assert names(queue) == []
    assert not queue.is_held
    assert "cannot be read (it is not " in queue.problem
    assert (tmp_path / "queue.damaged.json").read_text() == content
    queue.add(named("a"))
    assert [
        queued["name"] for queued in json.loads((tmp_path / QUEUE_FILE).read_text())["runs"]
    ] == ["a"]
    queue.close()


def test_what_cannot_be_kept_is_not_queued(tmp_path, place):
    (tmp_path / "file").write_text("")
    queue = RunQueue(tmp_path / "file", place.start, place.why_not)
    with pytest.raises(RunError, match="cannot be written"):
        queue.add(CONFIG)
    assert names(queue) == []


def test_a_slow_start_holds_up_nobody_and_is_waited_for_at_the_end(tmp_path):
    place, begun, may_go_on = Place(), threading.Event(), threading.Event()

    def slowly(queued):
        begun.set()
        assert may_go_on.wait(30)
        return place.start(queued)

    queue = RunQueue(tmp_path, slowly, place.why_not)
    queue.add(named("a"))
    assert begun.wait(30)
    (first,) = queue.listed()
    assert queue.add(named("b")) == 1 and queue_rows(queue)["rows"][1]["name"] == "b"
    for change in (queue.remove, lambda queued_id: queue.set_detached(queued_id, True)):
        with pytest.raises(RunError, match="stop it on its page"):
            change(first.id)
    queue.move_up(queue.listed()[1].id)
    closing = threading.Thread(target=queue.close)
    closing.start()
    may_go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert place.started == ["a"]
    assert names(queue) == ["b"]


def test_a_look_that_fails_is_told_and_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("app.session.queue.POLL_SECONDS", 0.02)
    place, broken = Place(), threading.Event()
    broken.set()

    def why_not():
        if broken.is_set():
            raise OSError(24, "Too many open files")
        return place.why_not()

    queue = RunQueue(tmp_path, place.start, why_not)
    queue.add(named("a"))
    wait_for(lambda: "Too many open files" in queue.problem)
    broken.clear()
    wait_for(lambda: place.started == ["a"] and queue.problem == "")
    assert capsys.readouterr().err.count("Traceback") == 1
    queue.close()


def test_a_queue_whose_thread_ended_begins_another(tmp_path, place, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    place.free = True
    endings = iter([SystemExit()])

    def start(queued):
        for ending in endings:
            raise ending
        return place.start(queued)

    queue = RunQueue(tmp_path, start, place.why_not)
    queue.add(named("a"))
    wait_for(lambda: queue._thread is None)
    queue.add(named("b"))
    wait_for(lambda: place.started == ["a"])
    queue.close()


def test_that_it_cannot_be_written_is_told_until_it_can(queue, place, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    queue.add(named("a")), queue.add(named("b"))
    with monkeypatch.context() as patched:
        patched.setattr("engine.safe_files.write_whole", full)
        place.end(queue)
        wait_for(lambda: names(queue) == ["b"])
        assert "cannot be written" in queue.problem
        with pytest.raises(RunError, match="cannot be written"):
            queue.remove(queue.listed()[0].id)
    queue.add(named("c"))
    assert queue.problem == ""


def test_nothing_is_behind_a_run_once_everything_is_removed(tmp_path, queue, place):
    queue.add(named("a"))
    queue.close()
    again = Elsewhere(place).queue(tmp_path)
    assert again.behind == "away"
    again.remove(again.listed()[0].id)
    assert again.behind is None and not again.is_held
    again.close()


# ------------------------------------------------------------------ with a session


def call(session, path, body=None):
    return send(queue_routes(session), "POST", path, body or {})


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
    wait_for(
        lambda: (
            [queued.problem for queued in session.queue.listed()]
            == ["A run folder cannot be made."]
        )
    )
    (row,) = call(session, "/api/queue/continue").json()["queue"]["rows"]
    assert (row["name"], row["model"], row["data"], row["problem"]) == (
        "Fake",
        "m",
        "d",
        "A run folder cannot be made.",
    )
    assert call(session, f"/api/queue/{row['id']}/up").status_code == 200
    answer = call(session, f"/api/queue/{row['id']}/detached", {"detached": True}).json()
    assert answer["queue"]["rows"][0]["detached"] and answer["queue"]["behind"] == ""
    assert (
        "true or false"
        in call(session, f"/api/queue/{row['id']}/detached", {"detached": "yes"}).json()["error"]
    )
    assert call(session, f"/api/queue/{row['id']}/remove").json()["queue"]["rows"] == []
    answer = call(session, f"/api/queue/{row['id']}/remove")
    assert answer.status_code == 409 and "has left the queue" in answer.json()["error"]
    session.close()

"""What the app reads when it starts may be damaged or another's: it starts, says which file cannot
be read, sets it aside and goes on.
"""

from __future__ import annotations

import functools
import json

import pytest

from app.form.settings_form import shown_values
from app.pages.new.draft import DRAFT_FILE, NO_TAB, Drafts
from app.pages.runs.queue_routes import queue_rows
from app.server.login_sessions import LoginSessions
from app.session.queue import QUEUE_FILE
from app.session.session import Session
from engine.config.settings import TrainConfig
from tests.support.no_files import KINDS, put
from tests.support.over_sockets import ask, serving
from tests.support.routes import wait_for
from tests.support.served import served
from tests.support.stuck import never_stuck

CONFIG = TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})
SESSIONS = ".login.sessions-7860.json"
SECRET = "a note of the owner"


def queued(**more):
    values = {"id": "a", "name": "b", "model": "m", "data": "d", "added": 1.0, "config": {}}
    return json.dumps({"held": True, "runs": [values | more]})


DRAFT = json.dumps({"preset": ["a"], "shown": {}})
RECORD = {"hash": "a", "began": 1.0, "seen": 1.0, "address": "b", "browser": "c"}
DAMAGED = {
    "empty": "",
    "cut off": '{"held": tr',
    "not UTF-8": b"\xff\xfe\x00",
    "a list": "[1]",
    "a number": "1",
    "null": "null",
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "an odd name": queued(name=["b"]),
    "an odd config": queued(config=[]),
    "a deep config": queued(config=functools.reduce(lambda tree, _: {"a": tree}, range(800), {})),
    "an endless time": queued().replace("1.0", "1e400"),
    "an odd preset": DRAFT,
    "an odd value": json.dumps({"preset": None, "shown": {"a": {}}}),
    "an odd session": json.dumps({"key": "k", "sessions": [RECORD | {"began": "x"}]}),
}
"""The content of files that are not as this program writes them."""


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "notes.txt").write_text(SECRET)
    yield tmp_path / "notes.txt"
    assert (tmp_path / "notes.txt").read_text() == SECRET


def read_queue(runs):
    """Starts a session, as the app does; returns what the page says of its queue."""
    session = Session(runs)
    try:
        shown = queue_rows(session.queue)
        session.queue.is_held = True  # the run that is added stays in the queue
        session.queue.add(CONFIG)
    finally:
        session.close()
    again = Session(runs)
    try:
        assert len(again.queue.listed()) == 1 and not again.queue.problem
    finally:
        again.close()
    return shown["problem"]


def read_draft(runs):
    draft, values = Drafts(runs), shown_values(CONFIG)
    assert draft.recall() is None
    shown = draft.problem
    draft.remember(NO_TAB, None, values)
    assert Drafts(runs).recall() == (None, values)
    return shown


def read_sessions(runs):
    sessions = LoginSessions(runs / SESSIONS, b"key")
    assert sessions.all() == []
    token = sessions.begin("127.0.0.1", "a browser")
    assert LoginSessions(runs / SESSIONS, b"key").find(token) is not None
    return ""


READERS = {QUEUE_FILE: read_queue, DRAFT_FILE: read_draft, SESSIONS: read_sessions}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("what", [*DAMAGED, *KINDS])
def test_what_cannot_be_read_is_told_and_set_aside(runs, outside, capsys, name, what):
    if what in DAMAGED:
        content = DAMAGED[what]
        (runs / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        put(runs / name, what, outside)
    before = (runs / name).lstat()
    with never_stuck():
        shown = READERS[name](runs)
    stem, suffix = name.rsplit(".", 1)
    aside = runs / f"{stem}.damaged.{suffix}"
    found = capsys.readouterr().err
    assert found.startswith("ramstream: The ") and f"see {aside}." in found, found
    assert found.count("\n") == 1
    if name != SESSIONS:
        assert found == f"ramstream: {shown}\n"
    after = aside.lstat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size), "nothing is lost"
    assert (runs / name).stat().st_mode & 0o777 == 0o600


def test_a_second_one_replaces_no_first_one(runs, capsys):
    for number in range(3):
        (runs / QUEUE_FILE).write_text(f"{number}")
        Session(runs).close()
    names = ["queue.damaged.json", "queue.damaged-2.json", "queue.damaged-3.json"]
    assert [(runs / name).read_text() for name in names] == ["0", "1", "2"]


def test_settings_that_no_run_can_have_are_shown_and_not_started(runs):
    for config in ({"train": 5}, {"data": {"source": [1, None]}}, {"model": [[[]]]}, {"a": {}}):
        (runs / QUEUE_FILE).write_text(queued(config=config))
        session = Session(runs)
        try:
            (row,) = queue_rows(session.queue)["rows"]
            assert row["name"] == "b"
        finally:
            session.close()


def test_the_run_that_is_resumed_is_one_of_this_folder(runs, outside):
    for resumes in ("../notes.txt", "/", ".uploads", ".", "a/../..", "x" * 5000):
        (runs / QUEUE_FILE).write_text(queued(resumes=resumes))
        session = Session(runs)
        try:
            session.queue.go_on()
            wait_for(lambda queue=session.queue: queue.listed()[0].problem, seconds=60)
        finally:
            session.close()


def test_a_queue_with_more_than_is_known_is_read(runs):
    run = json.loads(queued())["runs"][0]
    for kept in ({"held": False, "runs": [run], "more": 1}, {"held": True, "runs": [run]}):
        (runs / QUEUE_FILE).write_text(json.dumps(kept))
        session = Session(runs)
        try:
            assert [each.name for each in session.queue.listed()] == ["b"]
            assert not session.queue.problem
        finally:
            session.close()


@pytest.mark.parametrize("kind", ["a pipe", "a link", "cut off"])
def test_the_app_starts_and_answers_beside_all_of_them(tmp_path, runs, outside, kind, capsys):
    """Its pages too, and what they ask for: the list, the queue and the uploads."""
    (runs / ".presets").mkdir()
    (runs / ".uploads" / ("a" * 16)).mkdir(parents=True)
    (runs / ".uploads" / f"{'b' * 16}.partial").mkdir()
    names = [QUEUE_FILE, DRAFT_FILE, ".presets/mine.yaml", f".uploads/{'a' * 16}/.about.json"]
    for name in (*names, f".uploads/{'b' * 16}.partial/a.csv"):
        if kind == "cut off":
            (runs / name).write_text('{"held": tr')
        else:
            put(runs / name, kind, outside)
    with never_stuck(computing=30), serving(served(runs).app) as port:
        assert ask(port, "/").status == 200
        uploads = json.loads(ask(port, "/api/uploads").body)
        assert uploads["uploads"] == [] and f"cannot be read: {'a' * 16}" in uploads["problem"]
        listed = ask(port, "/api/runs")
        assert listed.status == 200 and "queue.damaged.json" in listed.body
    assert "queue.damaged.json" in capsys.readouterr().err

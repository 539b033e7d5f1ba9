"""What outlives a restart, and what does not."""

from __future__ import annotations

import json
import os
import stat

import pytest

from app.server import browser_name
from app.server.login_sessions import MOST_SESSIONS, NOT_KEPT, WRITE_SECONDS, LoginSessions

KEY = b"k" * 32


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sessions.json"


def test_a_session_outlives_a_restart_until_it_is_ended(path):
    first = LoginSessions(path, KEY)
    token, other = (first.begin("127.0.0.1", name, now=100) for name in ("One", "Two"))
    again = LoginSessions(path, KEY)
    assert [(each.record.browser, each.record.began) for each in again.all(now=200)] == [
        ("One", 100),
        ("Two", 100),
    ]
    again.end(again.find(token, now=200).name)
    last = LoginSessions(path, KEY)
    assert last.find(token, now=200) is None and last.find(other, now=200) is not None


def test_nobody_can_log_in_with_what_the_file_holds(path):
    sessions = LoginSessions(path, KEY)
    token = sessions.begin("127.0.0.1", "One")
    text = path.read_text()
    assert token not in text and stat.S_IMODE(path.stat().st_mode) == 0o600
    for word in [json.loads(text)["key"], *json.loads(text)["sessions"][0].values()]:
        assert sessions.find(str(word)) is None


def test_sessions_of_another_password_are_none(path):
    token = LoginSessions(path, KEY).begin("127.0.0.1", "One")
    assert LoginSessions(path, b"another").all() == []
    assert LoginSessions(path, KEY).find(token) is not None, "reading does not change the file"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"began": 100', '"began": "100"'),
        lambda text: text.replace('"began": 100', '"began": NaN'),
        lambda text: text.replace('"began"', '"begun"'),
        lambda text: text.replace('"address": "127.0.0.1"', '"address": 7'),
        lambda text: '{"key": 1, "sessions": 2}',
        lambda text: text + "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
    ids=range(11),
)
def test_a_damaged_file_logs_everybody_out(path, damage):
    token = LoginSessions(path, KEY).begin("127.0.0.1", "One", now=100)
    path.write_text(damage(path.read_text()))
    sessions = LoginSessions(path, KEY)
    assert sessions.find(token, now=101) is None and sessions.all(now=101) == []
    assert sessions.find(sessions.begin("127.0.0.1", "One", now=101), now=101) is not None


def test_when_nothing_can_be_written_logins_work_and_none_comes_back(path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    sessions = LoginSessions(path, KEY)
    before = sessions.begin("127.0.0.1", "One")
    monkeypatch.setattr("engine.safe_files.write_whole", full)
    sessions.end(sessions.find(before).name)
    token = sessions.begin("127.0.0.1", "Two")
    assert sessions.fault == NOT_KEPT
    assert sessions.find(token) is not None and sessions.find(before) is None
    assert LoginSessions(path, KEY).all() == [], "the session that was ended is in no file"
    shown = capsys.readouterr().err
    assert "the logins cannot be kept here" in shown and "Traceback" not in shown


def test_of_many_sessions_the_oldest_end(path):
    sessions = LoginSessions(path, KEY)
    tokens = [sessions.begin("127.0.0.1", "One", now=each) for each in range(MOST_SESSIONS + 5)]
    found = [sessions.find(token, now=200) is not None for token in tokens]
    assert found == [False] * 5 + [True] * MOST_SESSIONS


def test_when_a_session_was_seen_is_written_now_and_then(path):
    sessions = LoginSessions(path, KEY)
    token = sessions.begin("127.0.0.1", "One", now=1000)
    session = sessions.find(token, now=1000)
    inode = os.stat(path).st_ino
    sessions.saw(session, "192.0.2.1", now=1000 + WRITE_SECONDS - 1)
    assert os.stat(path).st_ino == inode, "not with every request"
    sessions.saw(session, "192.0.2.2", now=1000 + WRITE_SECONDS)
    (kept,) = LoginSessions(path, KEY).all(now=1000)
    assert (kept.record.seen, kept.record.address) == (1000 + WRITE_SECONDS, "192.0.2.2")


def test_who_watches_a_session_is_told_of_its_end_once(path):
    sessions = LoginSessions(path, KEY)
    one, other = (sessions.find(sessions.begin("127.0.0.1", "One")) for _ in range(2))
    found = []
    with one.watched(lambda: found.append("one")), other.watched(lambda: found.append("other")):
        sessions.end(one.name)
        assert found == ["one"]
        assert one.is_over()
        assert not other.is_over()
    sessions.end(other.name)
    assert found == ["one"], "nobody listens any more"


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64) Chrome/140.0 Safari/537.36", "Chrome on Linux"),
        ("Mozilla/5.0 (Windows NT 10.0) Chrome/140 Safari/537 Edg/140", "Edge on Windows"),
        ("Mozilla/5.0 (Macintosh; Intel Mac OS X 15) Version/19 Safari/605", "Safari on macOS"),
        ("Mozilla/5.0 (Linux; Android 16; Mobile) Firefox/140.0", "Firefox on Android"),
        ("curl/8.0", "curl"),
        ("<script>alert(1)</script>", browser_name.UNKNOWN),
        ("", browser_name.UNKNOWN),
    ],
)
def test_a_browser_is_told_in_words_of_ours(agent, words):
    assert browser_name.browser_name(agent) == words

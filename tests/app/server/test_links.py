"""Links that work once, and the file by which only the server's owner makes them."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

import launch
from app.server import announcement, links
from app.server.announcement import announce
from app.server.links import Links, new_link, publish, token_in, withdraw
from app.server.login import Login
from engine.errors import RamstreamError
from tests.support.neighbor import NEIGHBOR, needs_root


@pytest.fixture
def port():
    """A port on which something listens, as the server would."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def url(port):
    return f"http://127.0.0.1:{port}/"


def published(runs, port, made=None):
    runs.mkdir(exist_ok=True)
    made = made or Links()
    assert publish(made, runs, url(port), port)
    return made


def test_a_token_works_once_in_time_and_for_its_server():
    ours = Links()
    token = ours.make()
    assert not Links().redeem(token), "that of another server"
    assert ours.redeem(token) and not ours.redeem(token)
    assert ours.redeem(ours.make(60)) and not ours.redeem(ours.make(-1)), "it is over"
    assert len({ours.make() for _ in range(50)}) == 50


def test_no_changed_token_is_taken():
    ours = Links()
    late = ours.make(-1)
    end, nonce, signature = late.split(".")
    changed = [
        f"0.{nonce}.{signature}",
        f"{int(end) + 3600}.{nonce}.{signature}",
        f"{end}.{nonce[::-1]}.{signature}",
        f"{end}.{nonce}.{'0' * 40}",
        f"{end}.{nonce}.",
        f"{nonce}.{signature}",
        f" {late}",
        f"{late}\n",
        f"9{late}",
        "",
        "..",
        "0" * 10_000,
        "\ud800.é.ü",
        "²." + "a" * 16 + "." + "0" * 40,
    ]
    assert [token for token in changed if ours.redeem(token)] == []


def test_what_a_person_pastes_is_the_token_or_its_link():
    token = Links().make()
    for pasted in (
        token,
        f"  {token}\n",
        f"http://127.0.0.1:7860/?token={token}",
        f"?token={token}",
    ):
        assert token_in(pasted) == token


def test_the_command_prints_a_link_that_the_server_takes(tmp_path, port, capsys):
    ours = published(tmp_path / "runs", port)
    assert launch.main(["link", "--runs-dir", str(tmp_path / "runs")]) == 0
    found = capsys.readouterr()
    assert found.out.startswith(f"{url(port)}?token=") and "once" in found.err
    token = found.out.strip().partition("token=")[2]
    assert ours.redeem(token) and not ours.redeem(token)
    assert int(token.partition(".")[0]) <= time.time() + links.LINK_SECONDS


def test_of_several_servers_one_is_named(tmp_path, port):
    runs = tmp_path / "runs"
    published(runs, port)
    with socket.create_server(("127.0.0.1", 0)) as second:
        other = second.getsockname()[1]
        published(runs, other)
        with pytest.raises(RamstreamError, match=f"{port}.*--port|{other}.*--port"):
            new_link(runs)
        assert new_link(runs, other).startswith(url(other))
    assert new_link(runs).startswith(url(port)), "one that was killed does not count"


def test_where_nothing_runs_the_command_says_so(tmp_path, capsys):
    runs = tmp_path / "runs"
    for _ in range(2):
        assert launch.main(["link", "--runs-dir", str(runs)]) == 2
        assert "--runs-dir" in capsys.readouterr().err
        runs.mkdir(exist_ok=True)
    assert launch.main(["link", "--runs-dir", str(runs), "--port", "5"]) == 2
    assert "on port 5" in capsys.readouterr().err


def test_the_file_is_private_and_goes_with_its_server(tmp_path, port):
    runs = tmp_path / "runs"
    before = published(runs, port)
    (path,) = runs.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    after = published(runs, port)
    withdraw(before, runs, port)
    assert path.exists(), "it is that of the next server by now"
    withdraw(after, runs, port)
    withdraw(after, runs, port)
    assert list(runs.iterdir()) == []
    assert not publish(after, tmp_path / "nowhere", url(port), port)


@pytest.mark.parametrize("made", ["link", "folder", "pipe", "text", "types", "secret", "open"])
def test_a_file_that_is_not_the_servers_makes_no_link(tmp_path, port, made):
    runs = tmp_path / "runs"
    published(runs, port)
    (path,) = runs.iterdir()
    content = path.read_bytes()
    path.unlink()
    if made == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif made == "folder":
        path.mkdir()
    elif made == "pipe":
        os.mkfifo(path)
    else:
        path.touch(0o644 if made == "open" else 0o600)
        texts = {
            "text": b"[" * 100_000,
            "types": b'{"url": 5, "secret": null}',
            "secret": b'{"url": "http://[", "secret": "no hex"}',
        }
        path.write_bytes(texts.get(made, content))
    with pytest.raises(RamstreamError, match="--runs-dir"):
        new_link(runs)


@needs_root
def test_the_file_of_another_account_makes_no_link_but_for_root(tmp_path, port, monkeypatch):
    """It would lead to that account's app, which sees what is typed there."""
    runs = tmp_path / "runs"
    published(runs, port)
    (path,) = runs.iterdir()
    os.chown(path, NEIGHBOR, NEIGHBOR)
    assert new_link(runs).startswith(url(port))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RamstreamError, match="another account"):
        new_link(runs)


# ---------------------------------------------------------------------- the key of the sessions


def test_a_key_that_others_could_have_read_or_made_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "key"
    first = Login.without_password(path)
    token = first.sessions.begin("127.0.0.1", "Test")
    assert Login.without_password(path).sessions.find(token) is not None
    path.chmod(0o640)
    assert Login.without_password(path).sessions.find(token) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = path.read_bytes()
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(b"k" * 32)
    path.symlink_to(tmp_path / "elsewhere")
    Login.without_password(path)
    assert not path.is_symlink() and path.read_bytes() not in (kept, b"k" * 32)
    assert (tmp_path / "elsewhere").read_bytes() == b"k" * 32


def test_where_no_key_can_be_kept_a_server_without_a_password_starts(tmp_path, monkeypatch):
    (tmp_path / "key").mkdir()
    login = Login.without_password(tmp_path / "key")
    assert login.sessions.find(login.sessions.begin("127.0.0.1", "Test")) is not None
    with pytest.raises(RamstreamError, match="key"):
        Login("ada", "secret", tmp_path / "key")


# ---------------------------------------------------------------------- what is said at the start


class Terminal:
    """What is printed, as to a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Returns a function that starts; it returns what was printed and what the browser opened."""

    def started(login, is_known=True, is_terminal=True, runs=None):
        opened, screen = [], Terminal()
        monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
        monkeypatch.setattr(announcement, "own_programs_are_known", lambda: is_known)
        monkeypatch.setattr(announcement.webbrowser, "open", opened.append)
        monkeypatch.setattr(announcement.threading, "Thread", Now)
        monkeypatch.setattr(sys, "stdout", screen)
        announce(login, url(7860), runs or Path("runs").absolute(), opens_browser=True)
        return screen.text, opened

    return started


class Now:
    """A thread that is over when it has started."""

    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)


def test_the_link_is_printed_where_its_owner_reads_or_nobody_gets_in_without(started, tmp_path):
    login = Login.without_password(tmp_path / "key")
    link = f"{url(7860)}?token={login.link_token}"
    text, opened = started(login)
    assert link in text
    assert "launch.py link" in text
    assert opened == [url(7860)]
    text, opened = started(login, is_terminal=False)
    assert "token" not in text
    assert "launch.py link" in text
    assert opened == [url(7860)]
    text, opened = started(login, is_terminal=False, runs=tmp_path / "my runs")
    assert f"link --runs-dir '{tmp_path}/my runs'" in text
    text, opened = started(login, is_known=False, is_terminal=False)
    assert link in text and opened == [link], "on a system that does not tell accounts"
    with_password = Login("ada", "secret", tmp_path / "key")
    text, opened = started(with_password, is_terminal=False)
    assert f"?token={with_password.link_token} to log in without" in text and opened == [url(7860)]


def test_no_login_says_what_it_gives_away(started):
    text, opened = started(None)
    assert all(word in text for word in ("--no-login", "every account", "delete", "read any file"))
    assert opened == [url(7860)]


def test_a_login_is_asked_for_or_not(capsys, tmp_path):
    assert launch.main(["--login", "--no-login", "--runs-dir", str(tmp_path)]) == 2
    assert "--login, --no-login" in capsys.readouterr().err

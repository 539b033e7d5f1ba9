"""The app as a person starts it: where it listens, and who gets in across a restart."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.server.links import new_link
from engine.paths import PROGRAM_ROOT
from tests.support.neighbor import neighbor
from tests.support.over_sockets import ask
from tests.support.ports import free_port

pytestmark = pytest.mark.slow("it starts processes and waits for them, for five seconds or more")

LOOPBACK = {"0100007F", "0" * 24 + "01000000"}
LISTENS = "0A"


@contextlib.contextmanager
def started(folder, port, *options):
    """Yields the app's process and its first two lines."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM_ROOT / "launch.py", "--no-browser", "--port", str(port), *options],
        cwd=folder,
        env={**os.environ, "RAMSTREAM_LOGIN": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, [process.stdout.readline() for _ in range(2)]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        process.stdout.close()


def link(folder):
    command = [sys.executable, PROGRAM_ROOT / "launch.py", "link"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return path_of(done.stdout.strip())


def path_of(url):
    return re.sub(r"^http://[^/]+", "", url)


def sockets_of(process):
    """Returns the inodes of the sockets of a process and of all that it has started."""
    found = set()
    family = {str(process.pid)}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] in family:
                family.add(folder.name)
            if folder.name in family:
                names = [os.readlink(path) for path in (folder / "fd").iterdir()]
                found |= {name[8:-1] for name in names if name.startswith("socket:[")}
    return found


def listening(process):
    """Returns the addresses at which a process waits for others, as the kernel writes them."""
    inodes, found = sockets_of(process), set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            waits = state == LISTENS or table.startswith("udp")
            if waits and line.split()[9] in inodes:
                found.add((table, *local.split(":")))
    return found


def test_the_app_listens_on_loopback_and_lets_in_its_account_and_who_has_a_link(tmp_path):
    """The other account is asked where the tests run as root."""
    port = free_port()
    runs = tmp_path / "runs"
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(neighbor()) if os.geteuid() == 0 else None
        with started(tmp_path, port) as (process, lines):
            assert lines[0] == f"Ramstream is at http://127.0.0.1:{port}/ (Ctrl-C stops it)\n"
            assert "launch.py link" in lines[1]
            assert "token" not in lines[1], "a log may be open to others"
            for path in ("/", "/config", "/api/runs", "/api/hardware", "/api/live"):
                assert ask(port, path).status == 200, "the owner needs nothing"
            found = listening(process)
            assert ("tcp", "0100007F", f"{port:04X}") in found
            assert {address for _, address, _ in found} <= LOOPBACK, found
            used, unused = link(tmp_path), path_of(new_link(runs))
            if other is not None:
                assert other.ask(port, "/api/runs")[0] == 401
                status, headers, _ = other.ask(port, used)
                assert status == 303
                cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
        assert not list(runs.glob(".login.link*")), "links end with the server"
        if other is None:
            return
        with started(tmp_path, port):
            assert other.ask(port, "/api/runs")[0] == 401
            assert other.ask(port, "/api/runs", headers=cookie)[0] == 200
            for before in (used, unused):
                assert "link_used" in other.ask(port, before)[1]["location"]

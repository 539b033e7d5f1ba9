"""Whoever is not of the run gets nothing done: no code, no rank, no end of the run. On one node
nothing listens beyond loopback, and no other account reaches where ranks meet.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from engine.errors import RankError
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed import launched_group, own_sockets
from engine.runtime.distributed.codec import MessageError
from engine.runtime.distributed.handshake import handshake
from engine.runtime.distributed.launched_group import LaunchedGroup, connect_to_rank_zero
from engine.runtime.distributed.message_stream import Connection, Keys
from engine.runtime.distributed.messages import Beat, Done, Go, Handshake
from engine.runtime.distributed.own_sockets import OwnSocket, refuse_others
from engine.runtime.distributed.rendezvous import InMemory
from engine.runtime.distributed.shared_secret import LEAST_CHARACTERS, VARIABLE, admit, prove
from engine.runtime.distributed.torchrun import Launched
from tests.support.other_account import as_nobody, needs_root
from tests.support.ports import free_port
from tests.support.strangers import beyond_loopback, disturb, garbage, listening
from tests.support.worker_groups import (
    LOOPBACK,
    SECRET,
    forked_workers,  # noqa: F401  a fixture
    launched_as,
    started_group,
)

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

PATIENCE = 60
"""A test gives up after so many seconds."""
NAMES = sorted(garbage(Path()))


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setattr(launched_group, "FIND_SECONDS", PATIENCE)
    monkeypatch.setattr(launched_group, "TELL_SECONDS", 0.1)


# --------------------------------------------------------------------- who comes to rank 0


class Coming:
    """Rank 0 of two processes, to which others come before the one that belongs to it."""

    def __init__(self, monkeypatch, place: RankInfo):
        self.place, self.port = place, free_port()
        self.ports: list[int] = []
        self.groups: list[LaunchedGroup] = []
        plain = launched_group._listening

        def kept() -> socket.socket:
            made = plain()
            self.ports.append(made.getsockname()[1])
            return made

        monkeypatch.setattr(launched_group, "_listening", kept)
        self.thread = threading.Thread(target=self._pose_as_rank_zero)
        self.thread.start()

    def _pose_as_rank_zero(self) -> None:
        self.groups.append(
            LaunchedGroup(launched_as(self.place, self.port), handshake(self.place, {}))
        )

    def reached(self) -> socket.socket:
        """Returns a stream to rank 0, as anybody of this account gets one."""
        until = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < until
            try:
                if self.place.nodes > 1:
                    return socket.create_connection((LOOPBACK, self.ports[0]), 1)
                return OwnSocket(
                    launched_group._name_of(launched_as(self.place, self.port))
                ).connect()
            except (IndexError, OSError):
                time.sleep(0.01)

    def finish(self) -> None:
        """Lets the other process come, and checks that both are together."""
        own = self.place.of(1)
        connection = connect_to_rank_zero(launched_as(own, self.port), handshake(own, {}))
        self.thread.join()
        (group,) = self.groups
        assert [process.place.rank for process in group.processes] == [1]
        ending = threading.Thread(target=group.end, args=(0,))
        ending.start()
        while isinstance(connection.receive(), Beat):
            pass
        connection.close()
        ending.join()


def wait_for_end_of(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while stream.recv(1 << 16):
            pass


WAYS = {"one node": RankInfo(0, 2, 1), "two nodes": RankInfo(0, 1, 2)}


def test_what_strangers_send_is_refused_and_told(monkeypatch, tmp_path, capfd):
    for way, place in WAYS.items():
        coming = Coming(monkeypatch, place)
        for name in NAMES:
            with coming.reached() as stream:
                # It may be sent away before it has sent all.
                with contextlib.suppress(OSError):
                    stream.sendall(garbage(tmp_path / "made")[name])
                    stream.shutdown(socket.SHUT_WR)
                wait_for_end_of(stream)
        coming.finish()
        shown, until = capfd.readouterr().err, time.monotonic() + PATIENCE
        # A stream ends a moment before that is told.
        while shown.count("\n") < len(NAMES) and time.monotonic() < until:
            time.sleep(0.01)
            shown += capfd.readouterr().err
        found = shown.splitlines()
        assert len(found) == len(NAMES) <= launched_group.MOST_TOLD
        who = "A process of this node" if way == "one node" else "Someone at .*127.0.0.1"
        form = re.compile(f"ramstream: {who} wanted to join the run and was sent away \\(.+\\).")
        assert all(form.fullmatch(line) for line in found), found
    assert not (tmp_path / "made").exists()


FIRST = {
    "another kind": Done(),
    "no rank of this run": Handshake(RankInfo(5, 2, 1), "here", 1, "", {}, {}),
    "the rank of rank 0": Handshake(RankInfo(0, 2, 1), "here", 1, "", {}, {}),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_first_message_that_is_none_is_refused(monkeypatch, capfd, first):
    coming = Coming(monkeypatch, WAYS["one node"])
    with coming.reached() as stream:
        Connection(stream).send(FIRST[first])
        wait_for_end_of(stream)
    coming.finish()
    assert "was sent away (It s" in capfd.readouterr().err


def test_more_than_come_at_once_are_sent_away_and_those_told_are_few(monkeypatch, capfd):
    monkeypatch.setattr(launched_group, "MOST_AT_ONCE", 3)
    coming = Coming(monkeypatch, WAYS["two nodes"])
    silent = [coming.reached() for _ in range(3)]
    for stream in silent:  # rank 0's challenge has come: each has a thread
        stream.settimeout(PATIENCE)
        assert stream.recv(32)
    for _ in range(launched_group.MOST_TOLD * 2):
        with coming.reached() as stream:
            assert not stream.recv(32)
    for stream in silent:
        stream.close()
    coming.finish()
    assert len(capfd.readouterr().err.splitlines()) <= launched_group.MOST_TOLD


# --------------------------------------------------------------------- who says that it is rank 0


def test_whoever_follows_believes_no_stranger(tmp_path):
    """It finds rank 0 once that tells where it listens."""
    place, port = WAYS["two nodes"], free_port()
    store = distributed.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
    )
    fake = socket.create_server((LOOPBACK, 0))
    store.set(launched_group.KEY, '{"port": ' + str(fake.getsockname()[1]) + ', "secret": "00"}')
    found: list[Connection] = []

    def come() -> None:
        own = Launched(place.of(1), LOOPBACK, port, has_store=True, run="a test")
        found.append(connect_to_rank_zero(own, handshake(own.place, {})))

    thread = threading.Thread(target=come)
    thread.start()
    for sent in garbage(tmp_path / "made").values():
        stream, _ = fake.accept()
        with stream, contextlib.suppress(OSError):  # the process may have left already
            stream.sendall(sent + bytes(32 if sent else 0))
    for reported in ("{", '{"port": "x"}', '{"port": 70000}', "[]"):
        store.set(launched_group.KEY, reported)
        time.sleep(0.3)
    fake.close()
    launched = Launched(place, LOOPBACK, port, has_store=True, run="a test")
    group = LaunchedGroup(launched, handshake(place, {}))
    thread.join()
    ending = threading.Thread(target=group.end, args=(0,))
    ending.start()
    found[0].close()
    ending.join()
    assert not (tmp_path / "made").exists()
    assert SECRET not in str(store.get(launched_group.KEY))


@pytest.mark.parametrize("secret_", ["", "short", "x" * (LEAST_CHARACTERS - 1)])
def test_nodes_without_a_secret_do_not_begin(monkeypatch, secret_):
    monkeypatch.setenv(VARIABLE, secret_)
    place = WAYS["two nodes"]
    for start in (LaunchedGroup, connect_to_rank_zero):
        with pytest.raises(RankError, match=r"RAMSTREAM_SECRET.*openssl rand -hex 32.*every node"):
            start(launched_as(place, free_port()), handshake(place, {}))


# --------------------------------------------------------------------- the way between nodes


def proved(own: bytes = b"a" * 32, other: bytes = b"a" * 32) -> list:
    """Has two ends prove to each other that they have these secrets. Returns what each got."""
    ends, got = socket.socketpair(), [None, None]

    def run(at: int, proves, secret_: bytes) -> None:
        try:
            got[at] = proves(ends[at], secret_)
        except OSError as error:
            got[at] = error
            ends[at].close()

    threads = [
        threading.Thread(target=run, args=given) for given in ((0, admit, own), (1, prove, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*got, *ends]


def test_both_sides_prove_that_they_have_the_secret():
    group, followed, *ends = proved()
    assert group.to_send == followed.to_receive != group.to_receive == followed.to_send
    again = proved()[0]
    assert len({group.to_send, group.to_receive, again.to_send, again.to_receive}) == 4
    here, there = (Connection(end, keys) for end, keys in zip(ends, (group, followed)))
    for number in range(3):
        here.send(Go(number))
        there.send(Done())
        assert there.receive() == Go(number) and here.receive() == Done()
    for other in (b"b" * 32, b""):
        refused = proved(other=other)[:2]
        assert all(isinstance(each, OSError) for each in refused)


CHANGES = {
    "a bit of the message": lambda sent: [sent[0][:12] + b"\xff" + sent[0][13:]],
    "a bit of the code": lambda sent: [sent[0][:-1] + bytes([sent[0][-1] ^ 1])],
    "once more": lambda sent: [sent[0], sent[0]],
    "left out": lambda sent: [sent[1]],
    "in another order": lambda sent: [sent[1], sent[0]],
    "none of it": lambda sent: [b"\0" * 7 + b"\x01" + b"\x80" + b"\0" * 32],
}


@pytest.mark.parametrize("change", CHANGES)
def test_messages_that_were_changed_on_the_way_are_not_read(change):
    sending, way = socket.socketpair()
    with way:
        connection = Connection(sending, Keys(b"k" * 32, b"l" * 32))
        sent = []
        for number in range(2):
            connection.send(Go(number))
            sent.append(way.recv(1 << 16))
        connection.close()
    other, ours = socket.socketpair()
    with other:
        for each in CHANGES[change](sent):
            other.sendall(each)
        read = Connection(ours, Keys(b"l" * 32, b"k" * 32))
        with pytest.raises(MessageError, match="not from the other side"):
            for _ in range(2):
                read.receive()
        read.close()


def test_a_stranger_of_a_message_connection_costs_no_memory_and_no_wait():
    other, ours = socket.socketpair()
    with other:
        read = Connection(ours)
        other.sendall((1 << 60).to_bytes(8, "big"))
        with pytest.raises(MessageError, match="claims to have 1152921504606846976 bytes"):
            read.receive()
        read.close()


# --------------------------------------------------------------------- folders and accounts


def test_the_folder_of_sockets_is_this_account_s_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(own_sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    made = tmp_path / f"ramstream-{os.geteuid()}"
    OwnSocket("a").close()
    assert made.stat().st_mode & 0o777 == 0o700
    for spoil in (lambda: made.chmod(0o755), _linked(made, tmp_path), _no_folder(made)):
        spoil()
        with pytest.raises(RankError, match=r"cannot be used \(.*set TMPDIR to a folder of your"):
            OwnSocket("a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    (tmp_path / "own").mkdir(0o700)
    here = OwnSocket("a")
    here.listen().close()
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["a"]
    here.listen().close()  # in the place of what was left
    here.close()


def _linked(made: Path, folder: Path):
    def link() -> None:
        made.rmdir()
        (folder / "elsewhere").mkdir(0o700)
        made.symlink_to(folder / "elsewhere")

    return link


def _no_folder(made: Path):
    def file() -> None:
        made.unlink()
        made.write_text("")

    return file


@needs_root
def test_a_folder_of_another_account_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(own_sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    made = tmp_path / f"ramstream-{os.geteuid()}"
    made.mkdir(0o700)
    os.chown(made, 65534, 65534)
    with pytest.raises(RankError, match="another account's"):
        OwnSocket("a")


CONNECTS = """s = socket.socket(socket.AF_UNIX)
try:
    s.connect(sys.argv[1]); s.recv(1); print("came")
except OSError as error:
    print(type(error).__name__)
"""


@needs_root
def test_another_account_is_refused_where_it_can_come(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    (tmp_path / "socket").chmod(0o777)
    listener.listen()
    found: list[str] = []

    def come() -> None:
        imports = f"import socket, sys; run = {CONNECTS!r}"
        found.append(as_nobody(imports, "exec(run)", tmp_path / "socket", readable=tmp_path))

    thread = threading.Thread(target=come)
    thread.start()
    stream, _ = listener.accept()
    with pytest.raises(PermissionError, match="a process of the account 65534"):
        refuse_others(stream)
    stream.close()
    thread.join()
    listener.close()
    assert found == ["came\n"]


# --------------------------------------------------------------------- while two ranks train


OPENS = "print(open(sys.argv[1], 'rb').read(1))"


@needs_root
def test_no_other_account_opens_the_store_of_one_node():
    rendezvous = InMemory.made(2)
    rendezvous.store().set("a", "b")
    path = f"/proc/{rendezvous.process}/fd/{rendezvous.file}"
    assert Path(path).read_bytes()
    with pytest.raises(subprocess.CalledProcessError):
        as_nobody("import sys", OPENS, path)
    rendezvous.close()
    assert not Path(path).exists()


def test_two_ranks_listen_on_loopback_alone_and_noise_there_ends_nothing(tmp_path):
    with started_group(tmp_path / "model", 2) as workers:
        workers.train(1)
        ours = (os.getpid(), *workers.pids)
        assert listening(*ours) and not beyond_loopback(*ours)
        disturb({port for _, port in listening(*ours)}, tmp_path / "made")
        workers.train(2, 3)
        assert workers.host_states.held.step == 3 and not workers.logged
    assert not (tmp_path / "made").exists()

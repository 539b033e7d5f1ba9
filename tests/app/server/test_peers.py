"""Whose connection it is, by what the kernel tells of its other end."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from app.server import peers
from app.server.peers import Account, Peer, account_of, ask_kernel, read_tables
from tests.support.neighbor import NEIGHBOR, needs_root, neighbor

WAYS = [ask_kernel, read_tables]
CLIENT, SERVER = ("127.0.0.1", 50000), ("127.0.0.1", 7860)
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
MINE = os.geteuid()
OTHER = MINE + 1000


@contextlib.contextmanager
def connected(host, client_host=None, family=None):
    """Yields both ends of a connection; the second one is the server's."""
    family = family or (socket.AF_INET6 if ":" in host else socket.AF_INET)
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listening:
        client_host = client_host or host
        line = socket.socket(socket.AF_INET6 if ":" in client_host else socket.AF_INET)
        line.connect((client_host, listening.getsockname()[1]))
        ours, _ = listening.accept()
        with line, ours:
            yield line, ours


def both(ours):
    return ours.getpeername()[:2], ours.getsockname()[:2]


@pytest.mark.parametrize("find", WAYS)
def test_own_connections_are_the_owners_until_they_are_closed(find):
    for host, client in (
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("127.0.0.1", "::ffff:127.0.0.1"),  # a program that has only sockets of IPv6
        ("::", "127.0.0.1"),  # a server that has only such sockets
        ("::", "::ffff:127.0.0.1"),
    ):
        with connected(host, client) as (line, ours):
            assert account_of(*both(ours), find) is Account.OWNER, (host, client)
            line.shutdown(socket.SHUT_WR)  # it has nothing more to send, and waits for an answer
            assert account_of(*both(ours), find) is Account.OWNER, (host, client)
            line.close()
            assert account_of(*both(ours), find) is Account.UNKNOWN, (host, client)


@pytest.mark.parametrize("find", WAYS)
def test_another_server_at_the_port_of_a_client_that_has_gone_is_not_the_client(find):
    """The kernel tells of a socket that listens, where it finds no connection."""
    with connected("127.0.0.1") as (line, ours):
        place = line.getsockname()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        line.close()
        with socket.create_server(place):
            assert account_of(place, ours.getsockname(), find) is Account.UNKNOWN


def test_a_way_is_chosen_by_whether_it_works(monkeypatch):
    monkeypatch.setattr(peers, "ask_kernel", lambda *_: set())
    peers._way_that_works.cache_clear()
    try:
        assert peers._way_that_works() is read_tables
    finally:
        peers._way_that_works.cache_clear()


@needs_root
@pytest.mark.parametrize("find", WAYS)
def test_a_connection_of_another_account_is_known_as_such(find):
    with neighbor() as other, socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        # Nobody answers, so it gives up as soon as this end is closed.
        listening.settimeout(60)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(other.ask, port, "/")
            ours, _ = listening.accept()
            with ours:
                assert find(*both(ours)) and {row[0] for row in find(*both(ours))} == {NEIGHBOR}
                assert account_of(*both(ours), find) is Account.ANOTHER
            assert asked.result(60)[0] == -1
        assert other.ask(port, "/", leaves=True)[0] == 0
        ours, _ = listening.accept()
        with ours:
            ours.settimeout(60)
            while ours.recv(4096):
                pass
            assert account_of(*both(ours), find) is Account.UNKNOWN, "closed sockets are nobody's"


# ---------------------------------------------------------------------- what a table may say


@pytest.fixture
def proc(tmp_path):
    """A /proc whose tables are written by `write`."""
    (tmp_path / "net").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/overflowuid").write_text("65534\n")
    (tmp_path / "self/uid_map").write_text("         0          0 4294967295\n")
    return tmp_path


def row(state, uid, inode, client=CLIENT, server=SERVER):
    ends = [
        peers._written(socket.inet_aton(host), port).decode("ascii")
        for host, port in (client, server)
    ]
    return (
        f"   5: {ends[0]} {ends[1]} {state} 00000000:00000000 00:00000000 00000000 {uid:5} "
        f"       0 {inode} 1 0000000000000000 20 4 30 10 -1"
    )


def told(proc, *rows):
    (proc / "net/tcp").write_text("\n".join([HEAD, *rows, ""]))
    return account_of(CLIENT, SERVER, partial(read_tables, proc=proc), proc)


SYN_SENT, TIME_WAIT, CLOSE = "02", "06", "07"


def test_only_an_open_socket_of_one_account_is_believed(proc):
    for rows, account in (
        ([row("01", MINE, 7)], Account.OWNER),
        ([row("05", MINE, 7)], Account.OWNER),
        ([row("01", OTHER, 7)], Account.ANOTHER),
        ([row("01", MINE, 0)], Account.UNKNOWN),  # closed, and listed as root's
        ([row("05", MINE, 0)], Account.UNKNOWN),
        ([row(TIME_WAIT, MINE, 0)], Account.UNKNOWN),
        ([row(CLOSE, MINE, 7)], Account.UNKNOWN),
        ([row(SYN_SENT, MINE, 7)], Account.UNKNOWN),  # the port was given to another program
        ([row("05", OTHER, 0), row(SYN_SENT, MINE, 7)], Account.UNKNOWN),
        ([row("01", MINE, 7), row("01", OTHER, 8)], Account.UNKNOWN),
        ([row("01", MINE, 7, SERVER, CLIENT)], Account.UNKNOWN),  # the server's own side
        ([row("01", MINE, 7, CLIENT, ("127.0.0.1", 7861))], Account.UNKNOWN),
        ([row("01", MINE, 7, ("127.0.0.1", 50001))], Account.UNKNOWN),
        ([row("01", MINE, 7, ("127.0.0.2", 50000))], Account.UNKNOWN),
        (["", "no row", row("01", MINE, 7)[:60]], Account.UNKNOWN),
        ([], Account.UNKNOWN),
    ):
        assert told(proc, *rows) is account, rows


def test_a_system_that_tells_nothing_leaves_the_account_unknown(proc):
    find = partial(read_tables, proc=proc)
    assert account_of(CLIENT, SERVER, find, proc) is Account.UNKNOWN
    (proc / "net/tcp").mkdir()  # it cannot be read as a file
    assert account_of(CLIENT, SERVER, find, proc) is Account.UNKNOWN
    assert account_of(("203.0.113.7", 5), ("203.0.113.8", 6), find, proc) is Account.UNKNOWN
    assert account_of(("127.0.0.1", 5), ("::1", 6), find, proc) is Account.UNKNOWN
    assert account_of(("no address", 5), ("::1", 6), find, proc) is Account.UNKNOWN
    assert Peer(None, None).account is Account.UNKNOWN


def test_root_is_nobody_in_particular_to_a_server_of_another_account(proc, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert told(proc, row("01", 1000, 7)) is Account.OWNER
    assert told(proc, row("01", 0, 7)) is Account.UNKNOWN
    assert told(proc, row("01", 1001, 7)) is Account.ANOTHER


def test_a_socket_that_is_closed_between_two_fields_of_its_row_is_not_roots(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    rows = iter([{(0, 7)}, set()])
    assert account_of(CLIENT, SERVER, lambda *_: next(rows)) is Account.UNKNOWN


def test_the_number_of_all_accounts_of_other_namespaces_is_no_account(proc, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert told(proc, row("01", 65534, 7)) is Account.OWNER
    (proc / "self/uid_map").write_text("         0       1000          1\n")
    assert told(proc, row("01", 65534, 7)) is Account.UNKNOWN
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert told(proc, row("01", 65534, 7)) is Account.UNKNOWN
    assert told(proc, row("01", 0, 7)) is Account.OWNER


def test_a_connection_is_looked_up_once(monkeypatch):
    looked = []
    monkeypatch.setattr(peers, "account_of", lambda *ends: looked.append(ends) or Account.OWNER)
    peer = Peer(CLIENT, SERVER)
    assert looked == [] and [peer.account for _ in range(3)] == [Account.OWNER] * 3
    assert looked == [(CLIENT, SERVER)]


def test_under_wsl_the_browser_is_not_known(monkeypatch):
    monkeypatch.setattr(peers, "_knows_own", lambda _: True)
    assert peers.own_programs_are_known()
    system = type("System", (), {"release": "5.15.167.4-microsoft-standard-WSL2"})
    monkeypatch.setattr(platform, "uname", system)
    assert not peers.own_programs_are_known()

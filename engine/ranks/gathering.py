"""Processes that `torchrun` has started find each other here: the one with rank 0 leads, and the
others connect to it, over the network if they are on other hosts.

The leader tells through torchrun's store at which port it listens, with a secret that whoever
connects must know. A store may be that of an earlier attempt, whose leader has ended, so whoever
follows tries again until it finds a leader that listens.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch import distributed

from engine.errors import RankError
from engine.ranks.hello import Hello, Refused, Welcome, why_refused
from engine.ranks.line import Line, LostLineError
from engine.ranks.meeting import LOOPBACK, Meeting
from engine.ranks.members import END_SECONDS, ENDED, Lost, Take
from engine.ranks.messages import End
from engine.ranks.torchrun import FIND_SECONDS, Launched

KEY = "ramstream/leader"
"""The leader tells under this key of the store where it listens."""
TRY_SECONDS = 0.2
"""Whoever finds no leader tries again after so many seconds."""
ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""The system asks so often whether the other host is still there. A process cannot tell by the
silence of its leader: that may be stopped in a terminal.
"""


class JoinedMember:
    """A `JoinedMember` is a process that torchrun has started. It ends with its connection."""

    def __init__(self, stream: socket.socket, connection: Connection, hello: Hello, is_here: bool):
        self.place = hello.place
        self.host_name = hello.host_name if hello.place.hosts > 1 else ""
        self.is_here = is_here
        self.pid = hello.pid
        self._stream = stream
        self._process = _handle_of(hello.pid) if is_here else None
        self._lock = threading.Lock()
        self._takes: Take | None = None
        self._loses: Lost | None = None
        self._why_lost = ""
        self._line = Line(connection, self._take, self._lose)

    def connect(self, take: Take, lost: Lost) -> Line:
        with self._lock:
            self._takes, self._loses = take, lost
            why = self._why_lost
        if why:
            lost(why)
        return self._line

    def _take(self, message: object) -> bool:
        return self._takes is not None and self._takes(message)

    def _lose(self, why: str) -> None:
        with self._lock:
            self._why_lost, loses = why, self._loses
        if loses is not None:
            loses(why)

    def kill(self) -> None:
        if self._process is not None:
            # A process that is stopped obeys this signal alone.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def why_lost(self, why: str) -> str:
        return "its process or its host has ended" if why == ENDED else why

    def say_goodbye(self) -> None:
        """Does nothing: it ends when the command does, with its exit code."""

    def part(self) -> None:
        with self._lock:
            self._takes = self._loses = None

    def host_memory(self) -> int:
        """Returns 0, since it tells of its memory itself."""
        return 0

    def send_end(self, code: int) -> None:
        """Asks it to end with an exit code."""
        with contextlib.suppress(LostLineError):
            self._line.send(End(code))

    def close(self, until: float) -> None:
        """Returns once it has ended, or at the time `until` of the monotonic clock."""
        while not self._why_lost and time.monotonic() < until:
            time.sleep(0.01)
        self._line.close()
        self._stream.close()
        if self._process is not None:
            os.close(self._process)


class Gathering:
    """A `Gathering` has the processes of `launched` that follow this one, which leads, in the order
    of ranks. Raises RankError where one of them does not come, or cannot compute the same run.
    """

    def __init__(self, launched: Launched, hello: Hello):
        self.place = launched.place
        self.members: list[JoinedMember] = []
        self._secret = secrets.token_bytes(32)
        self._came: queue.SimpleQueue[tuple[socket.socket, Connection, Hello]] = queue.SimpleQueue()
        self._store = launched.store()
        # Every attempt of torchrun meets under a name of its own.
        self.meeting = Meeting(launched.port, launched.address, f"ramstream/{secrets.token_hex(8)}")
        with _listening(self.place.hosts) as listener:
            self._announce(listener)
            threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
            try:
                found = self._wait_for_all()
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # the thread that listens ends
        problem = hello.problem or why_refused(hello, [each[2] for each in found])
        for stream, connection, other in found:
            connection.send(Refused(problem) if problem else Welcome())
            if problem:
                connection.close()
                stream.close()
                continue
            is_here = other.place.host == self.place.host
            self.members.append(JoinedMember(stream, connection, other, is_here))
        if problem:
            raise RankError(problem)

    @property
    def store(self) -> distributed.Store:
        """Returns the store at which the ranks meet."""
        return self.meeting.within(self._store)

    def end(self, code: int) -> None:
        """Makes all processes that follow end with this exit code."""
        for member in self.members:
            member.send_end(code)
        until = time.monotonic() + END_SECONDS
        for member in self.members:
            member.close(until)

    def _announce(self, listener: socket.socket) -> None:
        told = {"port": listener.getsockname()[1], "secret": self._secret.hex()}
        self._store.set(KEY, json.dumps(told))

    def _listen(self, listener: socket.socket) -> None:
        """Lets processes come, each in a thread of its own: one that is silent delays no other."""
        with contextlib.suppress(OSError):  # it is closed once all have come
            while True:
                stream, _ = listener.accept()
                threading.Thread(target=self._admit, args=(stream,), daemon=True).start()

    def _admit(self, stream: socket.socket) -> None:
        connection = _connection_of(stream)
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            found = connection.recv()
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            stream.close()
            return
        self._came.put((stream, connection, found))

    def _wait_for_all(self) -> list[tuple[socket.socket, Connection, Hello]]:
        until = time.monotonic() + FIND_SECONDS
        found: dict[int, tuple[socket.socket, Connection, Hello]] = {}
        while len(found) < self.place.all_ranks - 1:
            try:
                came = self._came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = next(rank for rank in range(1, self.place.all_ranks) if rank not in found)
                raise RankError(
                    f"Rank {missing} of {self.place.all_ranks} has not come within "
                    f"{FIND_SECONDS} s; check that this host can be reached from all others."
                ) from None
            found[came[2].place.rank] = came
        return [found[rank] for rank in sorted(found)]


def follow(launched: Launched, hello: Hello) -> Connection:
    """Connects a process that follows to the one that leads. Raises RankError where that cannot be
    found, or refuses to lead it.
    """
    store, until = launched.store(), time.monotonic() + FIND_SECONDS
    address = launched.address if launched.place.hosts > 1 else LOOPBACK
    while True:
        told = json.loads(store.get(KEY))
        try:
            stream = socket.create_connection((address, told["port"]), FIND_SECONDS)
            stream.settimeout(None)
            connection = _connection_of(stream)
            answer_challenge(connection, bytes.fromhex(told["secret"]))
            deliver_challenge(connection, bytes.fromhex(told["secret"]))
            connection.send(hello)
            answer = connection.recv()
            break
        except (OSError, EOFError, AuthenticationError) as error:
            if time.monotonic() > until:
                raise RankError(
                    f"The process that leads could not be reached at {address}; check that its "
                    "host can be reached from this one."
                ) from error
            time.sleep(TRY_SECONDS)
    if isinstance(answer, Refused):
        raise RankError(answer.sentence)
    return connection


def _listening(hosts: int) -> socket.socket:
    """Returns a socket at which processes of all hosts can connect, and of no other host if there
    is one.
    """
    if hosts == 1:
        return socket.create_server((LOOPBACK, 0), backlog=512)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=512)


def _connection_of(stream: socket.socket) -> Connection:
    """Returns a connection over `stream`, which stays open when that is closed."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(os.dup(stream.fileno()))


def _handle_of(pid: int) -> int | None:
    """Returns a handle of a process, which never becomes that of another one."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None

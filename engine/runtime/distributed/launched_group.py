"""Processes that `torchrun` has started find each other here: rank 0 listens, and the
others connect to it.

- On one node they do so by a socket in a folder of this account, which no other account can reach.
- From other nodes they come over the network. Rank 0 tells through torchrun's store at which
  port it listens, and both sides prove that they have the secret that whoever starts them has given
  to every node. Anybody may read that store and write to it.

What an earlier attempt has left, whose rank 0 has ended, may still be there, so a worker
tries again until it finds a rank 0 that listens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import distributed

from engine.errors import RankError, first_line
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed.codec import MessageError
from engine.runtime.distributed.connection import ConnectionLostError, MonitoredConnection
from engine.runtime.distributed.handshake import why_refused
from engine.runtime.distributed.message_stream import Connection
from engine.runtime.distributed.messages import End, Handshake, Message, Refused, Welcome
from engine.runtime.distributed.own_sockets import OwnSocket, refuse_others
from engine.runtime.distributed.processes import END_SECONDS, ENDED, Lost, Take
from engine.runtime.distributed.rendezvous import OverNetwork
from engine.runtime.distributed.shared_secret import admit, prove, read_secret
from engine.runtime.distributed.torchrun import FIND_SECONDS, Launched

KEY = "ramstream/rank-0"
"""Rank 0 tells under this key of the store where it listens."""
TRY_SECONDS = 0.2
"""Seconds after which a process that finds no rank 0 tries again."""
TELL_SECONDS = 5.0
"""Seconds after which rank 0 writes its address anew, since others may write to the store."""
MOST_AT_ONCE = 256
"""Number of processes that may be joining at once. Any beyond it is refused, and tries again."""
MOST_TOLD = 10
"""Number of refused connections that are reported."""
FIRST_BYTES = 1 << 20
"""Most bytes of the first message of a process."""
ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""How often the system asks whether the other node is still there. A process cannot tell by the
silence of rank 0: that may be stopped in a terminal.
"""


class _Told(msgspec.Struct, frozen=True):
    """Rank 0 listens at this port."""

    port: int


class JoinedProcess:
    """A process that torchrun has started. It ends with its connection."""

    def __init__(self, connection: Connection, handshake: Handshake, is_here: bool):
        self.place = handshake.place
        self.host_name = handshake.host_name if handshake.place.nodes > 1 else ""
        self.is_here = is_here
        self.pid = handshake.pid
        self._connection = connection
        self._process = _handle_of(handshake.pid) if is_here else None
        self._lock = threading.Lock()
        self._takes: Take | None = None
        self._loses: Lost | None = None
        self._why_lost = ""
        self._monitored = MonitoredConnection(connection, self._take, self._lose)

    def connect(self, take: Take, lost: Lost) -> MonitoredConnection:
        with self._lock:
            self._takes, self._loses = take, lost
            why = self._why_lost
        if why:
            lost(why)
        return self._monitored

    def _take(self, message: Message) -> bool:
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
            self._connection.cut()

    def why_lost(self, why: str) -> str:
        return "its process or its node has ended" if why == ENDED else why

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
        with contextlib.suppress(ConnectionLostError):
            self._monitored.send(End(code))

    def close(self, until: float) -> None:
        """Returns once it has ended, or at the time `until` of the monotonic clock."""
        while not self._why_lost and time.monotonic() < until:
            time.sleep(0.01)
        self._monitored.close()
        if self._process is not None:
            os.close(self._process)


class LaunchedGroup:
    """Processes of `launched` beside this one, which is rank 0, in the order of ranks. Raises
    RankError where one of them does not come, or cannot compute the same run.
    """

    def __init__(self, launched: Launched, handshake: Handshake):
        self.place = launched.place
        self.processes: list[JoinedProcess] = []
        self.network: tuple[OverNetwork, distributed.Store] | None = None
        """Ranks of several nodes meet there."""
        self._came: queue.SimpleQueue[tuple[Connection, Handshake]] = queue.SimpleQueue()
        self._coming = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._sent_away = 0
        with contextlib.ExitStack() as way:
            if self.place.nodes > 1:
                found = self._over_network(launched, way)
            else:
                found = self._on_node(launched, way)
        problem = handshake.problem or why_refused(handshake, [other for _, other in found])
        for connection, other in found:
            connection.send(Refused(problem) if problem else Welcome())
            if problem:
                connection.close()
                continue
            is_here = other.place.node_rank == self.place.node_rank
            self.processes.append(JoinedProcess(connection, other, is_here))
        if problem:
            raise RankError(problem)

    def _on_node(
        self, launched: Launched, way: contextlib.ExitStack
    ) -> list[tuple[Connection, Handshake]]:
        meets = OwnSocket(_name_of(launched))
        way.callback(meets.close)
        listener = meets.listen()
        way.callback(meets.forget)

        def admit_own(stream: socket.socket) -> Connection:
            refuse_others(stream)
            return Connection(stream)

        return self._wait_for_all(listener, admit_own)

    def _over_network(
        self, launched: Launched, way: contextlib.ExitStack
    ) -> list[tuple[Connection, Handshake]]:
        secret, store = read_secret(), launched.store()
        # Every attempt of torchrun meets under a name of its own.
        name = f"ramstream/{secrets.token_hex(8)}"
        network = OverNetwork(launched.port, launched.address, name)
        self.network = network, network.within(store)
        listener = _listening()
        told = msgspec.json.encode(_Told(listener.getsockname()[1])).decode()
        is_over = threading.Event()
        way.callback(is_over.set)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the store has ended, and with it this run
                while True:
                    store.set(KEY, told)
                    if is_over.wait(TELL_SECONDS):
                        return

        threading.Thread(target=tell, name="tell-port", daemon=True).start()

        def admit_any(stream: socket.socket) -> Connection:
            _keep_alive(stream)
            return Connection(stream, admit(stream, secret))

        return self._wait_for_all(listener, admit_any)

    def end(self, code: int) -> None:
        """Makes all workers end with this exit code."""
        for process in self.processes:
            process.send_end(code)
        until = time.monotonic() + END_SECONDS
        for process in self.processes:
            process.close(until)

    def _listen(self, listener: socket.socket, admits: Callable) -> None:
        """Lets processes come, each in a thread of its own: one that is silent delays no other."""
        with contextlib.suppress(OSError):  # it is closed once all have come
            while True:
                stream, _ = listener.accept()
                if not self._coming.acquire(blocking=False):
                    stream.close()
                    continue
                threading.Thread(target=self._admit, args=(stream, admits), daemon=True).start()

    def _admit(self, stream: socket.socket, admits: Callable) -> None:
        who = _who(stream)
        try:
            connection = admits(stream)
            found = connection.receive(FIRST_BYTES)
            _check_handshake(found, self.place)
        except (OSError, EOFError, MessageError) as error:
            stream.close()
            self._tell_of(who, error)
            return
        finally:
            self._coming.release()
        self._came.put((connection, found))

    def _tell_of(self, who: str, error: Exception) -> None:
        """Logs that a connection was refused, unless so many were that it would fill a disk."""
        self._sent_away += 1
        if self._sent_away <= MOST_TOLD:
            why = first_line(error) or "it has ended"
            # One write, so that threads that tell at once do not mix their lines.
            sys.stderr.write(
                f"ramstream: {who} wanted to join the run and was sent away ({why.rstrip('.')}).\n"
            )
            sys.stderr.flush()

    def _wait_for_all(
        self, listener: socket.socket, admits: Callable[[socket.socket], Connection]
    ) -> list[tuple[Connection, Handshake]]:
        until = time.monotonic() + FIND_SECONDS
        found: dict[int, tuple[Connection, Handshake]] = {}
        with listener:
            threading.Thread(target=self._listen, args=(listener, admits), daemon=True).start()
            try:
                while len(found) < self.place.world_size - 1:
                    came = self._came.get(timeout=max(0.0, until - time.monotonic()))
                    rank = came[1].place.rank
                    if rank in found:  # it came once more, or another says that it has this rank
                        found[rank][0].close()
                    found[rank] = came
            except queue.Empty:
                missing = next(
                    rank for rank in range(1, self.place.world_size) if rank not in found
                )
                raise RankError(
                    f"Rank {missing} of {self.place.world_size} has not come within "
                    f"{FIND_SECONDS} s; check that this node can be reached from all others."
                ) from None
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # the thread that listens ends
        return [found[rank] for rank in sorted(found)]


def _check_handshake(found: Message, place: RankInfo) -> None:
    """Raises MessageError for what is not the first message of a worker."""
    if not isinstance(found, Handshake):
        raise MessageError(f"It sent {type(found).__name__} first.")
    if not 0 < found.place.rank < place.world_size:
        raise MessageError(f"It says that it is rank {found.place.rank} of {place.world_size}.")


def connect_to_rank_zero(launched: Launched, handshake: Handshake) -> Connection:
    """Connects a worker to rank 0. Raises RankError where that cannot be
    found, or refuses it.
    """
    until = time.monotonic() + FIND_SECONDS
    with contextlib.ExitStack() as way:
        where, connect = _way_to(launched, way)
        while True:
            stream = None
            try:
                stream, connection = connect()
                connection.send(handshake)
                answer = connection.receive(FIRST_BYTES)
                break
            except (OSError, EOFError, MessageError, msgspec.DecodeError) as error:
                if stream is not None:
                    stream.close()
                if time.monotonic() > until:
                    why = first_line(error) or "it has ended"
                    raise RankError(
                        f"Rank 0 could not be reached {where} ({why}); check that "
                        "its node can be reached from this one."
                    ) from error
                time.sleep(TRY_SECONDS)
    if isinstance(answer, Refused):
        raise RankError(answer.sentence)
    return connection


def _way_to(
    launched: Launched, way: contextlib.ExitStack
) -> tuple[str, Callable[[], tuple[socket.socket, Connection]]]:
    """Returns where rank 0 is, in words, and what connects to it."""
    if launched.place.nodes == 1:
        meets = OwnSocket(_name_of(launched))
        way.callback(meets.close)

        def connect_here() -> tuple[socket.socket, Connection]:
            stream = meets.connect()
            return stream, Connection(stream)

        return "on this node", connect_here
    secret, store = read_secret(), launched.store()

    def connect_there() -> tuple[socket.socket, Connection]:
        told = msgspec.json.decode(store.get(KEY), type=_Told)
        stream = socket.create_connection((launched.address, told.port), FIND_SECONDS)
        try:
            _keep_alive(stream)
            return stream, Connection(stream, prove(stream, secret))
        except BaseException:
            stream.close()
            raise

    return f"at {launched.address}", connect_there


def _name_of(launched: Launched) -> str:
    """Returns the name of the socket by which processes of one node meet. Another torchrun on this
    node has another port, and a container may have the same.
    """
    network = Path("/proc/self/ns/net").stat().st_ino
    told = f"{launched.run} {launched.address} {launched.port} {network}"
    return f"ramstream-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _who(stream: socket.socket) -> str:
    """Returns the other end in words."""
    if stream.family == socket.AF_UNIX:
        return "A process of this node"
    with contextlib.suppress(OSError):
        return f"Someone at {stream.getpeername()[0]}"
    return "Someone"


def _listening() -> socket.socket:
    """Returns a socket at which processes of all nodes can connect."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=512)


def _keep_alive(stream: socket.socket) -> None:
    """Makes the system notice that the other node has gone."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _handle_of(pid: int) -> int | None:
    """Returns a handle of a process, which never becomes that of another one."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None

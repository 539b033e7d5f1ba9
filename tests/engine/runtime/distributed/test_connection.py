"""A connection carries messages between two processes, and tells at once when the other one is
lost.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from engine.runtime.distributed import connection as module
from engine.runtime.distributed.connection import ConnectionLostError, MonitoredConnection
from engine.runtime.distributed.message_stream import Connection
from engine.runtime.distributed.messages import Beat, Go, Message, Refused, ShardReply
from tests.support.routes import wait_for

PATIENCE = 30
"""A test gives up after so many seconds."""
FOR_THE_THREAD = Refused("for the thread")
ENDS = "import sys; sys.stdin.read()"
"""A process that does nothing, and ends with the pipe to it."""


class Side:
    """One end of a connection, with what its thread took and what it was told."""

    def __init__(self, connection: Connection):
        self.taken: list = []
        self.reasons: list[str] = []
        self.is_lost = threading.Event()
        self.connection = MonitoredConnection(connection, self._take, self._lost)

    def _take(self, message: Message) -> bool:
        if message == FOR_THE_THREAD:
            self.taken.append(message)
            return True
        return False

    def _lost(self, why: str) -> None:
        self.reasons.append(why)
        self.is_lost.set()


@pytest.fixture(autouse=True)
def quick_signs(monkeypatch):
    """Makes sides give signs of life more often than usual."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)


@pytest.fixture
def ends():
    """Returns the two ends of a connection."""
    both = [Connection(end) for end in socket.socketpair()]
    yield both
    for end in both:
        end.close()


@pytest.fixture
def sides(ends):
    """Returns two sides that are connected."""
    both = [Side(end) for end in ends]
    yield both
    for side in both:
        side.connection.close()


def test_messages_arrive_in_order_whole_and_both_ways(sides):
    here, there = sides
    for number in range(200):
        here.connection.send(Go(number))
    large = np.arange(4 << 20, dtype=np.uint8)  # more than the system keeps for a reader
    there.connection.send(ShardReply(large))
    assert [there.connection.next() for _ in range(200)] == [Go(number) for number in range(200)]
    assert np.array_equal(here.connection.next().content, large)
    assert here.taken == there.taken == []


def test_the_thread_takes_what_it_wants_and_leaves_the_rest(sides):
    here, there = sides
    here.connection.send(FOR_THE_THREAD)
    here.connection.send(Refused("for a caller"))
    assert there.connection.next() == Refused("for a caller")
    assert there.taken == [FOR_THE_THREAD]


def test_messages_of_several_threads_do_not_mix(sides):
    here, there = sides

    def send(name: str) -> None:
        for _ in range(50):
            here.connection.send(Refused(name * 50_000))

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    found = [there.connection.next().sentence for _ in range(150)]
    for thread in threads:
        thread.join()
    assert sorted({(each[0], len(each), len(set(each))) for each in found}) == [
        ("a", 50_000, 1),
        ("b", 50_000, 1),
        ("c", 50_000, 1),
    ]


def test_signs_of_life_are_no_messages_and_keep_an_idle_connection(ends, monkeypatch):
    """By a clock of the test, by which nearly as much time as a side may be silent passes between
    two signs of life.
    """
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ours, theirs = ends
    side = Side(ours)
    for _ in range(5):
        now[0] += 0.9 * module.SILENT_SECONDS
        theirs.send(Beat())
        wait_for(lambda: side.connection._heard == now[0], PATIENCE)
    theirs.send(Refused("after a while"))
    assert side.connection.next() == Refused("after a while")
    assert not side.is_lost.is_set()
    side.connection.close()


def test_an_idle_side_gives_signs_of_life(ends):
    ours, theirs = ends
    side = Side(ours)
    assert [theirs.receive() for _ in range(3)] == [Beat()] * 3
    side.connection.close()


def test_the_end_of_the_other_process_is_noticed_while_nobody_reads():
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS], stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    side = Side(Connection(ours))
    assert not side.is_lost.wait(0.3)
    process.kill()
    process.wait()
    process.stdin.close()
    assert side.is_lost.wait(PATIENCE)
    assert side.reasons == ["it has ended"]
    for _ in range(2):
        with pytest.raises(ConnectionLostError, match="it has ended"):
            side.connection.next()
    with pytest.raises(ConnectionLostError, match="it has ended"):
        side.connection.send(Refused("too late"))
    side.connection.close()


def test_whoever_waits_for_a_message_is_told_that_none_will_come(ends):
    ours, theirs = ends
    side = Side(ours)
    found: list[str] = []

    def wait() -> None:
        try:
            side.connection.next()
        except ConnectionLostError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    theirs.close()
    waiting.join(PATIENCE)
    assert found == ["it has ended"] == side.reasons


def test_messages_that_arrived_before_the_end_are_not_lost(ends):
    ours, theirs = ends
    theirs.send(Refused("last words"))
    theirs.close()
    side = Side(ours)
    assert side.is_lost.wait(PATIENCE)
    assert side.connection.next() == Refused("last words")
    with pytest.raises(ConnectionLostError):
        side.connection.next()


def test_a_message_that_breaks_off_is_the_end(ends):
    ours, theirs = ends
    side = Side(ours)
    theirs._stream.sendall(b"\0\0\0\0\0\0\x10\0half a message")
    theirs.close()
    assert side.is_lost.wait(PATIENCE)
    assert side.reasons == ["it has ended"]


def test_silence_after_a_sign_of_life_is_noticed(ends, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    ours, theirs = ends
    side = Side(ours)
    theirs.send(Refused("hello"))
    assert side.connection.next() == Refused("hello")
    assert side.is_lost.wait(PATIENCE)
    assert side.reasons == ["it has been silent for 0 s"]
    with pytest.raises(ConnectionLostError, match="silent"):
        side.connection.next()


def test_a_process_that_starts_may_be_silent_for_longer(ends, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(module, "FIRST_SECONDS", 1.0)
    ours, _ = ends
    began = time.monotonic()
    side = Side(ours)
    assert side.is_lost.wait(PATIENCE)
    assert time.monotonic() - began >= 1.0
    assert "silent" in side.reasons[0]


def test_a_side_that_does_not_mind_silence_notices_the_end_alone(ends, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.1)
    ours, theirs = ends
    lost = threading.Event()
    own = MonitoredConnection(ours, lambda _: False, lambda _: lost.set(), minds_silence=False)
    assert not lost.wait(0.6)
    theirs.close()
    assert lost.wait(PATIENCE)
    own.close()


def test_a_side_that_was_stopped_itself_hears_what_has_arrived_meanwhile(ends, monkeypatch):
    """A process that was stopped for long finds signs of life that are waiting for it."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 5.0)
    ours, theirs = ends
    side = Side(ours)
    theirs.send(Refused("before"))
    assert side.connection.next() == Refused("before")
    clock = module.time.monotonic
    polled = threading.Event()
    plain = ours.poll

    def poll(seconds=0.0):
        if seconds and not polled.is_set():
            # It is stopped here, after it has looked: an hour passes and signs of life arrive.
            polled.set()
            monkeypatch.setattr(module.time, "monotonic", lambda: clock() + 3600)
            theirs.send(Refused("meanwhile"))
            return False
        return plain(seconds)

    monkeypatch.setattr(ours, "poll", poll)
    assert polled.wait(PATIENCE)
    assert side.connection.next() == Refused("meanwhile")
    assert not side.is_lost.is_set()


def test_a_connection_that_is_closed_is_not_lost_and_leaves_no_thread(sides):
    here, there = sides
    here.connection.close()
    here.connection.close()
    with pytest.raises(ConnectionLostError):
        here.connection.send(Refused("after the end"))
    with pytest.raises(ConnectionLostError):
        here.connection.next()
    assert there.is_lost.wait(PATIENCE)
    assert not here.reasons
    for side in sides:
        side.connection.close()
        for thread in side.connection.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.mark.parametrize("error", [OSError("no disk"), RuntimeError("a fault")])
def test_a_message_that_cannot_be_taken_ends_the_connection(ends, error):
    """Else whoever waits for the next message would wait for ever."""
    ours, theirs = ends
    reasons: list[str] = []

    def take(_) -> bool:
        raise error

    own = MonitoredConnection(ours, take, reasons.append)
    theirs.send(Refused("hello"))
    with pytest.raises(ConnectionLostError, match=str(error)):
        own.next()
    assert reasons == [f"a message from it could not be read ({error})"]
    own.close()

"""Shards of units that live on the devices of other ranks, as the rank that leads reaches them.

A follower answers in the thread that reads its line: it may be computing, or waiting for the
leader, while the leader reads the planes for a checkpoint.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from engine.errors import RankError
from engine.host.device_planes import DevicePlanes
from engine.host.ram_planes import Key, Wanted
from engine.ranks.messages import (
    AllocateShards,
    ReadShard,
    ReleaseShards,
    ShardMessage,
    ShardReply,
    WriteShard,
)

_LOOK_SECONDS = 1.0
"""Whoever waits for an answer checks each time so many seconds have passed whether one can come."""


class RemoteShards:
    """A `RemoteShards` reaches the shards of `ranks` - 1 followers. `send` sends a message to one
    of them, and `problem` returns why they cannot go on, or "". Any thread may call the methods.
    """

    def __init__(self, ranks: int, send: Callable[[int, Any], None], problem: Callable[[], str]):
        self.ranks = ranks
        self._send = send
        self._problem = problem
        self._asking = [threading.Lock() for _ in range(ranks)]
        self._replies: list[queue.SimpleQueue[ShardReply]] = [
            queue.SimpleQueue() for _ in range(ranks)
        ]

    def take(self, rank: int, reply: ShardReply) -> None:
        """Takes the answer of a rank."""
        self._replies[rank].put(reply)

    def allocate(self, rank: int, wanted: Mapping[Key, Wanted]) -> None:
        self._ask(rank, AllocateShards(dict(wanted)))

    def release(self, keys: Iterable[Key]) -> None:
        gone = tuple(keys)
        if self._problem():
            return  # nobody is left who holds them
        for rank in range(1, self.ranks):
            self._ask(rank, ReleaseShards(gone))

    def read(self, rank: int, key: Key, begin: int, end: int) -> np.ndarray:
        content = self._ask(rank, ReadShard(key, begin, end)).content
        assert content is not None  # it was asked for
        return content

    def write(self, rank: int, key: Key, begin: int, content: np.ndarray) -> None:
        self._ask(rank, WriteShard(key, begin, content))

    def _ask(self, rank: int, message: ShardMessage) -> ShardReply:
        with self._asking[rank]:
            self._send(rank, message)
            while True:
                try:
                    return self._replies[rank].get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    if self._problem():
                        raise RankError(self._problem()) from None


def answer(planes: DevicePlanes, message: ShardMessage) -> ShardReply:
    """Does what the leader asks of the shards of this rank, and returns the answer."""
    match message:
        case AllocateShards(wanted):
            planes.allocate(wanted)
        case ReleaseShards(keys):
            planes.release(keys)
        case ReadShard(key, begin, end):
            return ShardReply(planes.read(key, begin, end))
        case WriteShard(key, begin, content):
            planes.write(key, begin, content)
    return ShardReply()

"""Shards on the devices of other ranks, and in the RAM of other nodes, as rank 0 reaches them.

A worker answers in the thread that reads its connection: it may be computing, or waiting for
rank 0, while rank 0 reads the planes for a checkpoint.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from engine.errors import RankError
from engine.progress import no_progress
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed.messages import (
    AllocateNodeShards,
    AllocateShards,
    Message,
    ReadShard,
    ReleaseShards,
    ShardMessage,
    ShardReply,
    WriteShard,
)
from engine.runtime.host.cross_node_planes import NodePlanes, NodeShard
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.ram_planes import Key, Wanted
from engine.runtime.host.sharded_planes import HeldBytes
from engine.runtime.host.shared_chunk import CHUNK_BYTES, SharedBuffer
from engine.runtime.host.shared_memory import OwnedMemory, SharedPlanes
from engine.runtime.optimizer.host_threads import Workers

_POLL_SECONDS = 1.0
"""Seconds between two checks, while waiting for an answer, of whether one can still come."""


class RemoteShards:
    """Shards of the workers, as rank 0 reaches them. `send` sends a message to one of them, and
    `problem` returns why they cannot continue, or "". Any thread may call the methods.
    """

    def __init__(
        self, place: RankInfo, send: Callable[[int, Message], None], problem: Callable[[], str]
    ):
        """place: that of rank 0."""
        ranks = place.world_size
        self.ranks = ranks
        self._here = place.local_world_size
        """Number of ranks, the first ones, that are on this node."""
        self._send = send
        self._problem = problem
        self._passing = threading.Lock()
        self._buffer: SharedBuffer | None = None
        """Bytes to and from ranks of this node pass through it."""
        self._asking = [threading.Lock() for _ in range(ranks)]
        self._replies: list[queue.SimpleQueue[ShardReply]] = [
            queue.SimpleQueue() for _ in range(ranks)
        ]

    def reach(self, ranks: int) -> None:
        """Sets the number of ranks with shards of the planes that rank 0 reaches."""
        self.ranks = ranks

    def take(self, rank: int, reply: ShardReply) -> None:
        """Takes the answer of a rank."""
        self._replies[rank].put(reply)

    def allocate(self, rank: int, wanted: Mapping[Key, Wanted]) -> None:
        self.ask(rank, AllocateShards(dict(wanted)))

    def release(self, keys: Iterable[Key]) -> None:
        gone = tuple(keys)
        for rank in range(1, self.ranks):
            self.let_go(rank, ReleaseShards(gone))

    def read(self, rank: int, key: Key, begin: int, end: int) -> np.ndarray:
        if rank >= self._here:
            content = self.ask(rank, ReadShard(key, begin, end)).content
            assert content is not None  # it was asked for
            return content
        content = np.empty(end - begin, np.uint8)
        with self._passing:
            buffer = self._opened_buffer()
            for first in range(begin, end, CHUNK_BYTES):
                part = content[first - begin :][:CHUNK_BYTES]
                there = buffer.first(part.size)
                self.ask(rank, ReadShard(key, first, first + part.size, into=there))
                part[:] = buffer.content[: part.size]
        return content

    def write(self, ranks: Sequence[int], key: Key, begin: int, content: np.ndarray) -> None:
        for rank in ranks:
            if rank >= self._here:
                self.ask(rank, WriteShard(key, begin, content))
        here = [rank for rank in ranks if rank < self._here]
        if not here:
            return
        with self._passing:
            buffer = self._opened_buffer()
            for first in range(0, content.size, CHUNK_BYTES):
                there = buffer.put(content[first : first + CHUNK_BYTES])
                self._ask_all(here, WriteShard(key, begin + first, in_buffer=there))

    def close(self) -> None:
        """Lets go of memory. No other method may be called any more."""
        with self._passing:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = None

    def _opened_buffer(self) -> SharedBuffer:
        if self._buffer is None:
            self._buffer = SharedBuffer()
        return self._buffer

    def let_go(self, rank: int, message: ReleaseShards) -> None:
        """Makes a rank let go of planes, unless nobody is left who holds any."""
        if not self._problem():
            self.ask(rank, message)

    def ask(self, rank: int, message: ShardMessage) -> ShardReply:
        """Returns the answer of a rank. Raises RankError."""
        return self._ask_all([rank], message)[0]

    def _ask_all(self, ranks: Sequence[int], message: ShardMessage) -> list[ShardReply]:
        """Returns the answers of some ranks, in rising order, who work at the same time. Raises
        RankError.
        """
        with contextlib.ExitStack() as asking:
            for rank in ranks:  # all threads take the locks in rising order
                asking.enter_context(self._asking[rank])
            for rank in ranks:
                self._send(rank, message)
            return [self._reply(rank) for rank in ranks]

    def _reply(self, rank: int) -> ShardReply:
        while True:
            try:
                return self._replies[rank].get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._problem():
                    raise RankError(self._problem()) from None


class RemoteNodes:
    """Parts of planes in the RAM of other nodes, as rank 0 reaches them (`OtherNodes`): the first
    rank of each node has them. place: that of rank 0.
    """

    def __init__(self, shards: RemoteShards, place: RankInfo):
        self._shards = shards
        self._firsts = {node: node * place.local_world_size for node in range(1, place.nodes)}

    def allocate(self, node: int, parts: Mapping[Key, NodeShard]) -> None:
        self._shards.ask(self._firsts[node], AllocateNodeShards(dict(parts)))

    def release(self, keys: Iterable[Key]) -> None:
        gone = ReleaseShards(tuple(keys), in_ram=True)
        for rank in self._firsts.values():
            self._shards.let_go(rank, gone)

    def read(self, node: int, key: Key, begin: int, end: int) -> np.ndarray:
        message = ReadShard(key, begin, end, in_ram=True)
        content = self._shards.ask(self._firsts[node], message).content
        assert content is not None  # it was asked for
        return content

    def write(self, node: int, key: Key, begin: int, content: np.ndarray) -> None:
        self._shards.ask(self._firsts[node], WriteShard(key, begin, content, in_ram=True))


class OwnNodeShards:
    """Part of planes that is on this node, in memory that its ranks share. threads: number that
    touch it.
    """

    def __init__(self, threads: int):
        self._held: dict[Key, HeldBytes] = {}
        self._memory = OwnedMemory()
        workers = Workers(threads, "parts-of-planes")
        self.ram = NodePlanes(self._held.__getitem__, None, None, workers, self._memory)

    @property
    def planes(self) -> SharedPlanes:
        """Where the planes are that are allocated now."""
        return self._memory.planes

    def allocate(self, parts: Mapping[Key, NodeShard]) -> None:
        """Allocates parts of planes. Raises FitError where RAM is too short."""
        self._held.update({key: part.held for key, part in parts.items()})
        wanted = {key: _not_for_dma(part.wanted) for key, part in parts.items()}
        self.ram.allocate(wanted, "planes of this node", no_progress)


def _not_for_dma(wanted: Wanted) -> Wanted:
    """Returns a plane that the ranks, and not this owner of its memory, make known to devices."""
    return Wanted(wanted.nbytes, wanted.kind, is_for_dma=False)


def answer(planes: DevicePlanes, parts: OwnNodeShards, message: ShardMessage) -> ShardReply:
    """Does what rank 0 asks of the shards of this rank or the part of its node, and returns the
    answer.
    """
    match message:
        case AllocateShards(wanted):
            planes.allocate(wanted)
        case AllocateNodeShards(wanted):
            parts.allocate(wanted)
        case ReleaseShards(keys, in_ram):
            place = parts.ram if in_ram else planes
            place.release([key for key in keys if key in place.tensors])
        case ReadShard(key, begin, end, in_ram, into):
            found = (parts.ram if in_ram else planes).read(key, begin, end)
            if into is None:
                return ShardReply(found)
            into.content()[:] = found
        case WriteShard(key, begin, content, in_buffer, in_ram):
            if in_buffer is not None:
                content = in_buffer.content()
            assert content is not None  # whoever asks gives one of them
            (parts.ram if in_ram else planes).write(key, begin, content)
    return ShardReply()

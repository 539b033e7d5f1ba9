"""Planes may be divided among several hosts: the RAM of each has the shards of its own ranks.

A host has addresses for whole planes, but memory for its part alone: the system gives a page only
where somebody touches it. So every rank finds its shard where it would be in a whole plane.

The rank that leads reads and writes these planes by their bytes, as if it had all of them. What
other hosts have passes the network, in pieces that are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from engine.config.settings import Optimizer
from engine.planning.layout.layout import UnitLayout
from engine.planning.schedule.shards import Shards
from engine.progress import Progress
from engine.runtime.host.ram_planes import Key, RamPlanes, Wanted
from engine.runtime.host.sharded_planes import HeldBytes, shard_bytes
from engine.runtime.optimizer.host_threads import Workers

Parts: TypeAlias = tuple[Callable[[int, int], bool] | None, Callable[[int], None] | None, Workers]
MOST_BYTES = 32 << 20
"""Number of bytes that pass between two nodes at a time."""


class NodeShard(NamedTuple):
    """Shard of a plane that one node holds."""

    wanted: Wanted
    """It is the whole plane."""
    held: HeldBytes


class OtherNodes(Protocol):
    """The `OtherNodes` hold parts of planes. Places count from the first byte of the plane."""

    def allocate(self, host: int, parts: Mapping[Key, NodeShard]) -> None:
        """Allocates zeroed parts of planes in the RAM of a host. Raises RankError."""

    def release(self, keys: Iterable[Key]) -> None:
        """Frees planes on all other hosts. Raises RankError."""

    def read(self, host: int, key: Key, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places, uint8 [bytes]. Raises RankError."""

    def write(self, host: int, key: Key, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` on. Raises RankError."""


class Nodes(NamedTuple):
    """Which of several nodes this is."""

    hosts: int
    here: int = 0
    others: OtherNodes | None = None
    """The leader reaches the parts of the other hosts through this."""


class NodeShards:
    """Shards of a plane in the RAM of each of several nodes.

    layouts: those of all units, by name. optimizer: it returns the one whose moments these are.
    ranks: so many hold the shards. hosts: they are on so many, equally many on each.
    """

    def __init__(
        self,
        layouts: Mapping[str, UnitLayout],
        dtype: str,
        optimizer: Callable[[], Optimizer],
        ranks: int,
        hosts: int,
    ):
        if any(layout.high_numel > layout.numel for layout in layouts.values()):
            raise ValueError("frozen weights are divided among no hosts")
        self.hosts = hosts
        self._layouts = layouts
        self._dtype = dtype
        self._optimizer = optimizer
        self._ranks = ranks

    def held(self, key: Key, host: int) -> HeldBytes:
        """Returns which bytes of a plane a host holds."""
        unit, plane = key
        layout, of_host = self._layouts[unit], self._ranks // self.hosts
        start, _ = Shards(self._ranks, host * of_host).bounds(layout.numel)
        _, stop = Shards(self._ranks, (host + 1) * of_host - 1).bounds(layout.numel)
        return shard_bytes(layout, plane, (self._dtype, self._optimizer()), (start, stop))


class NodePlanes(RamPlanes):
    """A `NodePlanes` owns what one host holds of planes. parts: it is made with these, as other
    `RamPlanes` are. held: it returns what the host holds of a plane.
    """

    is_whole = False

    def __init__(self, parts: Parts, held: Callable[[Key], HeldBytes]):
        super().__init__(*parts)
        self._held = held

    def held(self, key: Key, nbytes: int) -> tuple[int, int]:  # noqa: ARG002  as for whole planes
        return self._held(key)


class CrossNodePlanes(NodePlanes):
    """A `CrossNodePlanes` owns what the first host holds, and reaches what the `others` do."""

    def __init__(self, parts: Parts, shares: NodeShards, others: OtherNodes):
        super().__init__(parts, lambda key: shares.held(key, 0))
        self._shares = shares
        self._others = others

    def allocate(self, wanted: Mapping[Key, Wanted], what: str, progress: Progress) -> None:
        hosts = range(1, self._shares.hosts)
        # The hosts touch their memory at the same time.
        with ThreadPoolExecutor(len(hosts)) as threads:
            under_way = [threads.submit(self._allocate_on, host, wanted) for host in hosts]
            super().allocate(wanted, what, progress)
        try:
            for each in under_way:
                each.result()
        except BaseException:
            super().release(wanted)
            raise

    def _allocate_on(self, host: int, wanted: Mapping[Key, Wanted]) -> None:
        parts = {key: NodeShard(each, self._shares.held(key, host)) for key, each in wanted.items()}
        self._others.allocate(host, parts)

    def release(self, keys: Iterable[Key]) -> None:
        gone = list(keys)
        super().release(gone)
        self._others.release(gone)

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        content = np.empty(end - begin, np.uint8)
        for host, first, last in self._pieces(key, begin, end):
            if host == 0:
                found = super().read(key, first, last)
            else:
                found = self._others.read(host, key, first, last)
            content[first - begin : last - begin] = found
        return content

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        for host, first, last in self._pieces(key, begin, begin + content.size):
            part = content[first - begin : last - begin]
            if host == 0:
                super().read(key, first, last)[:] = part
            else:
                self._others.write(host, key, first, part)

    def _pieces(self, key: Key, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the host, and where it begins and ends, of each piece between two places."""
        for host in range(self._shares.hosts):
            first, last = self._shares.held(key, host).within(begin, end)
            for start in range(first, last, MOST_BYTES):
                yield host, start, min(start + MOST_BYTES, last)


def planes_of_node(plain: RamPlanes, shares: NodeShards, hosts: Nodes) -> NodePlanes:
    """Returns the planes of one of several hosts, in the memory and made with the parts of `plain`,
    which has none yet.
    """
    assert not plain.arrays
    found: NodePlanes
    if hosts.others is None:
        found = NodePlanes(plain.parts, lambda key: shares.held(key, hosts.here))
    else:
        found = CrossNodePlanes(plain.parts, shares, hosts.others)
    found.use(plain.memory)
    return found

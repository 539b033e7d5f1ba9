"""Planes may be divided among several nodes: the RAM of each has the shards of its own ranks.

A node has addresses for whole planes, but memory for its part alone: the system gives a page only
where somebody touches it. So every rank finds its shard where it would be in a whole plane.

Rank 0 reads and writes these planes by their bytes, as if it had all of them. What
other nodes have passes the network, in chunks that are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.config.optimizers import Optimizer
from engine.planning.layout.layout import UnitLayout
from engine.planning.schedule.shards import Shards
from engine.progress import Progress
from engine.runtime.host.ram_planes import Key, RamPlanes, Wanted
from engine.runtime.host.sharded_planes import HeldBytes, shard_bytes

MOST_BYTES = 32 << 20
"""Number of bytes that pass between two nodes at a time."""


class NodeShard(NamedTuple):
    """Shard of a plane that one node holds."""

    wanted: Wanted
    """The whole plane."""
    held: HeldBytes


class OtherNodes(Protocol):
    """The `OtherNodes` hold parts of planes. Places count from the first byte of the plane."""

    def allocate(self, node: int, parts: Mapping[Key, NodeShard]) -> None:
        """Allocates zeroed parts of planes in the RAM of a node. Raises RankError."""

    def release(self, keys: Iterable[Key]) -> None:
        """Frees planes on all other nodes. Raises RankError."""

    def read(self, node: int, key: Key, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places, uint8 [bytes]. Raises RankError."""

    def write(self, node: int, key: Key, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` on. Raises RankError."""


class Nodes(NamedTuple):
    """Nodes among which planes in RAM are divided."""

    nodes: int
    ranks: int
    """Number of ranks that hold the shards, as many on each node."""
    here: int = 0
    """Number of this node."""
    others: OtherNodes | None = None
    """Rank 0 reaches the parts of the other nodes through this."""


class NodeShards:
    """Shards of a plane in the RAM of each of several nodes.

    layouts: those of all units, by name. optimizer: returns the one whose moments these are.
    """

    def __init__(
        self,
        layouts: Mapping[str, UnitLayout],
        dtype: str,
        optimizer: Callable[[], Optimizer],
        nodes: Nodes,
    ):
        if any(layout.high_numel > layout.numel for layout in layouts.values()):
            raise ValueError("frozen weights are divided among no nodes")
        self.nodes = nodes.nodes
        self._layouts = layouts
        self._dtype = dtype
        self._optimizer = optimizer
        self._ranks = nodes.ranks

    def held(self, key: Key, node: int) -> HeldBytes:
        """Returns which bytes of a plane a node holds."""
        unit, plane = key
        layout, of_node = self._layouts[unit], self._ranks // self.nodes
        start, _ = Shards(self._ranks, node * of_node).bounds(layout.numel)
        _, stop = Shards(self._ranks, (node + 1) * of_node - 1).bounds(layout.numel)
        return shard_bytes(layout, plane, self._dtype, self._optimizer(), start, stop)


class NodePlanes(RamPlanes):
    """Owns what one node holds of planes. held: returns what the node holds of a plane. The rest is
    as for other `RamPlanes`.
    """

    is_whole = False

    def __init__(self, held: Callable[[Key], HeldBytes], *like_others: Any):
        super().__init__(*like_others)
        self._held = held

    def held(self, key: Key, nbytes: int) -> tuple[int, int]:  # noqa: ARG002  as for whole planes
        return self._held(key)


class CrossNodePlanes(NodePlanes):
    """Owns what the first node holds, and reaches what the `others` do."""

    def __init__(self, shards: NodeShards, others: OtherNodes, *like_others: Any):
        super().__init__(lambda key: shards.held(key, 0), *like_others)
        self._shards = shards
        self._others = others

    def allocate(self, wanted: Mapping[Key, Wanted], what: str, progress: Progress) -> None:
        nodes = range(1, self._shards.nodes)
        # The nodes touch their memory at the same time.
        with ThreadPoolExecutor(len(nodes)) as threads:
            under_way = [threads.submit(self._allocate_on, node, wanted) for node in nodes]
            super().allocate(wanted, what, progress)
        try:
            for each in under_way:
                each.result()
        except BaseException:
            super().release(wanted)
            raise

    def _allocate_on(self, node: int, wanted: Mapping[Key, Wanted]) -> None:
        parts = {key: NodeShard(each, self._shards.held(key, node)) for key, each in wanted.items()}
        self._others.allocate(node, parts)

    def release(self, keys: Iterable[Key]) -> None:
        gone = list(keys)
        super().release(gone)
        self._others.release(gone)

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        content = np.empty(end - begin, np.uint8)
        for node, first, last in self._chunks(key, begin, end):
            if node == 0:
                found = super().read(key, first, last)
            else:
                found = self._others.read(node, key, first, last)
            content[first - begin : last - begin] = found
        return content

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        for node, first, last in self._chunks(key, begin, begin + content.size):
            part = content[first - begin : last - begin]
            if node == 0:
                super().read(key, first, last)[:] = part
            else:
                self._others.write(node, key, first, part)

    def _chunks(self, key: Key, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the node, and where it begins and ends, of each chunk between two places."""
        for node in range(self._shards.nodes):
            first, last = self._shards.held(key, node).within(begin, end)
            for start in range(first, last, MOST_BYTES):
                yield node, start, min(start + MOST_BYTES, last)

"""Units may live on the devices of several ranks. Each device holds the weights of such a unit
whole, since every step needs them, and of its other planes the shard of its rank.

Rank 0 reads and writes these planes by their bytes, as if it had all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from engine.config.optimizers import OPTIMIZERS, Optimizer
from engine.planning.layout.layout import PLANE_ITEM_BYTES, UnitLayout
from engine.planning.schedule.shards import Shards
from engine.runtime.host.device_planes import DevicePlanes, PlaneDevice
from engine.runtime.host.ram_planes import Key, Wanted

WHOLE_PLANE = "weight_high"
"""Plane that each device holds whole."""


class OtherShards(Protocol):
    """The `OtherShards` are what the other ranks hold. Places in their planes count from the first
    byte that the rank holds.
    """

    ranks: int

    def allocate(self, rank: int, wanted: Mapping[Key, Wanted]) -> None:
        """Allocates zeroed planes on the device of a rank. Raises RankError."""

    def release(self, keys: Iterable[Key]) -> None:
        """Lets go of planes on all other devices. Raises RankError."""

    def read(self, rank: int, key: Key, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places, uint8 [bytes]. Raises RankError."""

    def write(self, ranks: Sequence[int], key: Key, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` on, to the planes of some ranks,
        in rising order. Raises RankError.
        """


class HeldBytes(NamedTuple):
    """A rank holds the bytes of a plane from `begin` up to `end`."""

    begin: int
    end: int

    def within(self, begin: int, end: int) -> HeldBytes:
        """Returns those of them that are between two places, of which there may be none."""
        first = max(self.begin, begin)
        return HeldBytes(first, max(first, min(self.end, end)))


def shard_bytes(
    layout: UnitLayout, plane: str, dtype: str, optimizer: Optimizer, start: int, stop: int
) -> HeldBytes:
    """Returns where the elements from `start` up to `stop` are in a plane of a unit, in bytes.
    dtype: that of the model. optimizer: the one whose moments these are.
    """
    if plane in OPTIMIZERS[optimizer].planes:
        if start == stop:
            return HeldBytes(0, 0)
        return HeldBytes(*layout.state_bounds(optimizer, plane, start, stop))
    item = PLANE_ITEM_BYTES[dtype][plane]
    return HeldBytes(start * item, stop * item)


class DeviceShards:
    """Shards of a plane on the devices of several ranks.

    layouts: those of all units, by name. optimizer: returns the one whose moments these are.
    ranks: number of ranks over which the planes are sharded.
    """

    def __init__(
        self,
        layouts: Mapping[str, UnitLayout],
        dtype: str,
        optimizer: Callable[[], Optimizer],
        ranks: int,
    ):
        self._layouts = layouts
        self._dtype = dtype
        self._optimizer = optimizer
        self._ranks = ranks

    def of_rank(self, rank: int, wanted: Mapping[Key, Wanted]) -> dict[Key, Wanted]:
        """Returns what a rank is to hold of planes that are wanted whole."""
        found = {}
        for key, plane in wanted.items():
            begin, end = self.held(key, rank)
            size = end - begin
            if key[1] == WHOLE_PLANE:
                # All shards have the same size, so the last one may reach beyond the plane.
                layout = self._layouts[key[0]]
                numel = Shards(self._ranks).slot_numel(layout.numel, layout.high_numel)
                size = numel * PLANE_ITEM_BYTES[self._dtype][WHOLE_PLANE]
            found[key] = Wanted(size, plane.kind, plane.is_for_dma)
        return found

    def held(self, key: Key, rank: int) -> HeldBytes:
        """Returns which bytes of a plane a rank holds."""
        unit, plane = key
        layout = self._layouts[unit]
        start, stop = Shards(self._ranks, rank).bounds(layout.numel)
        if plane == WHOLE_PLANE:
            start, stop = 0, layout.high_numel
        return shard_bytes(layout, plane, self._dtype, self._optimizer(), start, stop)


class OwnShards(DevicePlanes):
    """Owns what one rank holds of planes. Whoever writes them does so as if they were whole: the
    rank keeps what is its own.
    """

    def __init__(self, device: PlaneDevice, shards: DeviceShards, rank: int):
        super().__init__(device)
        self._shards = shards
        self._rank = rank

    def allocate(self, wanted: Mapping[Key, Wanted]) -> None:
        super().allocate(self._shards.of_rank(self._rank, wanted))

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        held = self._shards.held(key, self._rank)
        first, last = held.within(begin, begin + content.size)
        if first < last:
            super().write(key, first - held.begin, content[first - begin : last - begin])


class ShardedPlanes(DevicePlanes):
    """Owns the planes of rank 0, and reaches those of the `others`."""

    def __init__(self, device: PlaneDevice, shards: DeviceShards, others: OtherShards):
        super().__init__(device)
        self._shards = shards
        self._others = others

    def allocate(self, wanted: Mapping[Key, Wanted]) -> None:
        super().allocate(self._shards.of_rank(0, wanted))
        try:
            for rank in range(1, self._others.ranks):
                self._others.allocate(rank, self._shards.of_rank(rank, wanted))
        except BaseException:
            super().release(wanted)
            raise

    def release(self, keys: Iterable[Key]) -> None:
        gone = list(keys)
        super().release(gone)
        self._others.release(gone)

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        if key[1] == WHOLE_PLANE:
            return super().read(key, begin, end)
        content = np.empty(end - begin, np.uint8)
        for rank in range(self._others.ranks):
            held = self._shards.held(key, rank)
            first, last = held.within(begin, end)
            if first < last:
                place = first - held.begin, last - held.begin
                own = super().read(key, *place) if rank == 0 else None
                found = self._others.read(rank, key, *place) if own is None else own
                content[first - begin : last - begin] = found
        return content

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        if key[1] == WHOLE_PLANE:
            super().write(key, begin, content)
            self._others.write(range(1, self._others.ranks), key, begin, content)
            return
        for rank in range(self._others.ranks):
            held = self._shards.held(key, rank)
            first, last = held.within(begin, begin + content.size)
            part = content[first - begin : last - begin]
            if not part.size:
                continue
            if rank == 0:
                super().write(key, first - held.begin, part)
            else:
                self._others.write([rank], key, first - held.begin, part)

"""A grid of jobs for several GPUs, and the bytes that a plan takes on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.requirements import Needs
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import GradientSum
from engine.runtime.host.ram_planes import Key, Wanted

SETTLED: dict = {"settled_units": 2, "slots": 1}
"""Embed and the first block live on the device."""
HOMES: dict = {"device_homes": ("embed", "block 0", "block 2"), "update_buffers": 2}
GRID = [
    replace(base, **changes)
    for base in (
        PlanChoices(micro_batches=4),
        PlanChoices(micro_batches=4, rounds=2, gradient_sum=GradientSum.DEVICE),
        PlanChoices(micro_batches=4, rounds=2, gradient_sum=GradientSum.SHARDS),
    )
    for changes in (
        {},
        {"slots": 1, "resident_blocks": 1, "kept_blocks": 1},
        {"slots": 5, "host_boundaries": True},
        {"parked_gradients": True},
        {"shared_outer_slot": True},
        SETTLED,
        SETTLED | {"settled_units": 5},
        SETTLED | {"parked_gradients": True, "device_homes": ("head",), "update_buffers": 2},
        HOMES,
        HOMES | {"update_pieces": 3, "update_buffers": 8},
        HOMES | {"parked_gradients": True, "resident_blocks": 2},
    )
]
"""Choices of one rank."""


class NoShards:
    """The devices of the other ranks, of which nothing is read."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def allocate(self, rank: int, wanted: Mapping[Key, Wanted]) -> None:
        assert 0 < rank < self.ranks

    def release(self, keys: Iterable[Key]) -> None:
        pass

    def read(self, rank: int, key: Key, begin: int, end: int) -> np.ndarray:
        return np.zeros(end - begin, np.uint8)

    def write(self, rank: int, key: Key, begin: int, content: np.ndarray) -> None:
        pass


def bytes_of(needs: Needs, part: PartName, kind: MemoryItem) -> int:
    return sum(item.bytes for item in needs.parts[part].items if item.kind == kind)

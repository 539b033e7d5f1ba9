"""A grid of jobs for several GPUs, and the bytes that a plan takes on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.requirements import Requirements
from engine.planning.schedule.choices import EmbedAndHead, PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.runtime.host.ram_planes import Key, Wanted

GPU_RESIDENT: dict = {"gpu_resident_units": 2, "slots": 1}
"""Embed and the first block live on the device."""
DEVICE_UPDATES: dict = {
    "device_updated_units": ("embed", "block 0", "block 2"),
    "update_buffers": 2,
}
GRID = [
    base.changed(**changes)
    for base in (
        PlanChoices().changed(micro_batches=4),
        PlanChoices().changed(micro_batches=4, rounds=2, main_grad=MainGrad.DEVICE),
        PlanChoices().changed(micro_batches=4, rounds=2, main_grad=MainGrad.SHARDS),
    )
    for changes in (
        {},
        {"slots": 1, "blocks_kept_in_slots": 1, "blocks_without_recompute": 1},
        {"slots": 5, "offloaded_block_inputs": True},
        {"gradients_on_gpu": True},
        {"embed_and_head": EmbedAndHead.SHARED_SLOT},
        GPU_RESIDENT,
        GPU_RESIDENT | {"gpu_resident_units": 5},
        GPU_RESIDENT
        | {"gradients_on_gpu": True, "device_updated_units": ("head",), "update_buffers": 2},
        DEVICE_UPDATES,
        DEVICE_UPDATES | {"update_chunks": 3, "update_buffers": 8},
        DEVICE_UPDATES | {"gradients_on_gpu": True, "blocks_kept_in_slots": 2},
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


def bytes_of(requirements: Requirements, part: PartName, kind: MemoryItem) -> int:
    return sum(item.bytes for item in requirements.parts[part].items if item.kind == kind)

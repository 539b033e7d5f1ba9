"""`StateSizes` has the bytes of a model's states: its weights, moments and gradients in RAM, on the
device, on the disk and in checkpoints. No torch.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from engine.config.optimizers import OPTIMIZERS, Optimizer
from engine.config.output_settings import CheckpointKind
from engine.planning.layout.disk_chunks import disk_chunk_count, state_ring_bytes
from engine.planning.layout.layout import (
    FP32_ITEM_BYTES,
    PLANE_ITEM_BYTES,
    checkpoint_planes,
    plane_bytes,
    planes_of,
)
from engine.planning.schedule.shards import Shards
from engine.planning.shape.unit_shape import UnitShape


@dataclass(frozen=True)
class StateSizes:
    """The bytes of the states of a model's units."""

    units: tuple[UnitShape, ...]
    """Units in forward order: embed, blocks, head."""
    dtype: str
    optimizer: Optimizer
    """Optimizer whose states the host keeps."""

    @functools.cached_property
    def item_bytes(self) -> int:
        """Bytes that an element of a weight takes on the device."""
        return PLANE_ITEM_BYTES[self.dtype]["weight_high"]

    def plane_bytes(self, gpu_resident: int = 0, disk_offloaded: int = 0) -> dict[str, int]:
        """Returns the bytes of each plane in host memory: of all units but the first
        `gpu_resident`, which live on the device, without the moments of the last `disk_offloaded`,
        which are on the disk.
        """
        if (gpu_resident, disk_offloaded) not in self._plane_bytes:
            found = {
                plane: sizes_of_first[-1] - sizes_of_first[gpu_resident]
                for plane, sizes_of_first in self._first_plane_bytes.items()
            }
            for plane, sizes_of_last in self.last_state_bytes.items():
                found[plane] -= sizes_of_last[disk_offloaded]
            self._plane_bytes[gpu_resident, disk_offloaded] = found
        return dict(self._plane_bytes[gpu_resident, disk_offloaded])

    def unit_bytes(self, unit: UnitShape) -> dict[str, int]:
        """Returns the bytes of each plane of a unit of this model."""
        counts = unit.state_counts
        return plane_bytes(self.dtype, self.optimizer, counts, unit.weight_numel)

    @functools.cached_property
    def _plane_bytes(self) -> dict[tuple[int, int], dict[str, int]]:
        return {}

    @functools.cached_property
    def _first_plane_bytes(self) -> dict[str, list[int]]:
        """Bytes of each plane of the first n units, for every n, by its name."""
        found = {plane: [0] for plane in planes_of(self.dtype, self.optimizer)}
        for unit in self.units:
            sizes = self.unit_bytes(unit)
            for plane, sums in found.items():
                sums.append(sums[-1] + sizes[plane])
        return found

    @functools.cached_property
    def last_state_bytes(self) -> dict[str, list[int]]:
        """Bytes of each state of the last n units, for every n, by its name."""
        found = {plane: [0] for plane in OPTIMIZERS[self.optimizer].planes}
        for unit in reversed(self.units):
            sizes = unit.state_counts.bytes(self.optimizer)
            for plane, sums in found.items():
                sums.append(sums[-1] + sizes[plane])
        return found

    @functools.cached_property
    def last_disk_chunks(self) -> list[int]:
        """Chunks of the moments of the last n units, for every n."""
        counts = (disk_chunk_count(unit.numel) for unit in reversed(self.units))
        return list(itertools.accumulate(counts, initial=0))

    @functools.cached_property
    def last_state_ring_bytes(self) -> list[int]:
        """Bytes of a ring buffer for chunks of the moments of any of the last n units, for every
        n.
        """
        sizes = (
            state_ring_bytes([unit.state_counts], self.optimizer) for unit in reversed(self.units)
        )
        return list(itertools.accumulate(sizes, max, initial=0))

    @functools.cached_property
    def gpu_resident_bytes(self) -> list[int]:
        """Bytes that the first n units take if they live on the device, for every n: all planes but
        that of gradients, and the weights that stay in fp32.
        """
        found = [0]
        for unit in self.units:
            sizes = self.unit_bytes(unit)
            keep_in_fp32 = unit.fp32_numel * FP32_ITEM_BYTES
            found.append(found[-1] + sum(sizes.values()) - sizes["grad"] + keep_in_fp32)
        return found

    def gpu_resident_bytes_on(self, ranks: int) -> list[int]:
        """Returns `gpu_resident_bytes` for the device of one of several ranks: weights whole, with
        the elements of all shards, and a shard of the rest (`engine.runtime.host.sharded_planes`).
        States that are not in fp32 are estimated by the mean of a unit.
        """
        if ranks == 1:
            return self.gpu_resident_bytes
        if ranks not in self._gpu_resident_bytes_on:
            shards, item = Shards(ranks), self.item_bytes
            found = [0]
            for unit in self.units:
                own = min(unit.numel, shards.numel(unit.numel))
                planes = self.unit_bytes(unit)
                rest = sum(planes.values()) - planes["grad"] - planes["weight_high"]
                shard = -(-rest * own // unit.numel) if unit.numel else 0
                found.append(found[-1] + unit.padded(shards).weight_numel * item + shard)
            self._gpu_resident_bytes_on[ranks] = found
        return self._gpu_resident_bytes_on[ranks]

    @functools.cached_property
    def _gpu_resident_bytes_on(self) -> dict[int, list[int]]:
        return {}

    @functools.cached_property
    def state_item_bytes(self) -> float:
        """Bytes that a parameter that is trained takes over all planes, on average over the
        blocks.
        """
        units = [unit for unit in self.units[1:-1] if unit.numel] or self.units
        numel = sum(unit.numel for unit in units)
        states = sum(sum(unit.state_counts.bytes(self.optimizer).values()) for unit in units)
        return sum(PLANE_ITEM_BYTES[self.dtype].values()) + states / numel

    @property
    def host_bytes(self) -> int:
        """Bytes of all planes in host memory where all units are there."""
        return sum(self.plane_bytes().values())

    def checkpoint_bytes(self, kind: CheckpointKind = "full") -> int:
        """Returns the bytes of a checkpoint of this kind, without weights that are not trained."""
        planes, sizes = checkpoint_planes(self.dtype, self.optimizer, kind), self.plane_bytes()
        sizes["weight_high"] -= self.frozen_bytes
        return sum(size for plane, size in sizes.items() if plane in planes)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights that are not trained."""
        return self.item_bytes * sum(unit.frozen_numel for unit in self.units)

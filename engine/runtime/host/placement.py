"""`PlanePlacement` knows where each plane of host states is: in RAM, on the device or on the disk.
It allocates planes in their places, and moves them from one place to another.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.errors import DiskOffloadError
from engine.planning.layout.layout import PLANE_ITEM_BYTES, UnitLayout, planes_of
from engine.progress import Progress, no_progress
from engine.runtime.host.device_planes import DevicePlanes, PlaneDevice
from engine.runtime.host.disk_planes import DiskPlanes
from engine.runtime.host.ram_planes import Key, RamPlanes, Wanted
from engine.runtime.host.sharded_planes import DeviceShards, OtherShards, ShardedPlanes

DMA_PLANES = ("weight_high", "grad")
"""The device reads or writes these planes by DMA; only they are registered, and weight_low of units
with weights that stay in fp32.
"""
MOVED_BYTES = 64 << 20
"""Bytes that are copied at a time of planes that move to another place."""


class PlanePlacement:
    """Planes of all units. `ram` holds those that are nowhere else."""

    def __init__(
        self,
        layouts: Mapping[str, UnitLayout],
        dtype: str,
        ram: RamPlanes,
        disk: Path | None = None,
        others: OtherShards | None = None,
    ):
        """`disk` is the folder of moments on the disk, and `others` what other ranks hold of
        GPU-resident units.
        """
        self._layouts = layouts
        self._dtype = dtype
        self.ram = ram
        self._on_device: DevicePlanes | None = None
        self._on_disk = None if disk is None else DiskPlanes(disk)
        self._others = others
        self.gpu_resident: frozenset[str] = frozenset()
        """Units whose planes are on the device (GPU-resident)."""
        self.disk_offloaded: frozenset[str] = frozenset()
        """Units whose moments are on the disk."""
        self.optimizer: Optimizer = ADAMW
        """Optimizer whose states the planes hold."""
        self.has_gradients = False
        """Whether units that are not GPU-resident have a plane of gradients."""

    def keep(self, optimizer: Optimizer, gradients: bool) -> None:
        """Says whose moments the planes will hold, and whether there are gradients among them."""
        self.optimizer = optimizer
        self.has_gradients = gradients

    def divide(self, others: OtherShards | None) -> None:
        """Makes other ranks those over whose devices GPU-resident units are sharded, too. others:
        None for one rank. No unit may live on the device.
        """
        assert not self.gpu_resident
        self._others, self._on_device = others, None

    def adopt(self, gpu_resident: Collection[str], planes: DevicePlanes) -> None:
        """Says that `gpu_resident` live on the device already, in `planes`, as far as this rank
        holds them.
        """
        self.gpu_resident, self._on_device = frozenset(gpu_resident), planes

    def offload_to_disk(self, folder: Path) -> None:
        """Makes `folder` the place of moments on the disk, while none are there."""
        if self._on_disk is None or self._on_disk.folder != folder:
            self._on_disk = DiskPlanes(folder)

    @property
    def disk(self) -> DiskPlanes:
        """The moments on the disk. Raises DiskOffloadError where there is no folder for them."""
        if self._on_disk is None:
            raise DiskOffloadError(
                "No folder is given for what goes to the disk; set engine.disk to one."
            )
        return self._on_disk

    @property
    def written_bytes(self) -> tuple[int, int]:
        """Bytes that steps have written to the disk, of moments and of block inputs."""
        if self._on_disk is None:
            return 0, 0
        return self._on_disk.written_bytes, self._on_disk.written_block_input_bytes

    def is_in_ram(self, unit: str, plane: str) -> bool:
        """Returns whether a plane is in this node's RAM as a whole: then its bytes are read and
        changed where they are, and otherwise copied.
        """
        return self.of(unit, plane) is self.ram and self.ram.is_whole

    def of(self, unit: str, plane: str) -> RamPlanes | DevicePlanes | DiskPlanes:
        """Returns the place of a plane."""
        if unit in self.gpu_resident:
            assert self._on_device is not None  # `arrange` made it
            return self._on_device
        return self.disk if unit in self.disk_offloaded and self._is_state(plane) else self.ram

    def tensors(self) -> Mapping[Key, torch.Tensor]:
        """Returns all planes that are allocated in RAM or on the device."""
        if self._on_device is None:
            return self.ram.tensors
        return ChainMap(self.ram.tensors, self._on_device.tensors)

    def has(self, unit: str, plane: str) -> bool:
        """Returns whether a plane is allocated."""
        is_on_disk = self._is_state(plane) and self._on_disk is not None and unit in self._on_disk
        return is_on_disk or (unit, plane) in self.tensors()

    def nbytes(self, unit: str, plane: str) -> int:
        """Returns the bytes of a plane."""
        return self._layouts[unit].plane_bytes(self._dtype, self.optimizer)[plane]

    @property
    def device_bytes(self) -> int:
        """Bytes of the planes on the device."""
        return 0 if self._on_device is None else self._on_device.nbytes

    def allocate(
        self, units: Iterable[str], planes: Collection[str], what: str, progress: Progress
    ) -> None:
        """Allocates planes of some units, each in its place: all of them or none. Those of
        gradients of units that live on the device are left out.
        """
        on_device: list[Key] = []
        in_ram: list[Key] = []
        disk_offloaded: dict[str, UnitLayout] = {}
        for unit in units:
            for plane in planes:
                match self.of(unit, plane):
                    case DevicePlanes():
                        on_device += [(unit, plane)] if plane != "grad" else []
                    case DiskPlanes():
                        disk_offloaded[unit] = self._layouts[unit]
                    case RamPlanes():
                        in_ram.append((unit, plane))
        with contextlib.ExitStack() as undo:
            if on_device:
                assert self._on_device is not None  # these planes belong there
                self._on_device.allocate(self._wanted(on_device))
                undo.callback(self._on_device.release, on_device)
            if disk_offloaded:
                self.disk.allocate(disk_offloaded.values(), self.optimizer)
                undo.callback(self.disk.release, list(disk_offloaded))
            if in_ram:
                self.ram.allocate(self._wanted(in_ram), what, progress)
            undo.pop_all()

    def release(self, planes: Collection[str]) -> None:
        """Frees these planes of all units. No op may be running on them."""
        self._release([(unit, plane) for unit in self._layouts for plane in planes])

    def arrange(
        self,
        gpu_resident: Collection[str],
        device: PlaneDevice,
        disk_offloaded: Collection[str] = (),
    ) -> None:
        """Makes `gpu_resident`, and no other units, live on `device`, and keeps the moments of
        `disk_offloaded`, and of no others, on the disk. Planes that are allocated already move with
        what they hold; no op may be running on them. Raises FitError where host memory is short,
        DiskOffloadError where the disk is, and torch.OutOfMemoryError where the memory of the
        device is.
        """
        if self._on_device is None:
            self._on_device = self._planes_on(device)
        there, on_disk = frozenset(gpu_resident), frozenset(disk_offloaded)
        # Those that leave a place make room for those that come.
        for unit in sorted(on_disk - self.disk_offloaded - self.gpu_resident):
            self._move(unit, self.gpu_resident, self.disk_offloaded | {unit})
        for unit in self.gpu_resident - there:
            self._move(unit, self.gpu_resident - {unit}, self.disk_offloaded | ({unit} & on_disk))
        for unit in sorted(there - self.gpu_resident):
            self._move(unit, self.gpu_resident | {unit}, self.disk_offloaded - {unit})
        for unit in self.disk_offloaded - on_disk:
            self._move(unit, self.gpu_resident, self.disk_offloaded - {unit})

    # ------------------------------------------------------------------ inside

    def _planes_on(self, device: PlaneDevice) -> DevicePlanes:
        """Returns the planes on a device, of which there are none yet."""
        if self._others is None:
            return DevicePlanes(device)
        shards = DeviceShards(
            self._layouts, self._dtype, lambda: self.optimizer, self._others.ranks
        )
        return ShardedPlanes(device, shards, self._others)

    def _move(
        self, unit: str, gpu_resident: frozenset[str], disk_offloaded: frozenset[str]
    ) -> None:
        """Moves the planes of a unit to where they belong once these units live on the device and
        the moments of those are on the disk.
        """
        before = self.gpu_resident, self.disk_offloaded
        planes = planes_of(self._dtype, self.optimizer)
        names = [plane for plane in planes if self.has(unit, plane)]
        old = {plane: self.of(unit, plane) for plane in names}
        self.gpu_resident, self.disk_offloaded = gpu_resident, disk_offloaded
        moved = [plane for plane in names if old[plane] is not self.of(unit, plane)]
        kept = [plane for plane in moved if plane != "grad"]
        has_states = any(map(self._is_state, names))
        # A unit that lives on the device has no plane of gradients.
        new = ["grad"] if has_states and self.has_gradients and "grad" not in names else []
        try:
            self.allocate([unit], [*kept, *new], "planes that move to RAM", no_progress)
            for plane in kept:
                self._copy((unit, plane), old[plane])
        except BaseException:
            # What was copied so far is no plane. The old ones are whole, and count.
            self._release([(unit, plane) for plane in [*kept, *new]])
            self.gpu_resident, self.disk_offloaded = before
            raise
        for plane in moved:
            _release_in(old[plane], unit, plane)

    def _copy(self, key: Key, old: RamPlanes | DevicePlanes | DiskPlanes) -> None:
        """Copies a plane from its old place to the one where it belongs."""
        place, size = self.of(*key), self.nbytes(*key)
        for begin in range(0, size, MOVED_BYTES):
            content = old.read(key, begin, min(begin + MOVED_BYTES, size))
            place.write(key, begin, content)

    def _release(self, keys: Iterable[Key]) -> None:
        for unit, plane in keys:
            if self.has(unit, plane):
                _release_in(self.of(unit, plane), unit, plane)

    def _is_state(self, plane: str) -> bool:
        """Returns whether a plane holds a state of the optimizer."""
        return plane in OPTIMIZERS[self.optimizer].planes

    def _wanted(self, keys: Iterable[Key]) -> dict[Key, Wanted]:
        wanted: dict[Key, Wanted] = {}
        for unit, plane in keys:
            is_for_dma = plane in DMA_PLANES
            if plane == "weight_low" and self._layouts[unit].fp32_numel > 0:
                is_for_dma = True
            size = self.nbytes(unit, plane)
            wanted[unit, plane] = Wanted(size, self._numpy_type(plane), is_for_dma)
        return wanted

    def _numpy_type(self, plane: str) -> type[np.generic]:
        if self._is_state(plane):
            return np.uint8 if OPTIMIZERS[self.optimizer].is_rounded else np.float32
        if PLANE_ITEM_BYTES[self._dtype][plane] == 4:
            return np.float32
        if plane == "weight_low":
            return np.int16
        return np.uint16


def _release_in(place: RamPlanes | DevicePlanes | DiskPlanes, unit: str, plane: str) -> None:
    """Frees a plane. On the disk, a unit has one file for all states."""
    if not isinstance(place, DiskPlanes):
        place.release([(unit, plane)])
    elif unit in place:
        place.release([unit])

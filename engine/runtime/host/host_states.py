"""`HostStates` keeps the planes of every unit in host memory: exactly as many bytes as
`engine.planning.layout.layout` says (law 5).

A plane is a flat array with one value for every parameter of a unit. In the mode `bfloat16` a
parameter takes 14 bytes:

- `weight_high` (bf16, 2 bytes) is the fp32 master rounded to bf16. The device computes with it.
- `weight_low` (int16, 2 bytes) is the remainder of that rounding: the bits of the master are
  ``(high << 16) + low``. So the master is kept exactly, in no more memory than fp32.
- `exp_avg` and `exp_avg_sq` (fp32, 4 bytes each) are the moments of AdamW. Where they are rounded,
  they are rows of bytes (`engine.planning.layout.optimizer_states`).
- `grad` (bf16, 2 bytes) is the gradient from the device, where torch's `copy_` rounded it from
  fp32, with ties to even.

`engine.runtime.host.parameters` splits and joins masters. In `float32` a parameter takes 16 bytes:
`weight_high` holds the weight, `grad` is fp32, no `weight_low` is there.

Parameters that are not trained are in `weight_high` alone, rounded once, with ties to even.
Units that live on the device have their planes there (`device_planes`), and none of gradients.
Other moments may be on the disk (`disk_planes`). The rest is in host memory (`ram_planes`), perhaps
of several nodes (`cross_node_planes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engine.config.optimizers import ADAMW, Optimizer
from engine.planning.layout.layout import WEIGHT_PLANES, UnitLayout, planes_of
from engine.progress import Progress, no_progress
from engine.runtime.host.cross_node_planes import CrossNodePlanes, NodePlanes, Nodes, NodeShards
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.parameters import Parameters
from engine.runtime.host.placement import PlanePlacement
from engine.runtime.host.plane_version import PlaneVersion
from engine.runtime.host.ram_planes import PlaneMemory, PrivateMemory, RamPlanes
from engine.runtime.host.sharded_planes import OtherShards, OwnShards
from engine.runtime.optimizer.host_threads import Workers


@dataclass(frozen=True)
class Sharing:
    """Who else holds or changes planes. By default nobody does."""

    memory: PlaneMemory = field(default_factory=PrivateMemory)
    """Source of the planes' memory, which other processes of this node may share."""
    nodes: Nodes | None = None
    """Nodes among which planes in RAM are divided; None where they are whole."""
    others: OtherShards | None = None
    """What other ranks hold of GPU-resident units; None for one rank."""
    version: PlaneVersion = field(default_factory=PlaneVersion)
    """Where the ranks agree on which step's state the planes hold."""


@dataclass(frozen=True)
class OpenedPlanes:
    """Planes that another process has allocated, or has this one allocate."""

    optimizer: Optimizer
    """Optimizer whose moments there are."""
    has_gradients: bool
    gpu_resident: Collection[str]
    on_device: DevicePlanes
    """Planes of these units on this rank's device. Rank 0 allocates and frees them, unless they are
    `OwnShards`, on a node that it does not reach: then this process does.
    """


class HostStates:
    """Owns flat planes by unit: ``weight_high``, ``weight_low`` (`bfloat16` only), ``exp_avg``,
    ``exp_avg_sq`` and ``grad``.

    `register(address, bytes)` and `unregister(address)` register memory with the device for DMA,
    and undo that; they are None without a device. `register` returns False where that is refused.
    This many `threads` touch and convert memory (by default all cores but two). `disk` is the
    folder of moments on the disk.

    With `opened`, these planes are there from the beginning. Otherwise nothing is allocated until
    `allocate_weights`, and, since moments are needed only after the weights are loaded and the plan
    has chosen their optimizer, `allocate_states`. Memory is zeroed at first, and forked children do
    not inherit it.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        dtype: Literal["bfloat16", "float32"],
        register: Callable[[int, int], bool] | None = None,
        unregister: Callable[[int], None] | None = None,
        threads: int | None = None,
        *,
        disk: Path | None = None,
        sharing: Sharing | None = None,
        opened: OpenedPlanes | None = None,
    ):
        sharing = sharing or Sharing()
        self.layouts = {layout.unit: layout for layout in layouts}
        self.dtype = dtype
        self._workers = Workers(threads, "host-states")
        self.ram = self._planes_in_ram(sharing, register, unregister)
        """Planes in host memory."""
        self.placement = PlanePlacement(self.layouts, dtype, self.ram, disk, sharing.others)
        """Where each plane is."""
        self.parameters = Parameters(self.layouts, dtype, self.placement, self._workers)
        """Weights as tensors, parameter by parameter."""
        self.held = sharing.version
        """Which optimizer step's state the planes hold."""
        self._has_states = False
        self._is_device_lent = False
        """The planes on the device belong to rank 0."""
        if opened is not None:
            self._open(opened)

    def _planes_in_ram(
        self,
        sharing: Sharing,
        register: Callable[[int, int], bool] | None,
        unregister: Callable[[int], None] | None,
    ) -> RamPlanes:
        like_others = register, unregister, self._workers, sharing.memory
        nodes = sharing.nodes
        if nodes is None:
            return RamPlanes(*like_others)
        shards = NodeShards(self.layouts, self.dtype, lambda: self.optimizer, nodes)
        if nodes.others is not None:
            return CrossNodePlanes(shards, nodes.others, *like_others)
        return NodePlanes(lambda key: shards.held(key, nodes.here), *like_others)

    def _open(self, opened: OpenedPlanes) -> None:
        """Opens planes where they are, or allocates them there."""
        self._is_device_lent = not isinstance(opened.on_device, OwnShards)
        self.placement.keep(opened.optimizer, opened.has_gradients)
        self.placement.adopt(opened.gpu_resident, opened.on_device)
        names = [plane for plane in self.planes if plane != "grad" or opened.has_gradients]
        there = opened.gpu_resident if self._is_device_lent else ()
        units = [unit for unit in self.layouts if unit not in there]
        self.placement.allocate(units, names, "planes", no_progress)
        self._has_states = True

    def use_ranks(self, others: OtherShards | None, version: PlaneVersion) -> None:
        """Makes other ranks those that change the planes, which are allocated already. No unit may
        live on the device, and no step may be under way.
        """
        self.placement.divide(others)
        self.held = version

    # ------------------------------------------------------------------ memory

    @property
    def planes(self) -> tuple[str, ...]:
        """The names of the planes that each unit has in this dtype with this optimizer."""
        return planes_of(self.dtype, self.optimizer)

    def allocate_weights(self, progress: Progress = no_progress) -> None:
        """Allocates, touches and registers the weight planes. `progress` is called with bytes after
        each plane; an exception from it undoes the allocation. Raises FitError when there is not
        enough memory.
        """
        weights = [plane for plane in self.planes if plane in WEIGHT_PLANES]
        self._allocate(weights, "weights", progress)

    def allocate_states(
        self,
        progress: Progress = no_progress,
        optimizer: Optimizer = ADAMW,
        gradients: bool = True,
    ) -> None:
        """Allocates, touches and registers the planes of gradients and of the moments of
        `optimizer`, as `allocate_weights` does for weights. Without `gradients`, which is for plans
        that keep them on the device, there is no plane for them.
        """
        self.placement.keep(optimizer, gradients)
        states = [plane for plane in self.planes if plane not in WEIGHT_PLANES]
        if not gradients:
            states.remove("grad")
        self._allocate(states, "optimizer states", progress)
        self._has_states = True

    def _allocate(self, planes: Collection[str], what: str, progress: Progress) -> None:
        """Allocates these planes of all units."""
        if any(self.placement.has(unit, plane) for unit in self.layouts for plane in planes):
            raise RuntimeError(f"the {what} are allocated already")
        self.placement.allocate(self.layouts, planes, what, progress)

    def release_states(self) -> None:
        """Frees what `allocate_states` allocated. No op may be running on it."""
        self._has_states = False
        self.placement.release([plane for plane in self.planes if plane not in WEIGHT_PLANES])

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose states these are."""
        return self.placement.optimizer

    @property
    def allocated(self) -> tuple[Optimizer, bool] | None:
        """The optimizer whose moments are allocated, and whether planes of gradients are; None
        where none are.
        """
        return (self.optimizer, self.placement.has_gradients) if self._has_states else None

    def close(self) -> None:
        """Unregisters and releases all memory at once, and lets go of planes that another process
        owns. Views that still exist read zeros from now on. No op may be running on the planes.
        """
        if self._is_device_lent:
            self.ram.release(list(self.ram.arrays))
        else:
            self.placement.release(self.planes)
        self._workers.close()

    # ------------------------------------------------------------------ contents of planes

    def array(self, unit: str, plane: str) -> np.ndarray:
        """Returns a whole plane in host memory, flat, shape [numel], sharing memory. Planes of bf16
        are uint16, weight_low is int16, planes of fp32 are float32. Moments that are not all in
        fp32 are uint8 [bytes].
        """
        return self.ram.arrays[unit, plane]

    def tensor(self, unit: str, plane: str) -> torch.Tensor:
        """Returns a whole plane, flat, shape [numel], sharing memory: bfloat16, int16 (weight_low)
        or float32. Moments that are not all in fp32 are uint8 [bytes]. The tensor is on the device
        if the unit lives there. Raises KeyError for moments on the disk.
        """
        return self.placement.tensors()[unit, plane]

    def content(self, unit: str, plane: str, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places of a plane, uint8 [bytes]: its own memory, or a copy
        if it is not in RAM.
        """
        return self.placement.of(unit, plane).read((unit, plane), begin, end)

    def put(self, unit: str, plane: str, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` of a plane on."""
        self.placement.of(unit, plane).write((unit, plane), begin, content)

    def nbytes(self, unit: str, plane: str) -> int:
        """Returns the bytes of a plane."""
        return self.placement.nbytes(unit, plane)

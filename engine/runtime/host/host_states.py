"""`HostStates` keeps the planes of every unit in host memory: exactly as many bytes as
`engine.planning.layout.layout` says (law 5).

A plane is a flat array with one value for every parameter of a unit. In the mode `bfloat16` a
parameter takes 14 bytes:

- `weight_high` (bf16, 2 bytes) is the fp32 master rounded to bf16. The device computes with it.
- `weight_low` (int16, 2 bytes) is the remainder of that rounding: the bits of the master are
  ``(high << 16) + low``. So the master is kept exactly, in no more memory than fp32.
- `exp_avg` and `exp_avg_sq` (fp32, 4 bytes each) are the moments of AdamW. With other optimizers
  they are rows of bytes (`engine.planning.layout.moments`).
- `grad` (bf16, 2 bytes) is the gradient from the device, where torch's `copy_` rounded it from
  fp32, with ties to even.

The split of a weight rounds ties away from zero: the remainder is then -32,768, which int16 holds.
`engine.runtime.optimizer.host_kernels` says what becomes of NaNs and the largest values. In
`float32` a parameter takes 16 bytes: `weight_high` holds the weight, `grad` is fp32, no
`weight_low` is there.

Parameters that are not trained are in `weight_high` alone, rounded once, with ties to even.
Units that live on the device have their planes there (`device_planes`), and none of gradients.
Other moments may be on the disk (`disk_planes`). The rest is in host memory (`ram_planes`), perhaps
of several nodes (`cross_node_planes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engine.config.settings import Optimizer
from engine.errors import ModelError
from engine.planning.layout.layout import PLANE_ITEM_BYTES, WEIGHT_PLANES, ParameterSpec, UnitLayout
from engine.planning.layout.moments import FP32_MOMENTS
from engine.planning.layout.update_buffers import UpdateBuffer
from engine.planning.schedule.buffers import EMBED, HEAD
from engine.planning.schedule.shards import WHOLE, Shards, largest_updated
from engine.progress import Progress, no_progress
from engine.runtime.host.cross_node_planes import Nodes, NodeShards, planes_of_node
from engine.runtime.host.device_planes import DevicePlanes, PlaneDevice
from engine.runtime.host.disk_planes import DiskPlanes
from engine.runtime.host.placement import PlanePlacement
from engine.runtime.host.plane_version import PlaneVersion
from engine.runtime.host.ram_planes import Key, PlaneMemory, RamPlanes
from engine.runtime.host.sharded_planes import OtherShards, OwnShards
from engine.runtime.optimizer.fp32_chunks import fp32_chunks
from engine.runtime.optimizer.host_kernels import kernel
from engine.runtime.optimizer.host_threads import Workers, ranges
from engine.runtime.optimizer.moment_conversion import Bytes, convert_moments


class HostStates:
    """Owns flat planes by unit: ``weight_high``, ``weight_low`` (`bfloat16` only), ``exp_avg``,
    ``exp_avg_sq`` and ``grad``.

    `register(address, bytes)` and `unregister(address)` register memory with the device for DMA,
    and undo that; they are None without a device. `register` returns False where that is refused.
    Nothing is allocated until `allocate_weights` and `allocate_states`. Memory is zeroed at first,
    and forked children do not inherit it. This many `threads` touch and convert memory (by default
    all cores but two).
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        dtype: Literal["bfloat16", "float32"],
        register: Callable[[int, int], bool] | None = None,
        unregister: Callable[[int], None] | None = None,
        threads: int | None = None,
    ):
        self.layouts = {layout.unit: layout for layout in layouts}
        self.dtype = dtype
        self._workers = Workers(threads, "host-states")
        self._ram = RamPlanes(register, unregister, self._workers)
        self._where = PlanePlacement(self.layouts, dtype, self._ram)
        self._has_states = False
        self._places: dict[Key, tuple[int, ParameterSpec]] = {}
        for layout in layouts:
            for spec, offset in zip(layout.parameters, layout.offsets):
                self._places[layout.unit, spec.name] = (offset, spec)
        self.held = PlaneVersion()
        """Which optimizer step's state the planes hold."""

    # ------------------------------------------------------------------ memory

    @property
    def planes(self) -> tuple[str, ...]:
        """The names of the planes that each unit has in this dtype."""
        return tuple(PLANE_ITEM_BYTES[self.dtype])

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
        optimizer: Optimizer = FP32_MOMENTS,
        gradients: bool = True,
    ) -> None:
        """Allocates, touches and registers the planes of gradients and of the moments of
        `optimizer`, as `allocate_weights` does for weights. Without `gradients`, which is for plans
        that keep them on the device, there is no plane for them.
        """
        self._where.keep(optimizer, gradients)
        states = [plane for plane in self.planes if plane not in WEIGHT_PLANES]
        if not gradients:
            states.remove("grad")
        self._allocate(states, "optimizer states", progress)
        self._has_states = True

    def _allocate(self, planes: Collection[str], what: str, progress: Progress) -> None:
        """Allocates these planes of all units."""
        if any(self._where.has(unit, plane) for unit in self.layouts for plane in planes):
            raise RuntimeError(f"the {what} are allocated already")
        self._where.allocate(self.layouts, planes, what, progress)

    def open_planes(
        self,
        memory: PlaneMemory,
        kinds: tuple[Optimizer, bool],
        gpu_resident: Collection[str],
        on_device: DevicePlanes,
    ) -> None:
        """Opens planes that another process has allocated in `memory`, or allocates them there, and
        takes over those of `gpu_resident` from the device. On a node that rank 0 does not
        reach, they are allocated there. kinds: the optimizer whose moments there are, and whether
        planes of gradients are.
        """
        self._ram.use(memory)
        self._where.keep(*kinds)
        self._where.adopt(gpu_resident, on_device)
        names = [plane for plane in self.planes if plane != "grad" or kinds[1]]
        is_there = not isinstance(on_device, OwnShards)
        units = [unit for unit in self.layouts if unit not in self.gpu_resident or not is_there]
        self._where.allocate(units, names, "planes", no_progress)
        self._has_states = True

    def release_states(self) -> None:
        """Frees what `allocate_states` allocated. No op may be running on it."""
        self._has_states = False
        self._where.release([plane for plane in self.planes if plane not in WEIGHT_PLANES])

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose moments these are (`allocate_states`)."""
        return self._where.optimizer

    @property
    def gpu_resident(self) -> frozenset[str]:
        """Units that live on the device (GPU-resident)."""
        return self._where.gpu_resident

    @property
    def disk_offloaded(self) -> frozenset[str]:
        """Units whose moments are on the disk."""
        return self._where.disk_offloaded

    @property
    def disk(self) -> DiskPlanes:
        """The moments on the disk. Raises DiskOffloadError where there is no folder for them."""
        return self._where.disk

    @property
    def written_bytes(self) -> tuple[int, int]:
        """Bytes that steps have written to the disk, of moments and of block inputs."""
        if not self._where.has_disk:
            return 0, 0
        return self.disk.written_bytes, self.disk.written_block_input_bytes

    def share(self, memory: PlaneMemory) -> None:
        """Takes the memory of planes from `memory`, which other processes share, before anything is
        allocated.
        """
        self._ram.use(memory)

    def divide(self, others: OtherShards | None) -> None:
        """Declares that GPU-resident units are sharded over the devices of other ranks, too.
        others: None for one rank. No unit may live on the device yet.
        """
        self._where.divide(others)

    def shard_over_nodes(self, ranks: int, nodes: Nodes) -> None:
        """Says that planes in RAM are divided among `nodes`, whose `ranks` together own all shards,
        before anything is allocated.
        """
        shards = NodeShards(self.layouts, self.dtype, lambda: self.optimizer, ranks, nodes.nodes)
        self._ram = planes_of_node(self._ram, shards, nodes)
        self._where.keep_in(self._ram)

    def use_version(self, held: PlaneVersion) -> None:
        """Makes `held` say which step's state the planes hold. No step may be under way."""
        self.held = held

    def offload_to_disk(self, folder: Path) -> None:
        """Makes `folder` the place of moments on the disk, before `place_units` has any there."""
        self._where.offload_to_disk(folder)

    def place_units(
        self, units: Collection[str], device: PlaneDevice, disk_offloaded: Collection[str] = ()
    ) -> None:
        """Makes `units`, and no others, live on `device`, and keeps the moments of
        `disk_offloaded`, and of no others, on the disk. Planes that are allocated already move with
        what they hold; no op may be running on them. Raises FitError where host memory is short,
        DiskOffloadError where the
        disk is, and torch.OutOfMemoryError where the memory of the device is.
        """
        self._where.arrange(units, disk_offloaded, device)

    def update_buffer(self, chunks: int, shards: Shards = WHOLE) -> UpdateBuffer:
        """Returns the sizes of a buffer in which the device updates a chunk of a unit. chunks:
        number of them in the largest shard of a block.
        """
        units = [layout.moment_counts for layout in self.layouts.values()]
        largest = shards.numel(self.largest_block)
        return UpdateBuffer.of(self.dtype, self.optimizer, units, largest, chunks)

    @property
    def largest_block(self) -> int:
        """Elements of the largest block, by which chunks are measured."""
        numel = {unit: layout.numel for unit, layout in self.layouts.items()}
        embed_and_head = [numel.pop(unit) for unit in (EMBED, HEAD) if unit in numel]
        return largest_updated(numel.values(), embed_and_head)

    @property
    def allocated(self) -> tuple[Optimizer, bool] | None:
        """The optimizer whose moments are allocated, and whether planes of gradients are; None
        before `allocate_states`.
        """
        return (self.optimizer, self._where.has_gradients) if self._has_states else None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the planes in host memory."""
        return self._ram.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the planes on the device."""
        return self._where.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the planes that are registered for DMA."""
        return self._ram.pinned_bytes

    @property
    def refused_bytes(self) -> int:
        """Bytes of planes that the system refused to register; their copies are slower."""
        return self._ram.refused_bytes

    def register_states(self, units: Iterable[str]) -> None:
        """Makes all planes of `units`, whose optimizer runs on the device, known to the device for
        DMA.
        """
        for unit in units:
            for plane in self.planes:
                if (unit, plane) in self._ram.arrays:  # kept gradients have no plane
                    self._ram.register((unit, plane))

    def close(self) -> None:
        """Unregisters and releases all memory at once. Views that still exist read zeros from now
        on. No op may be running on the planes.
        """
        self._where.release(self.planes)
        self._workers.close()

    def close_planes_in_ram(self) -> None:
        """Lets go of planes that another process owns, as `close` does. Those on the device stay
        where they are.
        """
        self._ram.release(list(self._ram.arrays))
        self._workers.close()

    # ------------------------------------------------------------------ planes and parameters

    def array(self, unit: str, plane: str) -> np.ndarray:
        """Returns a whole plane in host memory, flat, shape [numel], sharing memory. Planes of bf16
        are uint16, weight_low is int16, planes of fp32 are float32. Moments that are not all in
        fp32 are uint8 [bytes].
        """
        return self._ram.arrays[unit, plane]

    def tensor(self, unit: str, plane: str) -> torch.Tensor:
        """Returns a whole plane, flat, shape [numel], sharing memory: bfloat16, int16 (weight_low)
        or float32. Moments that are not all in fp32 are uint8 [bytes]. The tensor is on the device
        if the unit lives there. Raises KeyError for moments on the disk.
        """
        return self._where.tensors()[unit, plane]

    def content(self, unit: str, plane: str, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places of a plane, uint8 [bytes]: its own memory, or a copy
        if it is not in RAM.
        """
        return self._where.of(unit, plane).read((unit, plane), begin, end)

    def put(self, unit: str, plane: str, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` of a plane on."""
        self._where.of(unit, plane).write((unit, plane), begin, content)

    def is_in_ram(self, unit: str, plane: str) -> bool:
        """Returns whether the memory that `content` returns is the plane's own."""
        return self._where.of(unit, plane) is self._ram and self._ram.is_whole

    def nbytes(self, unit: str, plane: str) -> int:
        """Returns the bytes of a plane."""
        return self._where.nbytes(unit, plane)

    def weight(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, in host memory: a view of
        the plane, or a copy if it is not whole in this node's RAM.
        """
        view, place = self.view(unit, name), self._where.of(unit, "weight_high")
        if isinstance(place, DevicePlanes):
            return place.on_host(view)
        if self.is_in_ram(unit, "weight_high"):
            return view
        begin = int(view.storage_offset()) * view.itemsize
        content = self.content(unit, "weight_high", begin, begin + view.numel() * view.itemsize)
        return torch.from_numpy(content).view(view.dtype).view(view.shape)

    def view(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, sharing memory."""
        offset, spec = self._places[unit, name]
        return self.tensor(unit, "weight_high")[offset : offset + spec.numel].view(spec.shape)

    def write(
        self, unit: str, name: str, tensor: torch.Tensor, buffer: torch.Tensor | None = None
    ) -> None:
        """Sets a parameter from a float tensor of its shape, on any device. Who writes many tensors
        gives them one `buffer` for chunks (`engine.runtime.optimizer.fp32_chunks`).

        Values of fp32 are kept exactly in both modes, except for the two kinds that
        `engine.runtime.optimizer.host_kernels` names; fp64 is rounded to fp32. A NaN or an infinity
        is also one in weight_high, where a sum over the plane reveals it. Raises ModelError for a
        wrong shape or type: not float, or in 8 bits without scales.
        """
        offset, spec = self._places[unit, name]
        if tuple(tensor.shape) != spec.shape:
            raise ModelError(
                f"{spec.full_name} has the shape {tuple(tensor.shape)} in the weights but "
                f"{spec.shape} in the model; use the configuration that belongs to these weights."
            )
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(
                f"{spec.full_name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which "
                "is no floating-point type of 16 bits or more; use weights that are not quantized."
            )
        source = tensor.detach()
        if self._is_high_only(unit, offset):
            self._put_high(unit, offset, source, buffer)
        elif not self.is_in_ram(unit, "weight_high"):
            self._put(unit, offset, source, buffer)
        elif self.dtype == "float32":
            self.view(unit, name).copy_(source)
        elif source.dtype == torch.bfloat16:
            # A bf16 value needs no rounding, so its remainder in weight_low is 0.
            self.view(unit, name).copy_(source)
            self.tensor(unit, "weight_low")[offset : offset + spec.numel].zero_()
        else:
            for chunk in fp32_chunks(source, buffer):
                self._split(unit, chunk.numpy(), offset)
                offset += chunk.numel()

    def _is_high_only(self, unit: str, offset: int) -> bool:
        """Returns whether the element `offset` of a unit is in the plane weight_high alone."""
        return offset >= self.layouts[unit].numel

    def _put_high(
        self, unit: str, offset: int, source: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        """Sets weights that are not trained, from an element on. Torch rounds ties to even."""
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        for chunk in fp32_chunks(source, buffer):
            content = chunk.to(dtype).view(torch.uint8).numpy()
            self.put(unit, "weight_high", offset * dtype.itemsize, content)
            offset += chunk.numel()

    def _put(
        self, unit: str, offset: int, source: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        """Sets the weights of a unit that lives on the device, or is on several nodes, from element
        `offset` on.
        """
        for chunk in fp32_chunks(source, buffer):
            values = chunk.numpy()
            if self.dtype == "float32":
                self.put(unit, "weight_high", 4 * offset, values.view(np.uint8))
            else:
                high, low = np.empty(values.size, np.uint16), np.empty(values.size, np.int16)
                self._split_into(values, high, low)
                self.put(unit, "weight_high", 2 * offset, high.view(np.uint8))
                self.put(unit, "weight_low", 2 * offset, low.view(np.uint8))
            offset += values.size

    def _split(self, unit: str, values: np.ndarray, offset: int) -> None:
        """Splits fp32 `values` [n] into the weight planes of `unit`, from element `offset` on."""
        here = slice(offset, offset + values.size)
        high, low = self.array(unit, "weight_high"), self.array(unit, "weight_low")
        self._split_into(values, high[here], low[here])

    def _split_into(self, values: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
        split = kernel("split")

        def split_range(start: int, stop: int) -> None:
            split(values[start:stop], high[start:stop], low[start:stop])

        self._workers.run(split_range, ranges(0, values.size))

    def take_moments(self, unit: str, plane: str, read: Bytes, optimizer: Optimizer) -> None:
        """Sets a plane of moments from that of another optimizer, whose bytes `read` returns
        (`engine.runtime.optimizer.moment_conversion`).
        """
        here = self.content(unit, plane, 0, self.nbytes(unit, plane))
        convert_moments(self.layouts[unit], plane, (read, optimizer), (here, self.optimizer))
        if not self.is_in_ram(unit, plane):
            self.put(unit, plane, 0, here)

    def master(self, unit: str, name: str) -> torch.Tensor:
        """Returns a copy of a parameter's fp32 master in the parameter's own shape. That of a
        parameter that is not trained is its value in weight_high.
        """
        offset, spec = self._places[unit, name]
        if self.dtype == "float32" or self._is_high_only(unit, offset):
            return self.weight(unit, name).to(torch.float32, copy=True)
        result = torch.empty(spec.shape, dtype=torch.float32)
        begin, end = 2 * offset, 2 * (offset + spec.numel)
        high = self.content(unit, "weight_high", begin, end).view(np.uint16)
        low = self.content(unit, "weight_low", begin, end).view(np.int16)
        target = result.view(-1).numpy()
        join = kernel("join")

        def join_range(start: int, stop: int) -> None:
            join(high[start:stop], low[start:stop], target[start:stop])

        self._workers.run(join_range, ranges(0, spec.numel))
        return result

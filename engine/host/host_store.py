"""`HostStore` keeps the planes of every unit in host memory: exactly as many bytes as
`engine.planes.layout` says (law 5).

A plane is a flat array with one value for every parameter of a unit. In the mode `bfloat16` a
parameter takes 14 bytes, in five planes:

- `weight_high` (bf16, 2 bytes) is the fp32 master rounded to bf16. The device computes with it.
- `weight_low` (int16, 2 bytes) is the remainder of that rounding: the bits of the master are
  ``(high << 16) + low``. So the master is kept exactly, in no more memory than fp32.
- `exp_avg` and `exp_avg_sq` (fp32, 4 bytes each) are the moments of AdamW.
- `grad` (bf16, 2 bytes) is the gradient from the device, where torch's `copy_` rounded it from
  fp32, with ties to even.

The split of a weight rounds ties away from zero: the remainder is then -32,768, which int16 holds,
while rounding down would need +32,768. NaNs and the largest finite values are changed, as
`engine.host.host_kernels` describes. In the mode `float32` a parameter takes 16 bytes:
`weight_high` holds the fp32 weight itself, `grad` is fp32, and there is no `weight_low`.

With another optimizer than `adamw`, the moments are in bf16 or in 8 bits. Then `exp_avg` and
`exp_avg_sq` are rows of bytes (`engine.planes.moments`).

The planes of units that live on the device are there (`engine.host.device_planes`); such a unit has
no plane of gradients. All other planes are in host memory (`engine.host.ram_planes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import numpy as np
import torch

from engine.config.settings import Optimizer
from engine.errors import ModelError
from engine.host.device_planes import DevicePlanes, PlaneDevice
from engine.host.fp32_pieces import fp32_pieces
from engine.host.held_step import HeldStep
from engine.host.host_kernels import kernel
from engine.host.host_threads import Workers, ranges
from engine.host.moment_conversion import Bytes, convert_moments
from engine.host.ram_planes import Key, RamPlanes, Wanted
from engine.plan.buffers import EMBED, HEAD
from engine.planes.layout import PLANE_ITEM_BYTES, WEIGHT_PLANES, ParameterSpec, UnitLayout
from engine.planes.moments import FP32_MOMENTS, MOMENTS
from engine.planes.update_buffers import UpdateBuffer
from engine.progress import Progress, untold

DMA_PLANES = ("weight_high", "grad")
"""The device reads or writes these planes by DMA; only they are registered, and weight_low of units
with weights that stay in fp32.
"""


class HostStore:
    """A `HostStore` owns flat planes by unit: ``weight_high``, ``weight_low`` (`bfloat16` only),
    ``exp_avg``, ``exp_avg_sq`` and ``grad``.

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
        self.optimizer: Optimizer = FP32_MOMENTS
        """The moments are those of this optimizer (`allocate_states`)."""
        self._workers = Workers(threads, "host-store")
        self._ram = RamPlanes(register, unregister, self._workers)
        self._on_device: DevicePlanes | None = None
        self.settled: frozenset[str] = frozenset()
        """These units live on the device."""
        self._has_gradients = False
        self._places: dict[Key, tuple[int, ParameterSpec]] = {}
        for layout in layouts:
            for spec, offset in zip(layout.parameters, layout.offsets):
                self._places[layout.unit, spec.name] = (offset, spec)
        self.held = HeldStep()
        """It says which optimizer step's state the planes hold."""

    # ------------------------------------------------------------------ memory

    @property
    def planes(self) -> tuple[str, ...]:
        """Returns the names of the planes that each unit has in this dtype."""
        return tuple(PLANE_ITEM_BYTES[self.dtype])

    def allocate_weights(self, progress: Progress = untold) -> None:
        """Allocates, touches and registers the weight planes. `progress` is called with bytes after
        each plane; an exception from it undoes the allocation. Raises FitError when there is not
        enough memory.
        """
        weights = [plane for plane in self.planes if plane in WEIGHT_PLANES]
        self._allocate(weights, "weights", progress)

    def allocate_states(
        self,
        progress: Progress = untold,
        optimizer: Optimizer = FP32_MOMENTS,
        gradients: bool = True,
    ) -> None:
        """Allocates, touches and registers the planes of gradients and of the moments of
        `optimizer`, as `allocate_weights` does for weights. Without `gradients`, which is for plans
        that park them on the device, there is no plane for them.
        """
        self.optimizer = optimizer
        self._has_gradients = gradients
        states = [plane for plane in self.planes if plane not in WEIGHT_PLANES]
        if not gradients:
            states.remove("grad")
        self._allocate(states, "optimizer states", progress)

    def release_states(self) -> None:
        """Frees what `allocate_states` allocated. No op may be running on it."""
        for key in self._tensors():
            if key[1] not in WEIGHT_PLANES:
                self._place(key[0]).release([key])

    def settle(self, units: Collection[str], device: PlaneDevice) -> None:
        """Makes `units`, and no others, live on `device`. Planes that are allocated already move
        there, or back to host memory, with what they hold; no op may be running on them. Raises
        FitError where host memory is short, and torch.OutOfMemoryError where that of the device is.
        """
        if self._on_device is None:
            self._on_device = DevicePlanes(device)
        # Those that leave make room for those that come.
        for unit in self.settled - set(units):
            self._move(unit, self.settled - {unit})
        for unit in sorted(set(units) - self.settled):
            self._move(unit, self.settled | {unit})

    def _move(self, unit: str, settled: frozenset[str]) -> None:
        """Moves the planes of a unit to where they belong once `settled` live on the device."""
        before, old = self.settled, self._place(unit)
        self.settled = settled
        there = [key for key in old.tensors if key[0] == unit]
        planes = [plane for _, plane in there if plane != "grad"]
        wanted = self._wanted((unit,), planes)
        new = self._place(unit)
        try:
            if isinstance(new, DevicePlanes):
                new.allocate(wanted)
            else:
                if self._has_gradients:
                    wanted |= self._wanted((unit,), ["grad"])
                new.allocate(wanted, "units that leave the device", untold)
        except BaseException:
            self.settled = before
            raise
        for plane in planes:
            size = wanted[unit, plane].nbytes
            new.write((unit, plane), 0, old.read((unit, plane), 0, size))
        old.release(there)

    def update_buffer(self, pieces: int) -> UpdateBuffer:
        """Returns the sizes of a buffer in which the device updates a piece of a unit. pieces: so
        many of them are the largest block.
        """
        units = {unit: layout.moment_counts for unit, layout in self.layouts.items()}
        blocks = [counts.numel for unit, counts in units.items() if unit not in (EMBED, HEAD)]
        largest = max(blocks, default=0)
        return UpdateBuffer.of(self.dtype, self.optimizer, units.values(), largest, pieces)

    @property
    def states(self) -> tuple[Optimizer, bool] | None:
        """Returns the optimizer whose moments are allocated, and whether planes of gradients are;
        None before `allocate_states`.
        """
        planes = {plane for _, plane in self._tensors()}
        return (self.optimizer, self._has_gradients) if planes & set(MOMENTS) else None

    @property
    def allocated_bytes(self) -> int:
        """The planes in host memory have this many bytes."""
        return self._ram.nbytes

    @property
    def device_bytes(self) -> int:
        """The planes on the device have this many bytes."""
        return 0 if self._on_device is None else self._on_device.nbytes

    @property
    def pinned_bytes(self) -> int:
        """The planes that are registered for DMA have this many bytes."""
        return self._ram.pinned_bytes

    @property
    def refused_bytes(self) -> int:
        """The system refused to register planes of this many bytes; their copies are slower."""
        return self._ram.refused_bytes

    def register_states(self, units: Iterable[str]) -> None:
        """Makes all planes of `units`, whose optimizer runs on the device, known to the device for
        DMA.
        """
        for unit in units:
            for plane in self.planes:
                if (unit, plane) in self._ram.arrays:  # parked gradients have no plane
                    self._ram.register((unit, plane))

    def close(self) -> None:
        """Unregisters and releases all memory at once. Views that still exist read zeros from now
        on. No op may be running on the planes.
        """
        self._ram.release(list(self._ram.arrays))
        if self._on_device is not None:
            self._on_device.release(list(self._on_device.tensors))
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
        if the unit lives there.
        """
        return self._place(unit).tensors[unit, plane]

    def content(self, unit: str, plane: str, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places of a plane, uint8 [bytes]: its own memory, or a copy
        if the unit lives on the device.
        """
        return self._place(unit).read((unit, plane), begin, end)

    def put(self, unit: str, plane: str, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` of a plane on."""
        self._place(unit).write((unit, plane), begin, content)

    def nbytes(self, unit: str, plane: str) -> int:
        """Returns the bytes of a plane."""
        tensor = self.tensor(unit, plane)
        return tensor.numel() * tensor.element_size()

    def weight(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, in host memory: a view of
        the plane, or a copy if the unit lives on the device.
        """
        view, place = self.view(unit, name), self._place(unit)
        return place.on_host(view) if isinstance(place, DevicePlanes) else view

    def view(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, sharing memory."""
        offset, spec = self._places[unit, name]
        return self.tensor(unit, "weight_high")[offset : offset + spec.numel].view(spec.shape)

    def write(
        self, unit: str, name: str, tensor: torch.Tensor, buffer: torch.Tensor | None = None
    ) -> None:
        """Sets a parameter from a float tensor of its shape, on any device. Who writes many tensors
        gives them one `buffer` for pieces (`engine.host.fp32_pieces`).

        Values of fp32 are kept exactly in both modes, except for the two kinds that
        `engine.host.host_kernels` names; fp64 is rounded to fp32. A NaN or an infinity is also
        one in weight_high, where a sum over the plane reveals it. Raises ModelError for a wrong
        shape or a tensor that is not float.
        """
        offset, spec = self._places[unit, name]
        if tuple(tensor.shape) != spec.shape:
            raise ModelError(
                f"{spec.full_name} has the shape {tuple(tensor.shape)} in the weights but "
                f"{spec.shape} in the model; use the configuration that belongs to these weights."
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"{spec.full_name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which "
                "is not a floating-point type; use weights that are not quantised."
            )
        source = tensor.detach()
        if self.dtype == "float32":
            self.view(unit, name).copy_(source)
        elif source.dtype == torch.bfloat16:
            # A bf16 value needs no rounding, so its remainder in weight_low is 0.
            self.view(unit, name).copy_(source)
            self.tensor(unit, "weight_low")[offset : offset + spec.numel].zero_()
        else:
            for piece in fp32_pieces(source, buffer):
                self._split(unit, piece.numpy(), offset)
                offset += piece.numel()

    def _split(self, unit: str, values: np.ndarray, offset: int) -> None:
        """Splits fp32 `values` [n] into the weight planes of `unit`, from element `offset` on."""
        lives_on_device = unit in self.settled
        if lives_on_device:
            high, low = np.empty(values.size, np.uint16), np.empty(values.size, np.int16)
        else:
            high = self.array(unit, "weight_high")[offset : offset + values.size]
            low = self.array(unit, "weight_low")[offset : offset + values.size]
        split = kernel("split")

        def split_range(start: int, stop: int) -> None:
            split(values[start:stop], high[start:stop], low[start:stop])

        self._workers.run(split_range, ranges(0, values.size))
        if lives_on_device:
            self.put(unit, "weight_high", 2 * offset, high.view(np.uint8))
            self.put(unit, "weight_low", 2 * offset, low.view(np.uint8))

    def take_moments(self, unit: str, plane: str, read: Bytes, optimizer: Optimizer) -> None:
        """Sets a plane of moments from that of another optimizer, whose bytes `read` returns
        (`engine.host.moment_conversion`).
        """
        here = self.content(unit, plane, 0, self.nbytes(unit, plane))
        convert_moments(self.layouts[unit], plane, (read, optimizer), (here, self.optimizer))
        if unit in self.settled:
            self.put(unit, plane, 0, here)

    def master(self, unit: str, name: str) -> torch.Tensor:
        """Returns a copy of a parameter's fp32 master in the parameter's own shape."""
        offset, spec = self._places[unit, name]
        if self.dtype == "float32":
            return self.weight(unit, name).clone()
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

    # ------------------------------------------------------------------ inside

    def _place(self, unit: str) -> RamPlanes | DevicePlanes:
        """Returns where the planes of a unit are."""
        if unit not in self.settled:
            return self._ram
        assert self._on_device is not None  # `settle` made it
        return self._on_device

    def _tensors(self) -> dict[Key, torch.Tensor]:
        """Returns all planes that are allocated, wherever they are."""
        return self._ram.tensors | (self._on_device.tensors if self._on_device else {})

    def _allocate(self, planes: Collection[str], what: str, progress: Progress) -> None:
        """Allocates these planes of all units."""
        if any((unit, plane) in self._tensors() for unit in self.layouts for plane in planes):
            raise RuntimeError(f"the {what} are allocated already")
        settled = self._wanted(self.settled, [plane for plane in planes if plane != "grad"])
        if self._on_device is not None:
            self._on_device.allocate(settled)
        others = [unit for unit in self.layouts if unit not in self.settled]
        try:
            self._ram.allocate(self._wanted(others, planes), what, progress)
        except BaseException:
            if self._on_device is not None:
                self._on_device.release(settled)
            raise

    def _wanted(self, units: Iterable[str], planes: Collection[str]) -> dict[Key, Wanted]:
        wanted: dict[Key, Wanted] = {}
        for unit in units:
            layout = self.layouts[unit]
            sizes = layout.plane_bytes(self.dtype, self.optimizer)
            for plane in planes:
                is_for_dma = plane in DMA_PLANES
                if plane == "weight_low" and layout.exact_numel > 0:
                    is_for_dma = True
                wanted[unit, plane] = Wanted(sizes[plane], self._numpy_type(plane), is_for_dma)
        return wanted

    def _numpy_type(self, plane: str) -> type[np.generic]:
        if plane in MOMENTS and self.optimizer != FP32_MOMENTS:
            return np.uint8
        if PLANE_ITEM_BYTES[self.dtype][plane] == 4:
            return np.float32
        if plane == "weight_low":
            return np.int16
        return np.uint16

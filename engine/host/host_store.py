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

How memory is managed:

- Each plane is a separate anonymous memory mapping, in huge pages where the kernel supports them.
  It is touched when it is allocated, so that a lack of memory is found then and not in the middle
  of a step.
- Planes that the device reads or writes by DMA are registered with it (page-locked).
- `close` releases the pages at once, even where a view of a plane still exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch

from engine.config.settings import Optimizer
from engine.errors import FitError, ModelError
from engine.host.fp32_pieces import fp32_pieces
from engine.host.held_step import HeldStep
from engine.host.host_kernels import kernel
from engine.host.host_threads import Workers, ranges
from engine.host.moment_conversion import Bytes, convert_moments
from engine.machine.cgroups import sample_host_memory
from engine.plan.buffers import EMBED, HEAD
from engine.planes.layout import PLANE_ITEM_BYTES, WEIGHT_PLANES, ParameterSpec, UnitLayout
from engine.planes.moments import FP32_MOMENTS, MOMENTS
from engine.planes.update_buffers import UpdateBuffer
from engine.progress import Progress, untold
from engine.words import GIB

DMA_PLANES = ("weight_high", "grad")
"""The device reads or writes these planes by DMA; only they are registered, and weight_low of units
with weights that stay in fp32.
"""

_TOUCH_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module yet

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_Key = tuple[str, str]
"""A key is the unit and the name of a plane."""


def map_memory(size: int) -> mmap.mmap:
    """Maps `size` bytes of private memory, in huge pages, that a forked process does not get: the
    device reads and writes these pages, so they must never be copied. Raises OSError or
    OverflowError where the system refuses.
    """
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        # Where the kernel lacks one of these features, training is slower or a fork takes more
        # memory, but results do not change.
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region


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
        self._register = register
        self._unregister = unregister
        self._workers = Workers(threads, "host-store")
        self._places: dict[_Key, tuple[int, ParameterSpec]] = {}
        for layout in layouts:
            for spec, offset in zip(layout.parameters, layout.offsets):
                self._places[layout.unit, spec.name] = (offset, spec)
        self._maps: dict[_Key, mmap.mmap] = {}
        self._arrays: dict[_Key, np.ndarray] = {}
        self._tensors: dict[_Key, torch.Tensor] = {}
        self._registered: dict[int, int] = {}
        self._refused_bytes = 0
        self.held = HeldStep()
        """It says which optimizer step's state the planes hold."""
        if unregister is not None:
            # This covers a store that is never closed. Otherwise its addresses would still count as
            # registered when the system reuses them, and the new memory there could not be
            # registered.
            weakref.finalize(self, _unregister_all, self._registered, unregister).atexit = False

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
        self._allocate(
            [plane for plane in self.planes if plane in WEIGHT_PLANES], "weights", progress
        )

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
        states = [plane for plane in self.planes if plane not in WEIGHT_PLANES]
        if not gradients:
            states.remove("grad")
        self._allocate(states, "optimizer states", progress)

    def release_states(self) -> None:
        """Frees what `allocate_states` allocated. No op may be running on it."""
        self._release([key for key in self._arrays if key[1] not in WEIGHT_PLANES])

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
        planes = {plane for _, plane in self._arrays}
        return (self.optimizer, "grad" in planes) if planes & set(MOMENTS) else None

    @property
    def allocated_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def pinned_bytes(self) -> int:
        """The planes that are registered for DMA have this many bytes."""
        return sum(self._registered.values())

    @property
    def refused_bytes(self) -> int:
        """The system refused to register planes of this many bytes; their copies are slower."""
        return self._refused_bytes

    def register_states(self, units: Iterable[str]) -> None:
        """Makes all planes of `units`, whose optimizer runs on the device, known to the device for
        DMA.
        """
        for unit in units:
            for plane in self.planes:
                array = self._arrays.get((unit, plane))
                if array is None:  # parked gradients have no plane
                    continue
                if array.ctypes.data not in self._registered:
                    self._register_array(array)

    def close(self) -> None:
        """Unregisters and releases all memory at once. Views that still exist read zeros from now
        on. No op may be running on the planes.
        """
        self._release(list(self._arrays))
        self._workers.close()

    # ------------------------------------------------------------------ planes and parameters

    def array(self, unit: str, plane: str) -> np.ndarray:
        """Returns a whole plane, flat, shape [numel], sharing memory. Planes of bf16 are uint16,
        weight_low is int16, planes of fp32 are float32. Moments that are not all in fp32 are uint8
        [bytes].
        """
        return self._arrays[unit, plane]

    def tensor(self, unit: str, plane: str) -> torch.Tensor:
        """Returns a whole plane, flat, shape [numel], sharing memory: bfloat16, int16 (weight_low)
        or float32. Moments that are not all in fp32 are uint8 [bytes].
        """
        return self._tensors[unit, plane]

    def view(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, sharing memory."""
        offset, spec = self._places[unit, name]
        return self._tensors[unit, "weight_high"][offset : offset + spec.numel].view(spec.shape)

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
        high = self.array(unit, "weight_high")[offset : offset + values.size]
        low = self.array(unit, "weight_low")[offset : offset + values.size]
        split = kernel("split")

        def split_range(start: int, stop: int) -> None:
            split(values[start:stop], high[start:stop], low[start:stop])

        self._workers.run(split_range, ranges(0, values.size))

    def take_moments(self, unit: str, plane: str, read: Bytes, optimizer: Optimizer) -> None:
        """Sets a plane of moments from that of another optimizer, whose bytes `read` returns
        (`engine.host.moment_conversion`).
        """
        here = self.array(unit, plane).view(np.uint8)
        convert_moments(self.layouts[unit], plane, (read, optimizer), (here, self.optimizer))

    def master(self, unit: str, name: str) -> torch.Tensor:
        """Returns a copy of a parameter's fp32 master in the parameter's own shape."""
        offset, spec = self._places[unit, name]
        if self.dtype == "float32":
            return self.view(unit, name).clone()
        result = torch.empty(spec.shape, dtype=torch.float32)
        high = self.array(unit, "weight_high")[offset : offset + spec.numel]
        low = self.array(unit, "weight_low")[offset : offset + spec.numel]
        target = result.view(-1).numpy()
        join = kernel("join")

        def join_range(start: int, stop: int) -> None:
            join(high[start:stop], low[start:stop], target[start:stop])

        self._workers.run(join_range, ranges(0, spec.numel))
        return result

    # ------------------------------------------------------------------ inside

    def _allocate(self, planes: list[str], what: str, progress: Progress) -> None:
        wanted: dict[_Key, int] = {}
        for unit, layout in self.layouts.items():
            sizes = layout.plane_bytes(self.dtype, self.optimizer)
            for plane in planes:
                wanted[unit, plane] = sizes[plane]
        if any(key in self._arrays for key in wanted):
            raise RuntimeError(f"the {what} are allocated already")
        total = sum(wanted.values())
        available = sample_host_memory()[1]
        if total > available:
            raise FitError(
                f"The {what} need {_gib(total)} of host memory, but only {_gib(available)} is "
                "available; close other programs or choose a smaller model."
            )
        done = 0
        try:
            # Map all addresses first, which takes no memory: so a limit of the address space is
            # found before the touching, which takes long, begins.
            for key, size in wanted.items():
                self._map(key, size, what, total)
            for key, size in wanted.items():
                array = self._arrays[key]
                self._touch(array, what, total)
                if self._is_for_dma(*key) and size:
                    self._register_array(array)
                done += size
                progress(done, total)
        except BaseException:
            self._release([key for key in wanted if key in self._arrays])
            raise

    def _is_for_dma(self, unit: str, plane: str) -> bool:
        """Tells whether the device reads or writes this plane of the unit in every plan."""
        has_low = plane == "weight_low" and self.layouts[unit].exact_numel > 0
        return plane in DMA_PLANES or has_low

    def _map(self, key: _Key, size: int, what: str, total: int) -> None:
        """Maps memory for one plane. Raises FitError where the system refuses."""
        kind = self._numpy_type(key[1])
        array = np.empty(0, kind)
        if size:
            try:
                region = map_memory(size)
            except (OSError, OverflowError):
                raise _refused(what, total) from None
            self._maps[key] = region
            array = np.frombuffer(region, kind)
        tensor = torch.from_numpy(array)
        self._arrays[key] = array
        # Numpy has no bf16, so arrays hold its bits as uint16.
        self._tensors[key] = tensor.view(torch.bfloat16) if kind is np.uint16 else tensor

    def _numpy_type(self, plane: str) -> type[np.generic]:
        if plane in MOMENTS and self.optimizer != FP32_MOMENTS:
            return np.uint8
        if PLANE_ITEM_BYTES[self.dtype][plane] == 4:
            return np.float32
        if plane == "weight_low":
            return np.int16
        return np.uint16

    def _touch(self, array: np.ndarray, what: str, total: int) -> None:
        """Makes the kernel back a plane with memory. Raises FitError where there is not enough."""
        address = array.ctypes.data

        def touch_range(start: int, stop: int) -> None:
            if not _populate(address + start, stop - start):
                raise _refused(what, total)

        self._workers.run(touch_range, ranges(0, array.nbytes, _TOUCH_BYTES))

    def _register_array(self, array: np.ndarray) -> None:
        if self._register is None:
            return
        if self._register(array.ctypes.data, array.nbytes):
            self._registered[array.ctypes.data] = array.nbytes
        else:
            self._refused_bytes += array.nbytes

    def _release(self, keys: list[_Key]) -> None:
        for key in keys:
            array = self._arrays.pop(key)
            del self._tensors[key]
            if array.ctypes.data in self._registered and self._unregister is not None:
                self._unregister(array.ctypes.data)
                del self._registered[array.ctypes.data]
            self._discard(array)
            del array
            region = self._maps.pop(key, None)
            if region is not None:
                # A view that outlives the store prevents the mapping from being closed.
                with contextlib.suppress(BufferError):
                    region.close()

    def _discard(self, array: np.ndarray) -> None:
        """Releases the pages of a plane. The mapping cannot be closed while a view outlives the
        store, so its pages are released separately, and its addresses stay valid.
        """
        address = array.ctypes.data

        def discard_range(start: int, stop: int) -> None:
            _libc.madvise(address + start, stop - start, mmap.MADV_DONTNEED)

        self._workers.run(discard_range, ranges(0, array.nbytes, _TOUCH_BYTES))


def _unregister_all(registered: dict[int, int], unregister: Callable[[int], None]) -> None:
    while registered:
        unregister(registered.popitem()[0])


def _populate(address: int, size: int) -> bool:
    """Backs a range of addresses with zeroed memory, and returns whether there was enough."""
    if _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() != errno.EINVAL:
        return False
    # An older kernel does not know the advice, but writing has the same effect.
    ctypes.memset(address, 0, size)
    return True


def _refused(what: str, total: int) -> FitError:
    return FitError(
        f"The system refused {_gib(total)} of host memory for the {what}; close other programs, "
        "raise the memory limit of this session or choose a smaller model."
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB ({size:,} bytes)"

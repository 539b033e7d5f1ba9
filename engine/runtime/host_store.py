"""`HostStore`: the planes of every unit in host memory, exactly as many bytes as
`engine.model.layout` says (law 5).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from engine.errors import FitError, ModelError
from engine.machine.cgroups import sample_host_memory
from engine.model.layout import PLANE_ITEM_BYTES, WEIGHT_PLANES, ParameterSpec, UnitLayout
from engine.progress import Progress, untold
from engine.runtime.host_kernels import kernel
from engine.runtime.host_threads import Workers, ranges
from engine.words import GIB

DMA_PLANES = ("weight_high", "grad")
"""Planes that the device reads or writes by DMA; only these are registered."""

_TOUCH_BYTES = 64 << 20
_PIECE = 4 << 20  # elements converted at once when a source is not plain fp32
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module yet

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostStore:
    """Flat planes by unit: ``weight_high`` (what the device sees), ``weight_low`` (rest of the fp32
    master, `bfloat16` only), ``exp_avg``, ``exp_avg_sq`` and ``grad``.

    `register(address, bytes)` and `unregister(address)` make memory known to the device for DMA;
    None without one. Nothing is allocated until `allocate_weights` and `allocate_states`; memory
    comes zeroed. Fresh memory is not inherited by forked children. `threads` is how many touch and
    convert memory (default: the cores but two).
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        dtype: Literal["bfloat16", "float32"],
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
        threads: int | None = None,
    ):
        self.layouts = {layout.unit: layout for layout in layouts}
        self.dtype = dtype
        self._register, self._unregister = register, unregister
        self._workers = Workers(threads, "host-store")
        self._places: dict[tuple[str, str], tuple[int, ParameterSpec]] = {
            (layout.unit, spec.name): (offset, spec)
            for layout in layouts
            for spec, offset in zip(layout.parameters, layout.offsets)
        }
        self._maps: dict[tuple[str, str], mmap.mmap] = {}
        self._arrays: dict[tuple[str, str], np.ndarray] = {}
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        self._registered: dict[int, int] = {}
        if unregister is not None:  # a store that was never closed: its addresses will be another's
            weakref.finalize(self, _unregister_all, self._registered, unregister).atexit = False

    # ------------------------------------------------------------------ memory

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of all planes of this dtype."""
        return tuple(PLANE_ITEM_BYTES[self.dtype])

    def allocate_weights(self, progress: Progress = untold) -> None:
        """Allocate, touch and register the weight planes. `progress` is called, with bytes, after
        each plane; what it raises undoes the allocation. Raises FitError when the memory is not
        there.
        """
        self._allocate(
            [plane for plane in self.planes if plane in WEIGHT_PLANES], "weights", progress
        )

    def allocate_states(self, progress: Progress = untold) -> None:
        """The same for moments and gradients."""
        self._allocate(
            [plane for plane in self.planes if plane not in WEIGHT_PLANES],
            "optimizer states",
            progress,
        )

    @property
    def allocated_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered for DMA."""
        return sum(self._registered.values())

    def register_states(self, units: Iterable[str]) -> None:
        """Make all planes of `units` known to the device, whose optimizer runs there."""
        for unit in units:
            for plane in self.planes:
                array = self._arrays[unit, plane]
                if self._register is not None and array.ctypes.data not in self._registered:
                    self._register(array.ctypes.data, array.nbytes)
                    self._registered[array.ctypes.data] = array.nbytes

    def close(self) -> None:
        """Unregister and give all memory back at once. Views still held read zeros from now on;
        nothing may be running on the planes.
        """
        self._release(list(self._arrays))
        self._workers.close()

    # ------------------------------------------------------------------ planes and parameters

    def array(self, unit: str, plane: str) -> np.ndarray:
        """A whole plane, flat, sharing memory: bf16 planes as uint16, weight_low as int16, fp32
        planes as float32.
        """
        return self._arrays[unit, plane]

    def tensor(self, unit: str, plane: str) -> torch.Tensor:
        """A whole plane, flat, sharing memory: bfloat16, int16 (weight_low) or float32."""
        return self._tensors[unit, plane]

    def view(self, unit: str, name: str) -> torch.Tensor:
        """A parameter's weight_high in its own shape, sharing memory."""
        offset, spec = self._places[unit, name]
        return self._tensors[unit, "weight_high"][offset : offset + spec.numel].view(spec.shape)

    def write(self, unit: str, name: str, tensor: torch.Tensor) -> None:
        """Set a parameter from a float tensor of its shape on any device. fp32 values are kept
        exactly in both modes but for those that `engine.runtime.host_kernels` names; fp64 is
        rounded to fp32. A NaN or infinity stays one in weight_high, where a sum over the plane
        finds it. Raises ModelError for a wrong shape or a tensor that is not float.
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
            self.view(unit, name).copy_(source)
            self.tensor(unit, "weight_low")[offset : offset + spec.numel].zero_()
        else:
            high, low, split = (
                self.array(unit, "weight_high"),
                self.array(unit, "weight_low"),
                kernel("split"),
            )
            for piece in _fp32_pieces(source):
                values, start = piece.numpy(), offset
                self._workers.run(
                    lambda a, b: split(
                        values[a:b], high[start + a : start + b], low[start + a : start + b]
                    ),
                    ranges(0, values.size),
                )
                offset += values.size

    def master(self, unit: str, name: str) -> torch.Tensor:
        """A copy of a parameter's fp32 master in its own shape."""
        offset, spec = self._places[unit, name]
        if self.dtype == "float32":
            return self.view(unit, name).clone()
        result = torch.empty(spec.shape, dtype=torch.float32)
        high, low, join = (
            self.array(unit, "weight_high"),
            self.array(unit, "weight_low"),
            kernel("join"),
        )
        target = result.view(-1).numpy()
        self._workers.run(
            lambda a, b: join(
                high[offset + a : offset + b], low[offset + a : offset + b], target[a:b]
            ),
            ranges(0, spec.numel),
        )
        return result

    # ------------------------------------------------------------------ inside

    def _allocate(self, planes: list[str], what: str, progress: Progress) -> None:
        wanted = {
            (unit, plane): layout.plane_bytes(self.dtype)[plane]
            for unit, layout in self.layouts.items()
            for plane in planes
        }
        if any(key in self._arrays for key in wanted):
            raise RuntimeError(f"the {what} are allocated already")
        total, done = sum(wanted.values()), 0
        available = sample_host_memory()[1]
        if total > available:
            raise FitError(
                f"The {what} need {_gib(total)} of host memory, but only {_gib(available)} is "
                "available; close other programs or choose a smaller model."
            )
        try:
            for key, size in wanted.items():
                self._map(*key, size, what, total)
            for key, size in wanted.items():
                array = self._arrays[key]
                address = array.ctypes.data
                self._workers.run(
                    lambda a, b: _touch(address + a, b - a, what, total),
                    ranges(0, size, _TOUCH_BYTES),
                )
                if self._register is not None and key[1] in DMA_PLANES and size:
                    self._register(address, size)
                    self._registered[address] = size
                done += size
                progress(done, total)
        except BaseException:
            self._release([key for key in wanted if key in self._arrays])
            raise

    def _map(self, unit: str, plane: str, size: int, what: str, total: int) -> None:
        item = PLANE_ITEM_BYTES[self.dtype][plane]
        kind = np.float32 if item == 4 else np.int16 if plane == "weight_low" else np.uint16
        if size:
            try:
                region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError):
                raise _refused(what, total) from None
            for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
                try:
                    region.madvise(advice)
                except (
                    OSError
                ):  # a kernel built without it: slower or larger after a fork, never wrong
                    pass
            self._maps[unit, plane] = region
            array = np.frombuffer(region, kind)
        else:
            array = np.empty(0, kind)
        tensor = torch.from_numpy(array)
        self._arrays[unit, plane] = array
        self._tensors[unit, plane] = tensor.view(torch.bfloat16) if kind is np.uint16 else tensor

    def _release(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            address, size = self._arrays[key].ctypes.data, self._arrays[key].nbytes
            if address in self._registered:
                self._unregister(address)
                del self._registered[address]
            # A view that outlives the store keeps the addresses valid, so give the pages back
            # whatever it does.
            self._workers.run(
                lambda a, b: _libc.madvise(address + a, b - a, mmap.MADV_DONTNEED),
                ranges(0, size, _TOUCH_BYTES),
            )
            del self._arrays[key], self._tensors[key]
            region = self._maps.pop(key, None)
            if region is not None:
                try:
                    region.close()
                except BufferError:
                    pass


def _unregister_all(registered: dict[int, int], unregister: Callable[[int], None]) -> None:
    while registered:
        unregister(registered.popitem()[0])


def _touch(address: int, size: int, what: str, total: int) -> None:
    if _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise _refused(what, total)
    ctypes.memset(address, 0, size)


def _fp32_pieces(
    tensor: torch.Tensor, buffer: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """A tensor's values in order, as flat fp32 pieces: itself where possible, else converted a
    little at a time into one buffer, so a piece is valid until the next one.
    """
    if (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr() % 4 == 0
    ):
        yield tensor.view(-1)
        return
    if buffer is None:
        buffer = torch.empty(min(tensor.numel(), _PIECE), dtype=torch.float32)
    if tensor.numel() <= _PIECE:
        piece = buffer[: tensor.numel()]
        piece.view(tensor.shape).copy_(tensor)
        yield piece
    else:
        rows = _PIECE * len(tensor) // tensor.numel()
        for part in tensor.split(rows) if rows else tensor:
            yield from _fp32_pieces(part, buffer)


def _refused(what: str, total: int) -> FitError:
    return FitError(
        f"The system refused {_gib(total)} of host memory for the {what}; close other programs, "
        "raise the memory limit of this session or choose a smaller model."
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB ({size:,} bytes)"

"""`RamPlanes` holds planes in host memory.

- Each plane is a separate anonymous memory mapping, in huge pages where the kernel supports them.
  It is touched when it is allocated, so that a lack of memory is found then and not in the middle
  of a step.
- Planes that the device reads or writes by DMA are registered with it (page-locked).
- `release` frees the pages at once, even where a view of a plane still exists.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.errors import FitError
from engine.machine.cgroups import sample_host_memory
from engine.progress import Progress
from engine.runtime.host.mapped_memory import discard, map_memory, populate
from engine.runtime.optimizer.host_threads import Workers, ranges
from engine.text import GIB

Key = tuple[str, str]
"""A key is the unit and the name of a plane."""
_TOUCH_BYTES = 64 << 20


class Wanted(NamedTuple):
    """A plane to allocate."""

    nbytes: int
    kind: type[np.generic]
    is_for_dma: bool
    """The device reads or writes the plane in every plan."""


class PlaneMemory(Protocol):
    """Source of the memory of planes."""

    is_new: bool
    """Memory that the host states gets, and not that of another process."""

    def map(self, key: Key, size: int) -> mmap.mmap:
        """Returns `size` new bytes for a plane. Raises OSError or OverflowError where the system
        refuses.
        """

    def back(self, address: int, size: int) -> bool:
        """Backs addresses with memory, and returns whether there was enough."""

    def discard(self, address: int, size: int) -> None:
        """Frees the memory of addresses, which stay valid."""

    def forget(self, key: Key) -> None:
        """Says that a plane is released."""


class PrivateMemory:
    """Memory that no other process has."""

    is_new = True

    def map(self, key: Key, size: int) -> mmap.mmap:  # noqa: ARG002  no plane is told apart
        return map_memory(size)

    def back(self, address: int, size: int) -> bool:
        return populate(address, size)

    def discard(self, address: int, size: int) -> None:
        discard(address, size)

    def forget(self, key: Key) -> None:
        """Does nothing: only the mapping knows of the memory."""


class RamPlanes:
    """Owns flat arrays by unit and plane. `register` and `unregister` are those of `HostStates`;
    `workers` touch and release memory, which comes from `memory`.
    """

    is_whole = True
    """Whether this node has the memory of whole planes."""

    def __init__(
        self,
        register: Callable[[int, int], bool] | None,
        unregister: Callable[[int], None] | None,
        workers: Workers,
        memory: PlaneMemory,
    ):
        self._register = register
        self._unregister = unregister
        self._workers = workers
        self.memory = memory
        self._maps: dict[Key, mmap.mmap] = {}
        self._backed: dict[Key, int] = {}
        """Number of bytes of each plane that have memory here."""
        self.arrays: dict[Key, np.ndarray] = {}
        self.tensors: dict[Key, torch.Tensor] = {}
        self._registered: dict[int, int] = {}
        self.refused_bytes = 0
        """Bytes of planes that the system refused to register; their copies are slower."""
        if unregister is not None:
            # This covers planes that are never released. Otherwise their addresses would still
            # count as registered when the system reuses them, and the new memory there could not be
            # registered.
            weakref.finalize(self, _unregister_all, self._registered, unregister).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of all planes together on this node."""
        return sum(self._backed.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the planes that are registered for DMA."""
        return sum(self._registered.values())

    def allocate(self, wanted: Mapping[Key, Wanted], what: str, progress: Progress) -> None:
        """Allocates, touches and registers planes. `progress` is called with bytes after each; an
        exception from it undoes the allocation. Raises FitError where there is not enough memory
        for `what`.
        """
        sizes = {key: end - begin for key, (begin, end) in self._all_held(wanted).items()}
        total = sum(sizes.values())
        available = sample_host_memory()[1]
        if self.memory.is_new and total > available:
            raise FitError(
                f"The {what} need {_gib(total)} of RAM, but only {_gib(available)} is "
                "available; close other programs or choose a smaller model."
            )
        done = 0
        try:
            # Map all addresses first, which takes no memory: so a limit of the address space is
            # found before the touching, which takes long, begins.
            for key, plane in wanted.items():
                self._map(key, plane, what, total)
            for key, plane in wanted.items():
                self._touch(key, what, total)
                if plane.is_for_dma and sizes[key]:
                    self.register(key)
                done += sizes[key]
                progress(done, total)
        except BaseException:
            self.release([key for key in wanted if key in self.arrays])
            raise

    def register_units(self, units: Iterable[str]) -> None:
        """Makes all planes of `units` that are here known to the device for DMA: their optimizer
        runs there.
        """
        wanted = set(units)
        for key in self.arrays:
            if key[0] in wanted:
                self.register(key)

    def register(self, key: Key) -> None:
        """Makes a plane known to the device for DMA, unless it is known already."""
        address, size = self._pages(key)
        if self._register is None or address in self._registered:
            return
        if self._register(address, size):
            self._registered[address] = size
        else:
            self.refused_bytes += size

    def held(self, key: Key, nbytes: int) -> tuple[int, int]:  # noqa: ARG002  all planes are alike
        """Returns where what this node holds of a plane of `nbytes` bytes begins and ends."""
        return 0, nbytes

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two places of a plane, uint8 [bytes], sharing its memory."""
        return self.arrays[key].view(np.uint8)[begin:end]

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` of a plane on."""
        self.read(key, begin, begin + content.size)[:] = content

    def release(self, keys: Iterable[Key]) -> None:
        """Unregisters and releases planes at once. Views that still exist read zeros from now
        on.
        """
        for key in keys:
            address, _ = self._pages(key)
            array = self.arrays.pop(key)
            del self.tensors[key], self._backed[key]
            if address in self._registered and self._unregister is not None:
                self._unregister(address)
                del self._registered[address]
            self._discard(array)
            self.memory.forget(key)
            del array
            region = self._maps.pop(key, None)
            if region is not None:
                # A view that outlives the planes prevents the mapping from being closed.
                with contextlib.suppress(BufferError):
                    region.close()

    # ------------------------------------------------------------------ inside

    def _map(self, key: Key, plane: Wanted, what: str, total: int) -> None:
        """Maps memory for one plane. Raises FitError where the system refuses."""
        array = np.empty(0, plane.kind)
        if plane.nbytes:
            try:
                region = self.memory.map(key, plane.nbytes)
            except (OSError, OverflowError):
                raise _refused(what, total) from None
            self._maps[key] = region
            array = np.frombuffer(region, plane.kind)
        tensor = torch.from_numpy(array)
        self.arrays[key] = array
        begin, end = self.held(key, plane.nbytes)
        self._backed[key] = end - begin
        # Numpy has no bf16, so arrays hold its bits as uint16.
        is_bf16 = plane.kind is np.uint16
        self.tensors[key] = tensor.view(torch.bfloat16) if is_bf16 else tensor

    def _all_held(self, wanted: Mapping[Key, Wanted]) -> dict[Key, tuple[int, int]]:
        return {key: self.held(key, plane.nbytes) for key, plane in wanted.items()}

    def _pages(self, key: Key) -> tuple[int, int]:
        """Returns the address and the bytes of the whole pages that hold this node's part of a
        plane. A plane that is here whole has its own bytes alone.
        """
        array = self.arrays[key]
        begin, end = self.held(key, array.nbytes)
        begin -= begin % mmap.PAGESIZE
        if end < array.nbytes:
            end = min(array.nbytes, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        return array.ctypes.data + begin, end - begin

    def _touch(self, key: Key, what: str, total: int) -> None:
        """Makes the kernel back a plane with memory, as far as it is this node's. Raises FitError
        where there is not enough.
        """
        address, size = self._pages(key)

        def touch_range(start: int, stop: int) -> None:
            if not self.memory.back(address + start, stop - start):
                raise _refused(what, total)

        self._workers.run(touch_range, ranges(0, size, _TOUCH_BYTES))

    def _discard(self, array: np.ndarray) -> None:
        """Releases the pages of a plane. The mapping cannot be closed while a view outlives the
        planes, so its pages are released separately, and its addresses stay valid.
        """
        address = array.ctypes.data

        def discard_range(start: int, stop: int) -> None:
            self.memory.discard(address + start, stop - start)

        self._workers.run(discard_range, ranges(0, array.nbytes, _TOUCH_BYTES))


def _unregister_all(registered: dict[int, int], unregister: Callable[[int], None]) -> None:
    while registered:
        unregister(registered.popitem()[0])


def _refused(what: str, total: int) -> FitError:
    return FitError(
        f"The system refused {_gib(total)} of RAM for the {what}; close other programs, "
        "raise the memory limit of this session or choose a smaller model."
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB ({size:,} bytes)"

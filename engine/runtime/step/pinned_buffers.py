"""Some host memory is read and written by the device while a step runs: block inputs
wait there until the backward pass of their block, and chunks of kept gradients pass through it on
their way to the optimizer. This file allocates that memory and registers it with the device. It
also allocates the memory that moments and block inputs on the disk pass through.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from engine.errors import FitError
from engine.planning.layout.disk_chunks import state_ring_bytes, whole_pages
from engine.planning.schedule.buffers import Buffer
from engine.planning.schedule.offloaded_activations import ReadBlockInput, WriteBlockInput
from engine.planning.schedule.ops import FetchBlockInput, OffloadBlockInput
from engine.planning.schedule.schedule import StepPlan
from engine.planning.shape.saved_attention_sizes import BoundarySizes
from engine.runtime.device.backend import Backend
from engine.runtime.host.disk_file import DiskFile
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.mapped_memory import map_memory, populate
from engine.text import in_gib

K = TypeVar("K", bound=Hashable)


class RegisteredBuffers(Generic[K]):
    """Owns one host buffer of `numel` elements for each key, of exactly that size."""

    def __init__(self, keys: Sequence[K], numel: int, dtype: torch.dtype, backend: Backend):
        self.nbytes = len(keys) * numel * dtype.itemsize
        self.tensors: dict[K, torch.Tensor] = {}
        """Tensors, each flat [numel]."""
        self.is_refused = False
        """The system refused to register the memory, so its copies are slower."""
        self._unregister: weakref.finalize | None = None
        if not self.nbytes:
            return
        memory = torch.frombuffer(map_memory(self.nbytes), dtype=dtype)
        memory.zero_()
        self.is_refused = not backend.register(memory.data_ptr(), self.nbytes)
        # A finalizer also covers an engine whose construction fails later for lack of device
        # memory. Without it these addresses would still count as registered when the system reuses
        # them, and the new memory there could not be registered.
        if not self.is_refused:
            self._unregister = weakref.finalize(self, backend.unregister, memory.data_ptr())
            # At the end of the process the driver releases everything itself.
            self._unregister.atexit = False
        for position, key in enumerate(keys):
            start = position * numel
            self.tensors[key] = memory[start : start + numel]

    def close(self) -> None:
        """Unregisters and frees the memory. May be called twice."""
        if self._unregister is not None:
            self._unregister()
        self.tensors.clear()


class SavedBlockInputs:
    """Owns what keeps block inputs on the host from forward to backward: a buffer for each that
    waits in RAM, and for those that wait on the disk a file with a place for each, with the buffers
    that they pass through. The latter begin at whole pages. Some block inputs in RAM have what
    attention returned behind them. Raises DiskOffloadError where the disk has no space.
    """

    def __init__(
        self,
        plan: StepPlan,
        sizes: BoundarySizes,
        dtype: torch.dtype,
        backend: Backend,
        states: HostStates,
    ):
        numel = sizes.alone
        stored = [op for op in plan.ops if isinstance(op, OffloadBlockInput)]
        waiting = [(op.unit, op.micro_batch) for op in stored if op.host is None]
        in_ram = [key for key in waiting if key[0] not in plan.with_attention]
        larger = [key for key in waiting if key[0] in plan.with_attention]
        on_disk = [(op.unit, op.micro_batch) for op in stored if op.host is not None]
        self._room = whole_pages(numel * dtype.itemsize)
        self._places = {key: place * self._room for place, key in enumerate(on_disk)}
        self._disk = states.placement.disk if on_disk else None
        self._file: DiskFile | None = None
        if self._disk is not None:
            self._file = DiskFile(self._disk.folder, len(on_disk) * self._room, "block inputs")
        self._in_ram = RegisteredBuffers(in_ram, numel, dtype, backend)
        self._larger = RegisteredBuffers(larger, sizes.with_attention, dtype, backend)
        ring_numel = self._room // dtype.itemsize
        self._rings = RegisteredBuffers(plan.disk_rings, ring_numel, dtype, backend)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM of the buffers."""
        return self._in_ram.nbytes + self._larger.nbytes + self._rings.nbytes

    @property
    def refused_bytes(self) -> int:
        """Bytes of them that the system refused to register."""
        each = (self._in_ram, self._larger, self._rings)
        return sum(buffers.nbytes for buffers in each if buffers.is_refused)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes of the file go past the page cache."""
        return self._file is None or self._file.is_direct

    def on_host(self, op: OffloadBlockInput | FetchBlockInput) -> torch.Tensor:
        """Returns the host memory that the op copies to or from, a flat tensor [at least as long as
        what it copies]: that of its input, or a buffer on the way to the disk and back.
        """
        key = op.unit, op.micro_batch
        if op.host is None:
            return (self._larger if key in self._larger.tensors else self._in_ram).tensors[key]
        return self._rings.tensors[op.host]

    def write(self, op: WriteBlockInput, numel: int) -> None:
        """Writes the first `numel` elements of the op's buffer to the place of its input. Raises
        DiskOffloadError.
        """
        assert self._file is not None  # a plan with such ops has places on the disk
        assert self._disk is not None
        pages = self._pages(op.host, numel)
        self._file.write(pages, self._places[op.unit, op.micro_batch])
        self._disk.count_block_input(len(pages))

    def read(self, op: ReadBlockInput, numel: int) -> None:
        """Reads `numel` elements from that place to the op's buffer. Raises DiskOffloadError."""
        assert self._file is not None
        self._file.read(self._pages(op.host, numel), self._places[op.unit, op.micro_batch])

    def _pages(self, ring: Buffer, numel: int) -> memoryview:
        """Returns the whole pages of a buffer that hold its first `numel` elements."""
        tensor = self._rings.tensors[ring]
        pages = tensor.view(torch.uint8)[: whole_pages(numel * tensor.element_size())]
        return pages.numpy().data

    def close(self) -> None:
        """Frees the memory and the space of the file. May be called twice."""
        self._in_ram.close()
        self._larger.close()
        self._rings.close()
        if self._file is not None:
            self._file.close()


def gradient_rings(
    plan: StepPlan, dtype: torch.dtype, backend: Backend
) -> RegisteredBuffers[Buffer]:
    """Returns the ring buffers of a plan whose gradients are kept on the GPU."""
    return RegisteredBuffers(plan.gradient_rings, plan.ring_numel, dtype, backend)


class PinnedSummary:
    """Owns the pinned memory to which the device copies what the host reads of a step. The plans of
    an engine share it, since their steps never run at the same time.
    """

    def __init__(self, backend: Backend, units: int):
        self._backend = backend
        self.norms = backend.host_buffer(units + 1, torch.float64)
        """Copy of `DeviceState.norms`, float64 [units + 1]."""
        self.clip_factor = backend.host_buffer(1, torch.float32)
        """Copy of the clip factor, float32 [1]."""
        self._sums: torch.Tensor | None = None

    def sequence_sums(self, sequences: int) -> torch.Tensor:
        """Returns the buffer, float32 [lines, 2], for the sums of answers. It is made again where a
        step has another number of lines, which is rare.
        """
        if self._sums is None or len(self._sums) != sequences:
            self._sums = self._backend.host_buffer(2 * sequences, torch.float32).view(sequences, 2)
        return self._sums


class DiskStateBuffers:
    """Owns the buffers that moments on the disk pass through on the host. The device does not use
    them, so they are not registered. They begin at whole pages. Raises FitError where RAM is too
    short for them.
    """

    def __init__(self, rings: Sequence[Buffer], states: HostStates):
        units = [states.layouts[unit].state_counts for unit in states.placement.disk_offloaded]
        size = state_ring_bytes(units, states.optimizer)
        self.nbytes = len(rings) * size
        self.buffers: dict[Buffer, memoryview] = {}
        for ring in rings if size else ():
            memory = map_memory(size)
            if not populate(np.frombuffer(memory, np.uint8).ctypes.data, size):
                raise FitError(
                    f"RAM ran out: the buffers for moments on the disk take {in_gib(self.nbytes)}; "
                    "close other programs, or lower train.batch_size."
                )
            self.buffers[ring] = memoryview(memory)

    def close(self) -> None:
        """Frees the memory. May be called twice."""
        self.buffers.clear()

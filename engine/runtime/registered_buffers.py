"""Some host memory is read and written by the device while a step runs: boundaries, the inputs of
blocks, wait there until the backward of their block, and pieces of parked gradients pass through it
on their way to the optimizer. This file allocates that memory and registers it with the device. It
also allocates the memory that moments on the disk pass through.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from engine.errors import FitError
from engine.host.host_store import HostStore
from engine.host.mapped_memory import map_memory, populate
from engine.plan.buffers import Buffer
from engine.plan.ops import StoreBoundary
from engine.plan.step_plan import StepPlan
from engine.planes.spilled import state_ring_bytes
from engine.runtime.backend import Backend
from engine.words import in_gib

K = TypeVar("K", bound=Hashable)


class RegisteredBuffers(Generic[K]):
    """A `RegisteredBuffers` owns one host buffer of `numel` elements for each key, of exactly that
    size.
    """

    def __init__(self, keys: Sequence[K], numel: int, dtype: torch.dtype, backend: Backend):
        self.nbytes = len(keys) * numel * dtype.itemsize
        self.tensors: dict[K, torch.Tensor] = {}
        """Each tensor is flat, shape [numel]."""
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


def host_boundaries(
    plan: StepPlan, numel: int, dtype: torch.dtype, backend: Backend
) -> RegisteredBuffers[tuple[str, int]]:
    """Returns a buffer for each boundary that the plan stores on the host, by (unit, micro-batch).
    A boundary has at most `numel` elements.
    """
    keys = [(op.unit, op.micro_batch) for op in plan.ops if isinstance(op, StoreBoundary)]
    return RegisteredBuffers(keys, numel, dtype, backend)


def gradient_rings(
    plan: StepPlan, dtype: torch.dtype, backend: Backend
) -> RegisteredBuffers[Buffer]:
    """Returns the ring buffers of a plan whose gradients are parked."""
    return RegisteredBuffers(plan.gradient_rings, plan.ring_numel, dtype, backend)


class StateRings:
    """A `StateRings` owns the buffers that moments on the disk pass through on the host. The device
    does not use them, so they are not registered. They begin at whole pages. Raises FitError where
    RAM is too short for them.
    """

    def __init__(self, rings: Sequence[Buffer], store: HostStore):
        units = [store.layouts[unit].moment_counts for unit in store.spilled]
        size = state_ring_bytes(units, store.optimizer)
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

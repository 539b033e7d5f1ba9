"""Parked gradients pass through a few buffers in host memory on their way to the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from engine.host.host_store import map_memory
from engine.plan.buffers import Buffer
from engine.plan.ops import StepPlan
from engine.runtime.backend import Backend


class GradientRings:
    """A `GradientRings` owns the registered host buffers of a plan whose gradients are parked.

    numel: the number of elements of each unit's planes.
    """

    def __init__(
        self, plan: StepPlan, numel: Mapping[str, int], dtype: torch.dtype, backend: Backend
    ):
        self.tensors: dict[Buffer, torch.Tensor] = {}
        """Each tensor is flat, shape [numel of the largest unit that uses it]."""
        sizes: dict[Buffer, int] = {}
        for buffer, units in plan.gradient_rings.items():
            sizes[buffer] = max(numel[unit] for unit in units)
        self.nbytes = sum(sizes.values()) * dtype.itemsize
        self.is_refused = False
        """The system refused to register the memory, so its copies are slower."""
        self._unregister: weakref.finalize | None = None
        if not sizes:
            return
        memory = torch.frombuffer(map_memory(self.nbytes), dtype=dtype)
        memory.zero_()
        self.is_refused = not backend.register(memory.data_ptr(), self.nbytes)
        if not self.is_refused:  # as in `engine.runtime.boundaries`
            self._unregister = weakref.finalize(self, backend.unregister, memory.data_ptr())
            self._unregister.atexit = False
        start = 0
        for buffer, size in sizes.items():
            self.tensors[buffer] = memory[start : start + size]
            start += size

    def close(self) -> None:
        """Unregisters and frees the memory. May be called twice."""
        if self._unregister is not None:
            self._unregister()
        self.tensors.clear()

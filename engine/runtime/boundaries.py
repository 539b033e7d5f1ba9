"""Boundaries, the inputs of blocks, can be kept in host memory until the backward of their block.
This file allocates that memory.
"""

from __future__ import annotations

import weakref

import torch

from engine.host.mapped_memory import map_memory
from engine.plan.ops import StoreBoundary
from engine.plan.step_plan import StepPlan
from engine.runtime.backend import Backend


class HostBoundaries:
    """A `HostBoundaries` owns one registered host buffer, of exactly the size needed, for each
    boundary that the plan stores on the host.
    """

    def __init__(self, plan: StepPlan, numel: int, dtype: torch.dtype, backend: Backend):
        keys = [(op.unit, op.micro_batch) for op in plan.ops if isinstance(op, StoreBoundary)]
        self.nbytes = len(keys) * numel * dtype.itemsize
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}
        """Each tensor has the shape [numel]; its key is (unit, micro-batch)."""
        self.is_refused = False
        """The system refused to register the memory, so its copies are slower."""
        self._unregister: weakref.finalize | None = None
        if not keys:
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

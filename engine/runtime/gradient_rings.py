"""Pieces of parked gradients pass through a few buffers in host memory on their way to the
optimizer.
"""

from __future__ import annotations

import weakref

import torch

from engine.host.mapped_memory import map_memory
from engine.plan.buffers import Buffer
from engine.plan.step_plan import StepPlan
from engine.runtime.backend import Backend


class GradientRings:
    """A `GradientRings` owns the registered host buffers of a plan whose gradients are parked."""

    def __init__(self, plan: StepPlan, dtype: torch.dtype, backend: Backend):
        self.tensors: dict[Buffer, torch.Tensor] = {}
        """Each tensor is flat, shape [plan.ring_numel]."""
        size = plan.ring_numel
        self.nbytes = len(plan.gradient_rings) * size * dtype.itemsize
        self.is_refused = False
        """The system refused to register the memory, so its copies are slower."""
        self._unregister: weakref.finalize | None = None
        if not plan.gradient_rings:
            return
        memory = torch.frombuffer(map_memory(self.nbytes), dtype=dtype)
        memory.zero_()
        self.is_refused = not backend.register(memory.data_ptr(), self.nbytes)
        if not self.is_refused:  # as in `engine.runtime.boundaries`
            self._unregister = weakref.finalize(self, backend.unregister, memory.data_ptr())
            self._unregister.atexit = False
        for number, buffer in enumerate(plan.gradient_rings):
            self.tensors[buffer] = memory[number * size : (number + 1) * size]

    def close(self) -> None:
        """Unregisters and frees the memory. May be called twice."""
        if self._unregister is not None:
            self._unregister()
        self.tensors.clear()

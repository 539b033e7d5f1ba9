"""Host memory for the inputs of blocks that wait on the host for their backward."""

from __future__ import annotations

import mmap
import weakref

import torch

from engine.plan.ops import StepPlan, StoreBoundary
from engine.runtime.backend import Backend


class HostBoundaries:
    """One exact-size registered host buffer for every boundary that the plan stores on the host."""

    def __init__(
        self, plan: StepPlan, blocks: list[str], numel: int, dtype: torch.dtype, backend: Backend
    ):
        keys = [(op.unit, op.micro_batch) for op in plan.ops if isinstance(op, StoreBoundary)]
        item = torch.empty(0, dtype=dtype).element_size()
        self.nbytes = len(keys) * numel * item
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}
        self._unregister = None
        if not keys:
            return
        memory = torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=dtype)
        memory.zero_()
        backend.register(memory.data_ptr(), self.nbytes)
        # Also for an engine that did not come to be, with too little memory on the device: these
        # addresses will be another's.
        self._unregister = weakref.finalize(self, backend.unregister, memory.data_ptr())
        self._unregister.atexit = False
        self.tensors = {key: memory[k * numel : (k + 1) * numel] for k, key in enumerate(keys)}

    def close(self) -> None:
        if self._unregister is not None:
            self._unregister()
        self.tensors.clear()

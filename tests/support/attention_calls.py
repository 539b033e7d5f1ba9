"""How often kernels of attention run is counted below autograd."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.blocks.saved_attention import KERNELS


class AttentionCalls(TorchDispatchMode):
    """An `AttentionCalls` counts how often kernels of attention run while it is active."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in KERNELS
        return func(*args, **(kwargs or {}))

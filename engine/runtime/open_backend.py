"""Which backend a device has, and how its memory is given back."""

from __future__ import annotations

import gc

import torch

from engine.errors import ConfigError
from engine.runtime.backend import Backend
from engine.runtime.cpu_backend import CpuBackend
from engine.runtime.cuda_backend import CudaBackend, cuda_available


def give_memory_back() -> None:
    """What a run leaves: tensors in cycles, with its error for one, and device memory that the
    allocator keeps for more.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def open_backend(device: str) -> Backend:
    """`auto`, `cuda` or `cpu`. Raises RamstreamError when cuda is asked for and there is none."""
    if device == "cpu" or (device == "auto" and not cuda_available()):
        return CpuBackend()
    if not cuda_available():
        raise ConfigError(
            "engine.device", "cuda is asked for but no CUDA GPU is usable; choose auto or cpu."
        )
    return CudaBackend()

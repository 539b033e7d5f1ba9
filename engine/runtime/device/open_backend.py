"""The functions of this file open the backend of a device and free the memory of a run."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import torch

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.device import unasked_cpu
from engine.machine.findings import findings, without_gpu
from engine.machine.readings import CudaTrial, read
from engine.runtime.device.backend import Backend
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.device.cuda_backend import CudaBackend, cuda_available, cuda_problem


def give_memory_back() -> None:
    """Frees what a run leaves behind: tensors in reference cycles (its error keeps some, for
    example), the workspaces of cuBLAS, and device memory that torch's allocator keeps for later.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        # One of 32 MiB for each stream of each thread that has multiplied. Each run has streams and
        # threads of its own, so without this every run would leave 64 to 128 MiB for ever. Graphs
        # of the run, which know its addresses, are gone by now.
        torch._C._cuda_clearCublasWorkspaces()
        # A lost device raises its error again, and has no memory to give back.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def open_backend(device: str, index: int = 0) -> Backend:
    """Returns the backend for `auto`, `cuda` or `cpu`. index: which of the GPUs it is. Raises
    ConfigError when cuda is requested and there is no such GPU.
    """
    if device == "cpu" or (device == "auto" and not cuda_available()):
        return CpuBackend()
    if not cuda_available():
        raise ConfigError(
            "engine.device", "cuda is asked for but no CUDA GPU is usable; choose auto or cpu."
        )
    return CudaBackend(index)


def open_run_backend(config: TrainConfig) -> Backend:
    """Returns the backend for the settings of a run. Raises ConfigError as `open_backend` does, and
    where there is a GPU that torch cannot use, unless the settings ask for the CPU.
    """
    device = config.engine.device
    if device != "cpu":
        found = without_gpu(findings(replace(read("."), trial=CudaTrial(cuda_problem()))))
        if found is not None:
            raise unasked_cpu(found)
    return open_backend(device)

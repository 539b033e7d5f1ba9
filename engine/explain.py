"""What an error of the device or of the system means for a run, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable

from engine.sizes import Item
from engine.errors import DeviceError, GpuMemoryError, HostMemoryError, RamstreamError, RunError
from engine.fit import in_gib

_DEVICE_WORDS = ("CUDA error", "CUDA driver", "CUBLAS_STATUS", "cuDNN", "CUDNN_STATUS", "NVML")
_HOST_WORDS = ("can't allocate memory", "not enough memory")


def explained(error: Exception, gpu_items: Iterable[Item] = ()) -> RamstreamError | None:
    """The error that a person should read in place of `error`; None for one that is a fault of the program.

    gpu_items: what the plan gives to which buffers on the device, for an error of its memory.
    """
    import torch

    if isinstance(error, (GpuMemoryError, torch.OutOfMemoryError)):
        return GpuMemoryError(getattr(error, "in_use", ""), _planned(gpu_items))
    if isinstance(error, RamstreamError):
        return error
    if isinstance(error, OSError):
        what = error.filename if isinstance(error.filename, str) else "A file of the run"
        return RunError(f"{what} cannot be read or written ({error.strerror or error}); put that right and resume the "
                        "run.")
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in text for w in _HOST_WORDS)):
        return HostMemoryError("The host ran out of memory; choose a smaller model or batch, or free some memory.")
    if isinstance(error, RuntimeError) and any(word in text for word in _DEVICE_WORDS):
        # The first line says what happened; torch adds advice on debugging.
        first = str(error).strip().splitlines()[0].rstrip(". ")[:200]
        return DeviceError(f"The GPU failed ({first}); see with nvidia-smi whether it still answers, then resume the "
                           "run from its last checkpoint.")
    return None


def _planned(items: Iterable[Item]) -> str:
    largest = sorted(items, key=lambda item: -item.bytes)
    if not largest:
        return ""
    named = ", ".join(f"{item.name} {in_gib(item.bytes)}{f' ({item.note})' if item.note else ''}"
                      for item in largest[:4])
    rest = sum(item.bytes for item in largest[4:])
    return (f", where the plan takes {in_gib(sum(item.bytes for item in largest))}: {named}"
            + (f" and {in_gib(rest)} for the rest" if rest else ""))

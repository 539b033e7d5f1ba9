"""What an error of the device or of the system means for a run, in one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.errors import (
    DeviceError,
    GpuMemoryError,
    HostMemoryError,
    RamstreamError,
    RunError,
    first_line,
)
from engine.fit.memory_items import Item
from engine.train.memory_shortage import GpuFigures, gpu_shares, gpu_shortage, others_are_blamed
from engine.words import in_gib

_DEVICE_WORDS = ("CUDA error", "CUDA driver", "CUBLAS_STATUS", "cuDNN", "CUDNN_STATUS", "NVML")
_HOST_WORDS = ("can't allocate memory", "not enough memory")


def explained(error: Exception, gpu_items: Iterable[Item] = ()) -> RamstreamError | None:
    """The error that a person should read in place of `error`; None for one that is a fault of the
    program.

    gpu_items: what the plan gives to which buffers on the device, for an error of its memory.
    """
    if _is_of_gpu_memory(error):
        return _gpu_memory_error(error, tuple(gpu_items))
    if isinstance(error, RamstreamError):
        return error
    if isinstance(error, OSError):
        what = error.filename if isinstance(error.filename, str) else "A file of the run"
        return RunError(
            f"{what} cannot be read or written ({error.strerror or error}); put that right and "
            "resume the run."
        )
    text = " ".join(str(error).split())
    if _is_of_host_memory(error):
        note = getattr(error, _NOTE, None)
        return HostMemoryError(
            f"The host ran out of memory{f': {note.host}' if note is not None else ''}; choose a "
            "smaller model or batch, or free some memory."
        )
    if isinstance(error, RuntimeError) and any(word in text for word in _DEVICE_WORDS):
        # The first line says what happened; torch adds advice on debugging.
        return DeviceError(
            f"The GPU failed ({first_line(error)}); see with nvidia-smi whether it still answers, "
            "then resume the run from its last checkpoint."
        )
    return None


@dataclass(frozen=True)
class MemoryNote:
    """What took how much memory when an error of it came. `host`: in words; `others_before`: bytes
    of other programs on the GPU when the plan was made.
    """

    host: str
    gpu: GpuFigures
    others_before: int


def note_memory(error: BaseException, take: Callable[[], MemoryNote]) -> None:
    """Keep with an error of memory, for `explained`, what took it: to be called while it is still
    held. Other errors are left alone, and so are those of a device that no longer answers.
    """
    if not hasattr(error, _NOTE) and (_is_of_gpu_memory(error) or _is_of_host_memory(error)):
        with contextlib.suppress(Exception):
            setattr(error, _NOTE, take())


_NOTE = "memory_note"


def _is_of_gpu_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, (GpuMemoryError, torch.OutOfMemoryError))


def _is_of_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in _HOST_WORDS)
    )


def _gpu_memory_error(error: Exception, items: tuple[Item, ...]) -> GpuMemoryError:
    in_use, note = getattr(error, "in_use", ""), getattr(error, _NOTE, None)
    if note is None or not note.gpu.total:
        return GpuMemoryError(in_use, _planned(items))
    shares = gpu_shares(items, note.gpu, note.others_before)
    in_use = in_use or f"{in_gib(note.gpu.allocated)} in use of {in_gib(note.gpu.total)}"
    return GpuMemoryError(
        in_use,
        f": {gpu_shortage(shares)}{_planned(items)}",
        "end the other programs on the card, or " if others_are_blamed(shares) else "",
    )


def _planned(items: Iterable[Item]) -> str:
    largest = sorted(items, key=lambda item: -item.bytes)
    if not largest:
        return ""
    named = ", ".join(
        f"{item.name} {in_gib(item.bytes)}{f' ({item.note})' if item.note else ''}"
        for item in largest[:4]
    )
    rest = sum(item.bytes for item in largest[4:])
    return f", where the plan takes {in_gib(sum(item.bytes for item in largest))}: {named}" + (
        f" and {in_gib(rest)} for the rest" if rest else ""
    )

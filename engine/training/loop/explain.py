"""Errors of the device or the system as one sentence for the user."""

from __future__ import annotations

import contextlib
import resource
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
from engine.machine.short_memory import is_short_of_memory, memory_text, remedy
from engine.planning.fit.memory_items import Item
from engine.text import in_gib
from engine.training.loop.oom_report import (
    GpuFigures,
    gpu_oom_report,
    gpu_shares,
    others_are_blamed,
)

_DEVICE_ERRORS = ("CUDA error", "CUDA driver", "CUBLAS_STATUS", "cuDNN", "CUDNN_STATUS", "NVML")


def explained(
    error: Exception, gpu_items: Iterable[Item] = (), is_least: bool = False
) -> RamstreamError | None:
    """Returns the error that a user should read in place of `error`, or None for a fault in the
    program.

    `gpu_items` are the plan's buffers on the device, used to explain a lack of device memory.
    is_least: no plan takes less.
    """
    if _is_of_gpu_memory(error):
        return _gpu_memory_error(error, tuple(gpu_items), is_least)
    if isinstance(error, RamstreamError):
        return error
    if is_short_of_memory(error):
        return _host_memory_error(error)
    if isinstance(error, OSError):
        what = error.filename if isinstance(error.filename, str) else "A file of the run"
        return RunError(
            f"{what} cannot be read or written ({error.strerror or error}); put that right and "
            "resume the run."
        )
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and any(word in text for word in _DEVICE_ERRORS):
        # The first line names what happened; torch adds advice on debugging.
        return DeviceError(
            f"The GPU failed ({first_line(error)}); see with nvidia-smi whether it still answers, "
            "then start this program again."
        )
    return None


@dataclass(frozen=True)
class MemoryNote:
    """Memory of each item when memory ran out.

    `host` is the text for host memory. `others_before` is the number of bytes that other programs
    had on the GPU when the plan was made.
    """

    host: str
    gpu: GpuFigures
    others_before: int


def note_memory(error: BaseException, take: Callable[[], MemoryNote]) -> None:
    """Attaches a `MemoryNote` to an out-of-memory error, for `explained`.

    It must be called while the memory is still held. Other errors are left unchanged, and so are
    those from a device that no longer responds.
    """
    if hasattr(error, _NOTE):
        return
    if _is_of_gpu_memory(error) or is_short_of_memory(error):
        with contextlib.suppress(Exception):
            setattr(error, _NOTE, take())


_NOTE = "memory_note"
"""Attribute of the error that holds the note."""
_NAMED_ITEMS = 4


def _is_of_gpu_memory(error: BaseException) -> bool:
    import torch  # already imported if its memory ran out, and soon needed otherwise

    return isinstance(error, (GpuMemoryError, torch.OutOfMemoryError))


def _host_memory_error(error: Exception) -> HostMemoryError:
    note: MemoryNote | None = getattr(error, _NOTE, None)
    settings = "lower train.micro_batch_size, or train a smaller model"
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if note is None or is_limited:  # the account knows of no limit of addresses
        return HostMemoryError(
            f"The host ran out of memory: {memory_text()}; {remedy()}, {settings}."
        )
    return HostMemoryError(f"The host ran out of memory: {note.host}; {remedy()}, {settings}.")


def _gpu_memory_error(error: Exception, items: tuple[Item, ...], is_least: bool) -> GpuMemoryError:
    if isinstance(error, GpuMemoryError) and error.breakdown:  # it is explained already
        return error
    in_use = getattr(error, "in_use", "")
    note: MemoryNote | None = getattr(error, _NOTE, None)
    if note is None or not note.gpu.total:
        return GpuMemoryError(in_use, _planned(items), is_least=is_least)
    shares = gpu_shares(items, note.gpu, note.others_before)
    in_use = in_use or f"{in_gib(note.gpu.allocated)} in use of {in_gib(note.gpu.total)}"
    return GpuMemoryError(
        in_use,
        f": {gpu_oom_report(shares)}{_planned(items)}",
        "end the other programs on the card, or " if others_are_blamed(shares) else "",
        is_least,
    )


def _planned(items: Iterable[Item]) -> str:
    """Returns a clause, which continues a sentence, on what the plan takes and its largest
    items.
    """
    largest = sorted(items, key=lambda item: -item.bytes)
    if not largest:
        return ""
    total = sum(item.bytes for item in largest)
    rest = sum(item.bytes for item in largest[_NAMED_ITEMS:])
    named = ", ".join(_item_text(item) for item in largest[:_NAMED_ITEMS])
    clause = f", where the plan takes {in_gib(total)}: {named}"
    return f"{clause} and {in_gib(rest)} for the rest" if rest else clause


def _item_text(item: Item) -> str:
    note = f" ({item.note})" if item.note else ""
    return f"{item.name} {in_gib(item.bytes)}{note}"

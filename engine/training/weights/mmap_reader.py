"""Weights from mapped files of a checkpoint, whose pages are dropped once they were read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path
from typing import Any

import torch

from engine.machine.cgroups import give_back_free_memory
from engine.model.hub.dequantize import QuantizedTensor
from engine.text import MIB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_LEAST_BYTES = 4 * MIB
"""Bytes of tensors after which pages are dropped."""
_AROUND_BYTES = 2 * MIB
"""Bytes around a page that is read, within which the kernel maps further pages of the file."""
_MAPS = Path("/proc/self/maps")
"""File with the ranges of addresses of this process (proc(5))."""


class MmapReader:
    """Reads the tensors of mapped files, in the dtype in which they are stored, and drops the pages
    of the files from this process once the tensors have been used.
    """

    def __init__(self) -> None:
        self._handed_out: list[torch.Tensor] = []
        self._has_copies = False
        self._decoded_bytes = 0
        self._files: list[tuple[int, int]] | None = None

    def read(self, stored: Any) -> torch.Tensor:
        """Returns the tensor behind `stored`, which nobody has read, in its own shape. `stored` is
        a slice of safetensors, or a tensor that is a view of a file of torch.save. The result is a
        view of the file too: its pages are read when they are accessed. Of a `QuantizedTensor`, the
        parts of the weight are such views, and the result is in memory of its own.
        """
        parts = stored.parts if isinstance(stored, QuantizedTensor) else (stored,)
        views = [part[...].detach() for part in parts]
        self._handed_out += views
        if not isinstance(stored, QuantizedTensor):
            return views[0]
        tensor = stored.decoded(views)
        self._decoded_bytes += tensor.nbytes
        return tensor

    def drop(self, address: int) -> None:
        """Takes all tensors that were read since the last call, and what lies between them in their
        files, out of this process's memory. The pages stay in the kernel's cache of files, and come
        back if they are accessed again. So nobody may have changed them.

        address: where the weight was that was made of the latest tensors, and is freed.
        """
        self._has_copies |= all(tensor.data_ptr() != address for tensor in self._handed_out)
        taken = sum(tensor.nbytes for tensor in self._handed_out) + self._decoded_bytes
        if taken < _LEAST_BYTES:
            return
        if self._files is None:
            self._files = _ranges_of_files()
        ends_in: dict[tuple[int, int], list[int]] = {}
        for tensor in self._handed_out:
            start = tensor.data_ptr()
            ends_in.setdefault(self._file_of(tensor), []).extend((start, start + tensor.nbytes))
        for file, ends in ends_in.items():
            _drop_pages(file, min(ends), max(ends))
        if self._has_copies:  # of tensors that the library merged
            give_back_free_memory()  # the allocator would keep the holes that they left
        self._handed_out.clear()
        self._has_copies = False
        self._decoded_bytes = 0

    def _file_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns the range of addresses of the file that a tensor is a view of. It is empty for
        any other tensor, whose memory would be lost.
        """
        start = tensor.data_ptr()
        for first, last in self._files or ():
            if first <= start and start + tensor.nbytes <= last:
                return first, last
        return 0, 0


def _drop_pages(file: tuple[int, int], start: int, stop: int) -> None:
    """Drops the pages between two addresses of a mapped file, and those around them."""
    first = max(file[0], start // _AROUND_BYTES * _AROUND_BYTES - _AROUND_BYTES)
    last = min(file[1], stop + _AROUND_BYTES)
    if first < last:
        _libc.madvise(first, last - first, mmap.MADV_DONTNEED)


def _ranges_of_files() -> list[tuple[int, int]]:
    """Returns the ranges of addresses, each from its first to after its last, in which this process
    has mapped files. It is empty where the system does not list them.
    """
    found = []
    with contextlib.suppress(OSError):
        for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line is: range, permissions, offset, device, inode, path.
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            if inode != "0" and path and path[0].startswith("/"):
                first, _, last = addresses.partition("-")
                found.append((int(first, 16), int(last, 16)))
    return found

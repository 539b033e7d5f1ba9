"""Host memory that a device reads and writes by DMA: anonymous memory mappings, in huge pages where
the kernel supports them. They are touched when they are allocated, so that a lack of memory is
found then and not in the middle of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module yet

_MADV_REMOVE = 9  # neither is this one

_SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_memory(size: int) -> mmap.mmap:
    """Maps `size` bytes of private memory, in huge pages, that a forked process does not get: the
    device reads and writes these pages, so they must never be copied. Raises OSError or
    OverflowError where the system refuses.
    """
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        # Where the kernel lacks one of these features, training is slower or a fork takes more
        # memory, but results do not change.
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region


def populate(address: int, size: int) -> bool:
    """Backs a range of addresses with zeroed memory, and returns whether there was enough."""
    if _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() != errno.EINVAL:
        return False
    # An older kernel does not know the advice, but writing has the same effect.
    ctypes.memset(address, 0, size)
    return True


def shared_memory_has_huge_pages() -> bool:
    """Returns whether memory that processes share may be in huge pages, which a setting of the
    kernel decides; True where the kernel does not say.
    """
    try:
        setting = _SHARED_PAGES.read_text()
    except OSError:
        return True
    return "[never]" not in setting and "[deny]" not in setting


def discard(address: int, size: int) -> None:
    """Gives the memory of a range of addresses back to the system. The addresses stay valid, and
    are read as zeros from then on.
    """
    _libc.madvise(address, size, mmap.MADV_DONTNEED)


def discard_shared(address: int, size: int) -> None:
    """Gives the memory of a range of addresses back to the system, for all processes that share it.
    The addresses stay valid, and are read as zeros from then on.
    """
    _libc.madvise(address, size, _MADV_REMOVE)

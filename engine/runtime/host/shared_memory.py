"""Planes can be in memory that several processes of one node share. RAM holds the states once then.

The process that owns the planes makes a file in memory for each of them (`memfd_create`), which no
folder lists. The others open these files through /proc and map the same pages. The system frees
them when the last of the processes has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.runtime.host.mapped_memory import discard_shared, populate
from engine.runtime.host.ram_planes import Key


@dataclass(frozen=True)
class SharedPlanes:
    """Where other processes find planes."""

    process: int
    files: Mapping[Key, int] = field(default_factory=dict)
    """Descriptor of the process for the file of each plane."""

    def path(self, key: Key) -> str:
        return f"/proc/{self.process}/fd/{self.files[key]}"


class OwnedMemory:
    """Makes planes that other processes may open."""

    is_new = True

    def __init__(self) -> None:
        self._files: dict[Key, int] = {}
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each plane has a file, and a deep model has hundreds of planes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    @property
    def planes(self) -> SharedPlanes:
        """Where the planes are that are allocated now."""
        return SharedPlanes(os.getpid(), dict(self._files))

    def map(self, key: Key, size: int) -> mmap.mmap:
        """Returns `size` new bytes for a plane. Raises OSError or OverflowError where the system
        refuses.
        """
        file = os.memfd_create("ramstream")
        try:
            os.ftruncate(file, size)
            region = _mapped(file, size)
        except BaseException:
            os.close(file)
            raise
        self._files[key] = file
        return region

    def back(self, address: int, size: int) -> bool:
        """Backs addresses with memory, and returns whether there was enough."""
        return populate(address, size)

    def discard(self, address: int, size: int) -> None:
        """Frees the memory of addresses, which stay valid."""
        discard_shared(address, size)

    def forget(self, key: Key) -> None:
        """Says that a plane is released."""
        if key in self._files:
            os.close(self._files.pop(key))


class OpenedMemory:
    """Access to planes of another process."""

    is_new = False

    def __init__(self, planes: SharedPlanes):
        self._planes = planes

    def map(self, key: Key, size: int) -> mmap.mmap:
        """Returns the memory of a plane. Raises OSError where the other process has ended."""
        file = os.open(self._planes.path(key), os.O_RDWR)
        try:
            return _mapped(file, size)
        finally:
            os.close(file)

    def back(self, address: int, size: int) -> bool:  # noqa: ARG002  as for other memory
        """Does nothing: the owner has backed the plane."""
        return True

    def discard(self, address: int, size: int) -> None:
        """Does nothing: the plane belongs to another process."""

    def forget(self, key: Key) -> None:
        """Does nothing: a mapping needs no open file."""


def _mapped(file: int, size: int) -> mmap.mmap:
    region = mmap.mmap(file, size, flags=mmap.MAP_SHARED)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        # Without one of these features, training is slower or a fork takes more memory.
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region

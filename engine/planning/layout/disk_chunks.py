"""Moments of some units may be on the disk (`engine.disk`). They are read, updated and written back
in chunks. This file says where the chunks are in the file of their unit, and how much memory they
pass through. No torch.

A chunk has the moments of so many elements that reading one is 8 to 32 MiB: large enough for the
full speed of a disk, and small enough that a few of them take little RAM. No chunk cuts a block of
8-bit codes. All states of a chunk follow each other in the file, so that one read brings them.
They take the same bytes, and each begins at a whole page, as direct reads and writes demand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.config.optimizers import OPTIMIZERS, Optimizer
from engine.planning.layout.layout import UnitLayout
from engine.planning.layout.optimizer_states import StateCounts
from engine.planning.schedule.shards import cut

DISK_CHUNK_NUMEL = 1 << 22
"""Number of elements of a chunk, the last one of a unit fewer. They are whole blocks of codes."""
PAGE = 4096
"""Bytes at whose multiples direct reads and writes begin and end, in memory and in the file."""


@dataclass(frozen=True)
class DiskChunk:
    """A chunk of the moments of one unit."""

    start: int
    """First element in the unit."""
    begin: int
    """First byte in a plane of states."""
    end: int
    offset: int
    """First byte in the unit's file."""
    planes: tuple[str, ...]
    """Planes of the states of the optimizer."""

    @property
    def bytes(self) -> int:
        """Bytes of each state."""
        return self.end - self.begin

    @property
    def room(self) -> int:
        """Bytes that each state takes of the file and of a ring buffer."""
        return whole_pages(self.bytes)

    @property
    def rooms(self) -> int:
        """Bytes that all states take of the file and of a ring buffer."""
        return len(self.planes) * self.room

    @property
    def file_end(self) -> int:
        """Byte of the unit's file before which the chunk ends."""
        return self.offset + self.rooms


def disk_chunks(layout: UnitLayout, optimizer: Optimizer) -> tuple[DiskChunk, ...]:
    """Returns the chunks of the moments of a unit, in order."""
    found: list[DiskChunk] = []
    offset, planes = 0, OPTIMIZERS[optimizer].planes
    for start, stop in cut(layout.numel, DISK_CHUNK_NUMEL):
        begin, end = layout.state_bounds(optimizer, planes[0], start, stop)
        found.append(DiskChunk(start, begin, end, offset, planes))
        offset = found[-1].file_end
    return tuple(found)


def disk_chunk_count(numel: int) -> int:
    """Returns the number of chunks of the moments of a unit of `numel` elements."""
    return -(-numel // DISK_CHUNK_NUMEL)


def state_ring_bytes(units: Collection[StateCounts], optimizer: Optimizer) -> int:
    """Returns the bytes of a ring buffer for chunks of any of `units`."""
    most = [counts.most_bytes(optimizer, min(DISK_CHUNK_NUMEL, counts.numel)) for counts in units]
    return max((sum(map(whole_pages, states.values())) for states in most), default=0)


def whole_pages(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE

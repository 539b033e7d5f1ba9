"""What is said of memory is worked out here: its most, its limit, and whether it stays as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.view.memory_growth import MemoryGrowth, memory_growth
from app.words import in_bytes
from engine.runs.snapshot import RunSnapshot


@dataclass(frozen=True)
class MemoryKind:
    """A `MemoryKind` is host or GPU memory as a run used it."""

    name: str
    most: int
    """So many bytes were in use at most so far."""
    limit: int
    """So many bytes can be in use; 0 where that is not known."""
    growth: MemoryGrowth


def memory_kinds(snapshot: RunSnapshot) -> list[MemoryKind]:
    """Returns host memory, and GPU memory where there is a GPU."""
    memory = snapshot.memory
    if not len(memory):
        return []
    host = MemoryKind(
        "host",
        int(np.max(memory.host_rss)),
        memory.host_total[-1],
        memory_growth(memory.step, memory.host_rss),
    )
    if not memory.gpu_total[-1]:
        return [host]
    # What is allocated changes within a step, so its peak is compared where it was recorded.
    values = memory.gpu_peak if any(memory.gpu_peak) else memory.gpu_allocated
    gpu = MemoryKind(
        "GPU", int(np.max(values)), memory.gpu_total[-1], memory_growth(memory.step, values)
    )
    return [host, gpu]


def growth_words(found: MemoryGrowth) -> str:
    """Returns words to put after the most bytes: that memory grows, or since when it does not."""
    if found.is_growing:
        return f", growing: {in_bytes(found.grown)} more since step {found.grows_since:,}"
    if found.steady_since is None:
        return ""
    # Rounded up to a tenth of a percent, so that the samples do lie within what is said.
    percent = math.ceil(1000 * found.share) / 10
    return f", flat since step {found.steady_since:,} (± {percent:g} %)"

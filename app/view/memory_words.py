"""What there is to say of memory: its most, its limit, and whether it stays as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.view.memory_growth import MemoryGrowth, memory_growth
from app.words import in_bytes
from engine.runs.snapshot import RunSnapshot


@dataclass(frozen=True)
class MemoryKind:
    """Host or GPU memory: its most bytes so far, its limit (0 where none is known), and whether it
    stays as it is.
    """

    name: str
    most: int
    limit: int
    growth: MemoryGrowth


def memory_kinds(snapshot: RunSnapshot) -> list[MemoryKind]:
    """Host memory, and GPU memory where there is a GPU: its peak, since what is allocated changes
    within a step.
    """
    memory = snapshot.memory
    if not len(memory):
        return []
    kinds = [
        MemoryKind(
            "host",
            int(np.max(memory.host_rss)),
            memory.host_total[-1],
            memory_growth(memory.step, memory.host_rss),
        )
    ]
    if memory.gpu_total[-1]:
        values = memory.gpu_peak if any(memory.gpu_peak) else memory.gpu_allocated
        kinds.append(
            MemoryKind(
                "GPU", int(np.max(values)), memory.gpu_total[-1], memory_growth(memory.step, values)
            )
        )
    return kinds


def growth_words(found: MemoryGrowth) -> str:
    """To go on with after the most bytes."""
    if found.is_growing:
        return f", growing: {in_bytes(found.grown)} more since step {found.grows_since:,}"
    if found.steady_since is None:
        return ""
    return f", flat since step {found.steady_since:,} (± {math.ceil(1000 * found.share) / 10:g} %)"

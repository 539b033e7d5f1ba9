"""Statements about memory are worked out here: its peak, its limit, and whether it is steady."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.view.memory_growth import MemoryGrowth, memory_growth
from app.words import in_bytes
from engine.runs.snapshot import RunSnapshot


@dataclass(frozen=True)
class MemoryKind:
    """A `MemoryKind` is host or GPU memory, as used by a run."""

    name: str
    most: int
    """At most this many bytes were in use so far."""
    limit: int
    """At most this many bytes can be in use; it is 0 if the limit is not known."""
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
    # The allocated amount varies within a step, so its peak is compared if it was recorded.
    values = memory.gpu_peak if any(memory.gpu_peak) else memory.gpu_allocated
    gpu = MemoryKind(
        "GPU", int(np.max(values)), memory.gpu_total[-1], memory_growth(memory.step, values)
    )
    return [host, gpu]


def full_at(snapshot: RunSnapshot, kind: MemoryKind) -> int | None:
    """Returns the step at which memory that grows would reach its limit at the present rate, or
    None if the limit is not known.
    """
    if not kind.limit or kind.growth.per_step <= 0:
        return None
    left = (kind.limit - kind.most) / kind.growth.per_step
    return max(snapshot.step, int(snapshot.step + left))


def is_in_danger(snapshot: RunSnapshot, kind: MemoryKind) -> bool:
    """Returns whether memory grows and would be full before the end of an active run, or whether
    that cannot be said because its limit is not known.
    """
    if snapshot.is_over or not kind.growth.is_growing:
        return False
    full = full_at(snapshot, kind)
    return full is None or full < snapshot.total_steps


def growth_words(found: MemoryGrowth) -> str:
    """Returns words to follow the peak: that memory grows, or since when it has been steady."""
    if found.is_growing:
        return f", growing: {in_bytes(found.grown)} more since step {found.grows_since:,}"
    if found.steady_since is None:
        return ""
    # It is rounded up to a tenth of a percent, so that the samples are within the stated range.
    percent = math.ceil(1000 * found.share) / 10
    return f", flat since step {found.steady_since:,} (± {percent:g} %)"

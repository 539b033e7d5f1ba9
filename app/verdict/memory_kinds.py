"""Summaries of a run's samples of memory: their peak and limit, what was predicted, and whether
they grow.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np

from app.labels import in_bytes
from app.verdict.memory_growth import MemoryGrowth, memory_growth
from engine.runs.record.snapshot import RunSnapshot

WARM_UP_STEPS = 20
"""Number of steps of a session after which samples of memory are judged."""


@dataclass(frozen=True)
class MemoryKind:
    """Host or GPU memory, as used by a run."""

    name: str
    most: int
    """Largest number of bytes in use so far."""
    limit: int
    """Largest number of bytes that can be in use; 0 if the limit is not known."""
    predicted: float
    """Largest number of bytes that was predicted; 0 if nothing was."""
    growth: MemoryGrowth
    """Growth in the samples of the latest session."""
    used: np.ndarray
    """Bytes in use [samples] after the first steps of the latest session. For a GPU they count all
    programs on the card.
    """

    @property
    def full_name(self) -> str:
        return "RAM" if self.name == "host" else f"{self.name} memory"


def memory_kinds(snapshot: RunSnapshot) -> list[MemoryKind]:
    """Returns RAM, and GPU memory where there is a GPU."""
    memory = snapshot.memory
    if not len(memory):
        return []
    begun = snapshot.resumed_step or 0
    first = bisect.bisect_right(memory.step, begun)
    warm = bisect.bisect_right(memory.step, begun + WARM_UP_STEPS)
    steps = memory.step[first:]
    host = MemoryKind(
        "host",
        int(np.max(memory.host_rss)),
        memory.host_total[-1],
        predicted_bytes(snapshot, "host_bytes"),
        memory_growth(steps, memory.host_rss[first:]),
        np.array(memory.host_rss[warm:]),
    )
    if not memory.gpu_total[-1]:
        return [host]
    # The allocated amount varies within a step, so its peak is compared if it was recorded.
    values = memory.gpu_peak if any(memory.gpu_peak) else memory.gpu_allocated
    gpu = MemoryKind(
        "GPU",
        int(np.max(values)),
        memory.gpu_total[-1],
        predicted_bytes(snapshot, "gpu_peak_bytes"),
        memory_growth(steps, values[first:]),
        np.maximum(memory.gpu_driver[warm:], values[warm:]),
    )
    return [host, gpu]


def predicted_bytes(snapshot: RunSnapshot, quantity: str) -> float:
    """Returns what was predicted for a quantity of the record; 0 if nothing was."""
    if snapshot.prediction_check is None:
        return 0.0
    compared = snapshot.prediction_check.quantities.get(quantity) or {}
    return compared.get("predicted") or 0.0


def full_at(snapshot: RunSnapshot, kind: MemoryKind) -> int | None:
    """Returns the step at which memory that grows would reach its limit at the present rate, or
    None if it would not: it does not grow, or it grows ever more slowly.
    """
    growth = kind.growth
    left = kind.limit - kind.most
    if not kind.limit or not growth.is_growing or growth.to_come < left:
        return None
    return max(snapshot.step, int(snapshot.step + left / growth.per_step))


def growth_text(found: MemoryGrowth) -> str:
    """Returns words to follow the peak: that memory grows, or since when it has been steady."""
    if found.is_growing:
        return f", growing: {in_bytes(found.grown)} more since step {found.grows_since:,}"
    if found.steady_since is None:
        return ""
    # It is rounded up to a tenth of a percent, so that the samples are within the stated range.
    percent = math.ceil(1000 * found.share) / 10
    return f", flat since step {found.steady_since:,} (± {percent:g} %)"

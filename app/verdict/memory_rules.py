"""Whether a run's memory lasts to its end. All functions are pure.

Memory is judged against its limit and against what was predicted: a program that fills its caches
takes more with every step, and is in no danger by that.
"""

from __future__ import annotations

import numpy as np

from app.labels import in_bytes, in_share, in_time
from app.verdict.findings import Finding
from app.verdict.memory_kinds import MemoryKind, full_at, memory_kinds
from engine.runs.record.snapshot import RECENT_STEPS, RunSnapshot
from engine.text import GIB

FEWEST_SAMPLES = 30
"""Least number of samples after the first steps."""
GROWTH_SHARE = 0.02
"""Share of the limit below which growth is that of a program that warms up."""
LEAST_FREE_SHARE, LEAST_FREE_BYTES, MOST_FREE_SHARE = 0.05, GIB, 0.1
"""Bounds of free memory: it runs short where less than 5 % of its limit or less than 1 GiB is free.
On a small machine it is 10 %, since a GiB would be most of it.
"""
SHORT_SAMPLES, SHORT_WITHIN = 3, 12
"""Samples in a row that must be short, and latest samples that they are among. So the finding is
withdrawn after ten good ones.
"""
FORECAST_ERROR = 0.02
"""Share by which memory may differ from its prediction and be in no danger."""
SOON_SECONDS = 600.0
"""Seconds within which memory must be full to be the most urgent finding."""


def of_memory(snapshot: RunSnapshot) -> list[Finding]:
    """Returns what is wrong with the memory of an active run, and calm growth that can be seen."""
    found = []
    for kind in memory_kinds(snapshot):
        if len(kind.used) < FEWEST_SAMPLES or not kind.limit:
            continue
        if runs_short(kind):
            found.append(_short(kind))
        elif kind.growth.grown > GROWTH_SHARE * kind.limit:
            found.append(_growing(snapshot, kind))
    return found


def in_danger(snapshot: RunSnapshot) -> bool:
    """Returns whether the memory of an active run is in danger."""
    return not snapshot.is_over and any(found.is_alarm for found in of_memory(snapshot))


def runs_short(kind: MemoryKind) -> bool:
    """Returns whether too little memory was free in some latest samples, and more was used than
    predicted.
    """
    used = kind.used[-SHORT_WITHIN:]
    short = (kind.limit - used < _least_free(kind.limit)) & (
        used > (1 + FORECAST_ERROR) * kind.predicted
    )
    in_a_row = np.lib.stride_tricks.sliding_window_view(short, SHORT_SAMPLES).all(axis=1)
    return bool(in_a_row.any())


def _least_free(limit: int) -> float:
    return max(LEAST_FREE_SHARE * limit, min(LEAST_FREE_BYTES, MOST_FREE_SHARE * limit))


def _growing(snapshot: RunSnapshot, kind: MemoryKind) -> Finding:
    full = full_at(snapshot, kind)
    grown = kind.growth
    share = in_share(grown.grown / kind.limit)
    evidence = (
        f"It grew in each quarter of the samples since step {grown.grows_since:,}, by "
        f"{in_bytes(grown.grown)} in all: {share} of its limit."
    )
    of = f"{in_bytes(kind.most)} of {in_bytes(kind.limit)}"
    if full is None or full >= snapshot.total_steps:
        return Finding(
            "memory",
            "calm",
            f"{kind.full_name} grows, but lasts to the end: {of} now.",
            "",
            evidence,
        )
    pace = float(np.median(snapshot.steps.seconds[-RECENT_STEPS:])) if len(snapshot.steps) else 0.0
    left = (full - snapshot.step) * pace
    return Finding(
        "memory ends soon" if left < SOON_SECONDS else "memory in danger",
        "warn",
        f"{kind.full_name} grows, and will be full at about step {full:,} of "
        f"{snapshot.total_steps:,}, in {in_time(left)}: {of} now.",
        "Save now. To free the memory, stop and resume.",
        evidence,
    )


def _short(kind: MemoryKind) -> Finding:
    used = int(np.max(kind.used[-SHORT_WITHIN:]))
    predicted = f"; {in_bytes(kind.predicted)} were predicted" if kind.predicted else ""
    return Finding(
        "memory in danger",
        "warn",
        f"{kind.full_name} runs short: {in_bytes(max(0, kind.limit - used))} of "
        f"{in_bytes(kind.limit)} are free.",
        "Save now, and end other programs that take memory.",
        f"{SHORT_SAMPLES} samples in a row had less than {in_bytes(_least_free(kind.limit))} free"
        f"{predicted}.",
    )


def of_grown_memory(snapshot: RunSnapshot) -> list[Finding]:
    """Returns how much memory grew in a run that is over, where it was much."""
    found = []
    for kind in memory_kinds(snapshot):
        grown = kind.growth
        if not kind.limit or grown.grown <= GROWTH_SHARE * kind.limit:
            continue
        text = (
            f"{kind.full_name} grew by {in_bytes(grown.grown)} after step {grown.grows_since:,}, "
            f"to {in_bytes(kind.most)} of {in_bytes(kind.limit)}."
        )
        share = in_share(grown.grown / kind.limit)
        found.append(Finding("memory", "calm", text, "", f"That is {share} of its limit."))
    return found

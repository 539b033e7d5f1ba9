"""Units of memory are defined here, and sizes, times and counts are formatted as text."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


def in_hours(seconds: float) -> str:
    """Returns an approximate time such as "45 s", "12 min", "3.4 h" or "2.1 days"."""
    if seconds >= 172_800:
        return f"{seconds / 86_400:,.3g} days"
    if seconds >= 7_200:
        return f"{seconds / 3_600:,.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:,.3g} min"
    return f"{seconds:,.0f} s"


def counted(count: int, thing: str) -> str:
    """Returns a count with its noun: "1 round", "2 rounds", "3 micro-batches"."""
    if count == 1:
        return f"{count:,} {thing}"
    plural = "es" if thing.endswith("ch") else "s"
    return f"{count:,} {thing}{plural}"


def in_seconds(seconds: float) -> str:
    """Returns a time such as "0.034 s", "2.41 s", "11.5 s" or "1,234 s"."""
    # These limits are the points at which rounding adds a digit: 9.995 would be written as 10.0.
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 9.995:
        return f"{seconds:.1f} s"
    return f"{seconds:.3g} s"


def in_gib(count: float) -> str:
    """Returns a size such as "12.3 GiB", "312 MiB" or "4 KiB"."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:,.0f} MiB"
    return f"{count / 1024:,.0f} KiB"

"""Sizes, times and counts as text, and the units of memory."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


def in_hours(seconds: float) -> str:
    """Returns a time in its two largest units, such as "45 s", "3 min 20 s", "2 h 5 min" or
    "3 d 4 h".
    """
    if 0 < seconds < 0.5:
        return "under 1 s"
    whole = round(seconds)
    for name, size, smaller, smaller_size in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            text = f"{whole // size} {name}"
            return f"{text} {rest} {smaller}" if rest else text
    return f"{whole} s"


def counted(count: int, thing: str) -> str:
    """Returns a count with its noun: "1 round", "2 rounds", "3 micro-batches"."""
    if count == 1:
        return f"{count:,} {thing}"
    plural = "es" if thing.endswith("ch") else "s"
    return f"{count:,} {thing}{plural}"


def in_seconds(seconds: float) -> str:
    """Returns a time such as "0.034 s", "2.41 s", "11.5 s", "345 s" or "20 min 34 s"."""
    if seconds >= 600:
        return in_hours(seconds)
    # These limits are the points at which rounding adds a digit: 9.995 would be written as 10.0.
    if seconds >= 99.95:
        return f"{seconds:.0f} s"
    if seconds >= 9.995:
        return f"{seconds:.1f} s"
    return f"{seconds:.3g} s"


def in_gib(count: float) -> str:
    """Returns a size such as "12.3 GiB", "312 MiB", "4 KiB" or "300 bytes"."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:,.0f} MiB"
    if 0 < abs(count) < 1024:
        return counted(round(count), "byte")
    return f"{count / 1024:,.0f} KiB"


def in_gb(count: float) -> str:
    """Returns a size in units of a thousand, such as "12.35 GB", "7.1 MB" or "4 KB"."""
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    if count >= 1e6:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e3:,.0f} KB" if count >= 1e3 or not count else counted(round(count), "byte")


def in_percent(part: float, whole: float) -> str:
    """Returns which share of the whole a part is, such as "17 %": "under 1 %" and "over 99 %" where
    rounding would turn something into nothing, or into all.
    """
    share = 100 * part / whole
    if 0 < share < 1:
        return "under 1 %"
    return "over 99 %" if 99 < share < 100 else f"{share:,.0f} %"


def billions(count: int) -> str:
    """Returns a number of parameters as text, such as "7.62 billion" or "860,000"."""
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.2f} million"

"""Units of memory, and how sizes, times and counts are said in words."""

from __future__ import annotations

GIB, MIB = 1 << 30, 1 << 20


def in_hours(seconds: float) -> str:
    """45 s, 12 min, 3.4 h, 2.1 days."""
    for size, unit in ((172_800, "days"), (7_200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86_400, 'h': 3_600, 'min': 60}[unit]:,.3g} {unit}"
    return f"{seconds:,.0f} s"


def counted(count: int, thing: str) -> str:
    """1 round, 2 rounds, 3 micro-batches."""
    return f"{count:,} {thing}" + ("" if count == 1 else "es" if thing.endswith("ch") else "s")


def in_seconds(seconds: float) -> str:
    """0.034 s, 2.41 s, 11.5 s, 1,234 s."""
    return (
        f"{seconds:,.0f} s"
        if seconds >= 99.95
        else f"{seconds:.1f} s"
        if seconds >= 9.995
        else f"{seconds:.3g} s"
    )


def in_gib(count: float) -> str:
    """12.3 GiB; 312 MiB or 4 KiB for what is smaller."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / MIB:,.0f} MiB" if abs(count) >= MIB else f"{count / 1024:,.0f} KiB"

"""A function that counts its calls."""

from __future__ import annotations

from pathlib import Path


def counted() -> dict[str, int]:
    """What the kernel has read from disks and written to them for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}

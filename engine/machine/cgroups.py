"""Memory and cores that this process may use: what the host has, within the limits of its control
groups. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
from pathlib import Path

import psutil

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def sample_host_memory() -> tuple[int, int]:
    """(resident bytes of this process, bytes that can still be allocated within the real limits)."""
    available = min(psutil.virtual_memory().available, cgroup_memory()[1])
    return psutil.Process().memory_info().rss, max(0, available)


def private_memory() -> int:
    """Resident bytes of this process that count as taken. Pages of files, its libraries', do not:
    the kernel can drop them, and `ram_available` counts them as available.
    """
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def give_back_free_memory() -> None:
    """Return to the kernel what the allocator of the C library keeps of freed memory. How much it
    keeps depends on which thread freed what when: without this, the same program comes to resident
    sizes a hundred MiB apart. Only glibc can.
    """
    with contextlib.suppress(
        AttributeError, OSError, TypeError
    ):  # another C library; Windows opens no library without a name
        ctypes.CDLL(None).malloc_trim(0)


# ---------------------------------------------------------------- CPU


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its CPU affinity within its cgroups' quota, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders(root, "cpu"):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(
            folder / "cpu.cfs_period_us"
        )
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, math.ceil(cores))


# ---------------------------------------------------------------- cgroups


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(limit, bytes still free below it), each the smallest over this process's cgroup and all
    above it, v1 and v2; 2**60 where nothing limits. File pages that the kernel can drop count as
    free.
    """
    limit = free = _NO_LIMIT
    for folder in _cgroup_folders(root, "memory"):
        limits = [
            _number(folder / name)
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        ]
        here = min([value for value in limits if value is not None], default=_NO_LIMIT)
        if here >= _NO_LIMIT:
            continue
        used = _number(folder / "memory.current")
        if used is None:
            used = _number(folder / "memory.usage_in_bytes") or 0
        limit, free = min(limit, here), min(free, here - max(0, used - _reclaimable(folder)))
    return limit, max(0, free)


def _reclaimable(folder: Path) -> int:
    words = _words(folder / "memory.stat")
    values = dict(zip(words[::2], words[1::2]))
    total = "total_" if "total_inactive_file" in values else ""
    names = (f"{total}inactive_file", f"{total}active_file", "slab_reclaimable")
    return sum(int(values.get(name, 0)) for name in names)


@functools.lru_cache(maxsize=8)
def _cgroup_folders(root: Path, controller: str) -> tuple[Path, ...]:
    """This process's cgroup for a controller and every cgroup above it that can be seen, innermost
    first.
    """
    mounts: list[tuple[bool, str, Path]] = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or not right or right[0] not in ("cgroup", "cgroup2"):
            continue
        if right[0] == "cgroup2" or controller in right[-1].split(","):
            mounts.append(
                (right[0] == "cgroup2", left[3], root / left[4].replace("\\040", " ").lstrip("/"))
            )
    found: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        second = number == "0" and not controllers
        if not second and controller not in controllers.split(","):
            continue
        for is_second, mount_root, mount_point in mounts:
            if is_second != second:
                continue
            inside = Path(path)
            # A container may see its own cgroup mounted as the top while its path is the host's.
            relative = (
                inside.relative_to(mount_root) if inside.is_relative_to(mount_root) else Path()
            )
            folder = mount_point / relative
            found += [
                folder,
                *(parent for parent in folder.parents if parent.is_relative_to(mount_point)),
            ]
    return tuple(dict.fromkeys(found))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None

"""Memory and cores that a process may use, within the limits of its control groups. No torch."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def sample_host_memory() -> tuple[int, int]:
    """Returns the resident bytes of this process, and the bytes that can still be allocated within
    the limits of RAM and cgroups.
    """
    available = min(psutil.virtual_memory().available, cgroup_memory()[1])
    return psutil.Process().memory_info().rss, max(0, available)


def private_memory(pid: int | None = None) -> int:
    """Returns the resident bytes of a process without pages of files, such as those of its
    libraries, and without memory that it shares. The kernel can drop pages of files, and
    `ram_available` counts them as available. It is this process without `pid`; one that has ended
    has none.
    """
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return memory.rss - memory.shared


def give_back_free_memory() -> None:
    """Returns freed memory, which the allocator of the C library keeps, to the kernel.

    How much the allocator keeps depends on the order in which threads free memory. Without this
    call, the resident size of the same program varies by a hundred MiB.
    """
    ctypes.CDLL(None).malloc_trim(0)


# ---------------------------------------------------------------- CPU


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the cores that this process may use: those of its CPU affinity, limited by the quota
    of its cgroups, at least 1.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders(root, "cpu"):
        quota = _fields(folder / "cpu.max")  # v2
        if not quota:
            quota = _fields(folder / "cpu.cfs_quota_us") + _fields(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, math.ceil(cores))


# ---------------------------------------------------------------- cgroups


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Returns the memory limit, and the bytes that are still free below it. Each is the smallest
    over this process's cgroup and all above it, v1 and v2. Both are 2**60 where there is no limit.
    File pages that the kernel can drop count as free.
    """
    limit = free = _NO_LIMIT
    for folder in _cgroup_folders(root, "memory"):
        here = _limit_of(folder)
        if here >= _NO_LIMIT:
            continue
        used = _number(folder / "memory.current")  # v2
        if used is None:
            used = _number(folder / "memory.usage_in_bytes") or 0
        limit = min(limit, here)
        free = min(free, here - max(0, used - _reclaimable(folder)))
    return limit, max(0, free)


def _limit_of(folder: Path) -> int:
    """Returns the smallest memory limit that a cgroup sets for itself."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [_number(folder / name) for name in names]
    return min([limit for limit in limits if limit is not None], default=_NO_LIMIT)


def _reclaimable(folder: Path) -> int:
    """Returns the bytes of a cgroup that the kernel can drop."""
    fields = _fields(folder / "memory.stat")
    values = dict(zip(fields[::2], fields[1::2]))
    # In v1, values without the prefix leave out child cgroups.
    total = "total_" if "total_inactive_file" in values else ""
    names = (f"{total}inactive_file", f"{total}active_file", "slab_reclaimable")
    return sum(int(values.get(name, 0)) for name in names)


@dataclass(frozen=True)
class _Mount:
    """A cgroup hierarchy that is mounted at `point`, with the cgroup `root` at the top of the
    mount.
    """

    is_v2: bool
    root: str
    point: Path

    def folders(self, path: str) -> Iterator[Path]:
        """Yields the folder of the cgroup `path` and of every one above it, innermost first."""
        inside = Path(path)
        # In a container, its own cgroup may be mounted as the top, while the path is still that on
        # the host.
        relative = inside.relative_to(self.root) if inside.is_relative_to(self.root) else Path()
        folder = self.point / relative
        yield folder
        for parent in folder.parents:
            if parent.is_relative_to(self.point):
                yield parent


@functools.lru_cache(maxsize=8)
def _cgroup_folders(root: Path, controller: str) -> tuple[Path, ...]:
    """Returns the folders of this process's cgroup for a controller and of every visible cgroup
    above it, innermost first.
    """
    mounts = list(_mounts(root, controller))
    found: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        # A line is hierarchy:controllers:path. Version 2 has number 0 and names no controllers.
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.is_v2 == is_v2:
                found += mount.folders(path)
    return tuple(dict.fromkeys(found))


def _mounts(root: Path, controller: str) -> Iterator[_Mount]:
    """Yields the mounted cgroup hierarchies that may have `controller`."""
    for line in _lines(root / "proc/self/mountinfo"):
        # Left of the dash are ids, root and mount point; right of it are type, source and options.
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or not right or right[0] not in ("cgroup", "cgroup2"):
            continue
        is_v2 = right[0] == "cgroup2"
        if is_v2 or controller in right[-1].split(","):
            point = left[4].replace("\\040", " ")  # the kernel's escape for a space
            yield _Mount(is_v2, left[3], root / point.lstrip("/"))


# ---------------------------------------------------------------- files


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file, or an empty list where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _fields(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    """Returns the number that a file begins with, or None where it does not begin with a number."""
    fields = _fields(path)
    return int(fields[0]) if fields and fields[0].isdigit() else None

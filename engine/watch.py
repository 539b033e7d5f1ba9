"""Host memory while a run goes on: seen to run low before the kernel ends the process."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from engine.errors import HostMemoryError
from engine.fit import HOST_MARGIN_BYTES, in_gib
from engine.machine import cgroup_memory, sample_host_memory

LOOK_SECONDS = 0.5
MARGIN_BYTES = HOST_MARGIN_BYTES // 2
"""Half of what the fit report sets aside, so that a run which it lets pass is not stopped by the report's own error."""


class MemoryWatch:
    """Judges samples of host memory. `held`: bytes that this process holds on purpose, by name.

    Low means below MARGIN_BYTES in two looks one after the other, or below half of it in one: another program's short
    peak ends no run. Any thread may look; the one that can stop the run checks.
    """

    def __init__(self, held: Mapping[str, int]):
        self._held = dict(held)
        self._looked_at = 0.0
        self._before: int | None = None
        self._problem: str | None = None

    def look(self) -> tuple[int, int]:
        """Sample now; (resident bytes of this process, bytes that can still be allocated)."""
        rss, available = sample_host_memory()
        self._looked_at = time.perf_counter()
        lasting = self._before is not None and self._before < MARGIN_BYTES
        self._before = available
        if available < MARGIN_BYTES // 2 or (available < MARGIN_BYTES and lasting):
            self._problem = self._sentence(rss, available)
        return rss, available

    def check(self) -> None:
        """Raises HostMemoryError, which says what takes how much, once memory has run low. Looks by itself when nobody
        did for LOOK_SECONDS."""
        if time.perf_counter() - self._looked_at >= LOOK_SECONDS:
            self.look()
        if self._problem is not None:
            raise HostMemoryError(self._problem)

    def _sentence(self, rss: int, available: int) -> str:
        limit = min(psutil.virtual_memory().total, cgroup_memory()[0])
        parts = [f"{name} {in_gib(size)}" for name, size in self._held.items() if size]
        parts.append(f"the rest of it {in_gib(max(0, rss - sum(self._held.values())))}")
        others = max(0, limit - available - rss)
        return (f"Host memory ran low, with {in_gib(available)} left of {in_gib(limit)}: this process takes "
                f"{in_gib(rss)} ({', '.join(parts)}) and everything else {in_gib(others)}")

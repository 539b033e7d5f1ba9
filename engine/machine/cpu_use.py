"""How much of the CPU other programs use. No torch."""

from __future__ import annotations

import os
import time

import psutil

from engine.machine.cgroups import usable_cores

UNKNOWN = -1.0


class OtherPrograms:
    """Measures what other programs use of the cores that this process may use.

    It is not known where a quota leaves this process a part of those cores, since others may use
    the rest of them without slowing it down, and where the system counts no time.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._is_known = usable_cores() == len(self._cores)
        self._before = self._read()

    def share(self) -> float:
        """Returns the share of the cores' time since the call before, or `UNKNOWN`."""
        before, now = self._before, self._read()
        self._before = now
        passed, busy, own = (new - old for old, new in zip(before, now))
        if not self._is_known or passed <= 0 or busy <= 0:
            return UNKNOWN
        return min(1.0, max(0.0, busy - own) / (passed * len(self._cores)))

    def _read(self) -> tuple[float, float, float]:
        """Returns seconds: of the clock, in which the cores were busy, and that this process
        used.
        """
        times = psutil.cpu_times(percpu=True)
        busy = sum(
            used.user + used.nice + used.system + used.irq + used.softirq + used.steal
            for core, used in enumerate(times)
            if core in self._cores
        )
        return time.perf_counter(), busy, time.process_time()

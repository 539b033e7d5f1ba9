"""Host memory while a run is prepared and while it trains.

A `MemoryWatch` detects low memory before the kernel kills the process. A `PeakMemory` measures the
peak.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from engine.errors import HostMemoryError
from engine.machine.cgroups import cgroup_memory, sample_host_memory
from engine.planning.fit.requirements import HOST_MARGIN_BYTES

POLL_SECONDS = 0.5
"""Seconds between two samples of memory; it must be low for as long to end a run."""
THREAD_SECONDS = 0.5
"""Seconds between two samples of the watch's own thread."""
MARGIN_BYTES = HOST_MARGIN_BYTES // 2
"""Free bytes below which memory is low. It is half of the margin in the fit report, so that a small
error in the report does not stop a run that the report accepted.
"""


RankMemory = Callable[[], Mapping[int, int]]
"""A function that returns the bytes that each further process of a run has for itself, by rank. It
may be called from any thread.
"""


def no_ranks() -> Mapping[int, int]:
    """Returns an empty dict, for a run without further processes."""
    return {}


class MemoryWatch:
    """Judges samples of host memory.

    `breakdown(rss, available)` returns the beginning of a sentence on what each item takes.
    `of_ranks` returns the memory of the other processes of the run.

    Memory has run low when every sample for POLL_SECONDS found less than MARGIN_BYTES, or one
    sample found less than half of that; so another program's short peak does not end a run. Any
    thread may call `poll`; the thread that can stop the run calls `check`. As a context manager,
    the watch also takes samples on its own thread, since memory can run out within a step.
    """

    def __init__(self, breakdown: Callable[[int, int], str], of_ranks: RankMemory = no_ranks):
        self._account = breakdown
        self._of_ranks = of_ranks
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._polled_at = 0.0
        self._low_since: float | None = None
        self._problem: str | None = None

    def poll(self) -> tuple[int, int]:
        """Takes a sample; returns the resident bytes of this process and those that the other
        processes of the run have for themselves, and the bytes that are still free.
        """
        with self._lock:
            rss, available = sample_host_memory()
            rss += sum(self._of_ranks().values())
            now = self._polled_at = time.perf_counter()
            has_lasted = self._low_since is not None and now - self._low_since >= POLL_SECONDS
            if available < MARGIN_BYTES // 2 or (available < MARGIN_BYTES and has_lasted):
                self._problem = self._problem or self._account(rss, available)
            if available >= MARGIN_BYTES:
                self._low_since = None
            elif self._low_since is None:
                self._low_since = now
            return rss, available

    @property
    def is_low(self) -> bool:
        """Whether memory has run low, as far as samples were taken."""
        return self._problem is not None

    def check(self) -> None:
        """Raises HostMemoryError, with what each item takes, once memory has run low.

        It takes a sample if none was taken for POLL_SECONDS.
        """
        if time.perf_counter() - self._polled_at >= POLL_SECONDS:
            self.poll()
        if self._problem is not None:
            raise HostMemoryError(self._problem)

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._keep_polling, name="memory-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _keep_polling(self) -> None:
        while not self._ended.wait(THREAD_SECONDS):
            self.poll()


def host_limit() -> int:
    """Returns the bytes that all processes under our memory limit together may use."""
    return min(psutil.virtual_memory().total, cgroup_memory()[0])


class PeakMemory:
    """The peak of this process's resident bytes since the object was created.

    The kernel keeps one peak value, so only one instance may be in use at a time. Writing 5 to
    ``/proc/self/clear_refs`` (proc(5)) resets it. If the system refuses that, the peak is the
    larger of the resident bytes at creation and those at reading.
    """

    def __init__(self) -> None:
        self._seen = _status("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._marked = True
        except OSError:
            self._marked = False

    def read(self) -> int:
        self._seen = max(self._seen, _status("VmHWM" if self._marked else "VmRSS"))
        return self._seen


def resident_files() -> int:
    """Returns the bytes of this process's resident pages that belong to files, such as those of its
    libraries. They count as resident, but the kernel can drop them.
    """
    return _status("RssFile")


def _status(name: str) -> int:
    """Returns the value in bytes of a line such as ``VmHWM: 318052 kB``."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0

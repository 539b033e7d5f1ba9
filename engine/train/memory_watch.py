"""Host memory while a run is prepared and goes on: seen to run low before the kernel ends the
process, and its peak.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from engine.errors import HostMemoryError
from engine.fit.needs import HOST_MARGIN_BYTES
from engine.machine.cgroups import cgroup_memory, sample_host_memory

LOOK_SECONDS = 0.5
THREAD_SECONDS = 0.5
"""Between two looks of the watch's own thread."""
MARGIN_BYTES = HOST_MARGIN_BYTES // 2
"""Half of what the fit report sets aside, so that a run which it lets pass is not stopped by the
report's own error.
"""


class MemoryWatch:
    """Judges samples of host memory. `account(rss, available)`: the beginning of a sentence that
    says what takes how much.

    Low means below MARGIN_BYTES for LOOK_SECONDS, in every look, or below half of it in one:
    another program's short peak ends no run. Any thread may look; the one that can stop the run
    checks. As a context, a thread of its own looks too, since a step can take longer than it takes
    to run out.
    """

    def __init__(self, account: Callable[[int, int], str]):
        self._account = account
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked_at = 0.0
        self._low_since: float | None = None
        self._problem: str | None = None

    def look(self) -> tuple[int, int]:
        """Sample now; (resident bytes of this process, bytes that can still be allocated)."""
        with self._lock:
            rss, available = sample_host_memory()
            now = self._looked_at = time.perf_counter()
            lasting = self._low_since is not None and now - self._low_since >= LOOK_SECONDS
            if available < MARGIN_BYTES // 2 or (available < MARGIN_BYTES and lasting):
                self._problem = self._problem or self._account(rss, available)
            if available >= MARGIN_BYTES:
                self._low_since = None
            elif self._low_since is None:
                self._low_since = now
            return rss, available

    def check(self) -> None:
        """Raises HostMemoryError, which says what takes how much, once memory has run low. Looks by
        itself when nobody did for LOOK_SECONDS.
        """
        if time.perf_counter() - self._looked_at >= LOOK_SECONDS:
            self.look()
        if self._problem is not None:
            raise HostMemoryError(self._problem)

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._keep_looking, name="memory-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _keep_looking(self) -> None:
        while not self._ended.wait(THREAD_SECONDS):
            self.look()


def host_limit() -> int:
    """Bytes that all processes within our limits may use together."""
    return min(psutil.virtual_memory().total, cgroup_memory()[0])


class PeakMemory:
    """The most bytes that were resident in this process since this was made; one at a time, as the
    kernel keeps one mark.

    The kernel's own mark is set back by writing 5 to ``/proc/self/clear_refs`` (proc(5)), which
    some systems refuse: then it is the highest of what is resident when this is made and when it is
    read.
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


def _status(name: str) -> int:
    """Bytes, from a line such as ``VmHWM:  318052 kB``."""
    for line in (
        Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    ):
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0

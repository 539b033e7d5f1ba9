"""What a run's memory is given to, measured on this machine: for the sentence with which a run ends
that has too little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.data.loader import PreparedData
from engine.errors import HostMemoryError
from engine.machine.cgroups import sample_host_memory
from engine.runtime.backend import Backend
from engine.train.explain import MemoryNote
from engine.train.memory_shortage import (
    GpuFigures,
    ShareName,
    host_shares,
    host_shortage,
    others_on_host,
)
from engine.train.memory_watch import MemoryWatch, host_limit
from engine.words import in_gib


@dataclass
class MemoryAccount:
    """Of one run, made with its plan: what other programs take then is what they are measured
    against.

    report: `FitReport.to_dict()`. held: bytes of host memory that are held on purpose, by name, as
    they are now. buffers: bytes of device buffers that live all run long, None while there is no
    engine: all that is on the device is theirs then. loading: as for `host_shares`.
    """

    report: Mapping[str, Any]
    backend: Backend
    held: Callable[[], Mapping[ShareName, int]]
    buffers: Callable[[], int] | None = None
    loading: bool = False

    def __post_init__(self) -> None:
        rss, available = sample_host_memory()
        self._others_on_host = others_on_host(host_limit(), available, rss)
        self._others_on_gpu = self._figures().others

    def holds(
        self, held: Callable[[], Mapping[ShareName, int]], buffers: Callable[[], int] | None = None
    ) -> None:
        """What is held from now on; with `buffers` once there is an engine, and nothing is loaded
        any more.
        """
        self.held = held
        if buffers is not None:
            self.buffers, self.loading = buffers, False

    def ran_low(self, rss: int, available: int) -> str:
        """For `MemoryWatch`: the beginning of a sentence."""
        return (
            f"Host memory ran low, with {in_gib(available)} left of {in_gib(host_limit())}: "
            f"{self._of_the_host(rss, available)}"
        )

    def note(self) -> MemoryNote:
        """For `note_memory`."""
        return MemoryNote(
            self._of_the_host(*sample_host_memory()), self._figures(), self._others_on_gpu
        )

    def watched(self, check: Callable[[], None], kept: str) -> Callable[[], None]:
        """`check`, with an eye on host memory: loading is no more immune to the kernel than
        training is. kept: what a run that ends here has, in words.
        """
        watch = MemoryWatch(self.ran_low)

        def watched() -> None:
            check()
            try:
                watch.check()
            except HostMemoryError as error:
                raise HostMemoryError(
                    f"{error}; {kept}, so free some memory or choose a smaller model or batch, and "
                    "start again."
                ) from None

        return watched

    def _of_the_host(self, rss: int, available: int) -> str:
        others = others_on_host(host_limit(), available, rss)
        return host_shortage(
            host_shares(self.report, self.held(), rss, others, self._others_on_host, self.loading),
            rss,
        )

    def _figures(self) -> GpuFigures:
        memory = self.backend.memory()
        return GpuFigures(
            memory["peak"] if self.buffers is None else self.buffers(),
            memory["allocated"],
            memory["peak"],
            memory["reserved"],
            memory["free"],
            memory["total"],
        )


def data_bytes(data: PreparedData) -> int:
    """Bytes of the data that stay in memory: where documents and rows begin."""
    return sum(
        array.nbytes
        for rows in (data.train, data.eval)
        for array in (rows.starts, rows.row_lengths, rows.rows.documents, rows.rows.starts)
    )

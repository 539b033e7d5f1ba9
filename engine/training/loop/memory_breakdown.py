"""The memory of a run by item. A run that ends for a lack of memory reports it in its message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.data.batches.loader import PreparedData
from engine.errors import HostMemoryError
from engine.machine.cgroups import sample_host_memory
from engine.runtime.device.backend import Backend
from engine.text import in_gib
from engine.training.loop.explain import MemoryNote
from engine.training.loop.memory_watch import MemoryWatch, RankMemory, host_limit, no_ranks
from engine.training.loop.oom_report import (
    GpuFigures,
    HostFigures,
    ShareName,
    host_oom_report,
    host_shares,
    others_on_host,
)


@dataclass
class MemoryBreakdown:
    """The breakdown of one run, created when the run is planned.

    The memory that other programs take at that moment is the baseline for later comparisons.

    - `report` is `FitReport.to_dict()`.
    - `held` returns the bytes of host memory that the run currently holds on purpose, by name.
    - `buffers` returns the bytes of device buffers that live as long as the run. It is None before
      the engine exists; until then, everything on the device counts as buffers.
    - `loading` is True while weights are read (`HostFigures`).
    - `of_ranks` returns the memory of the other processes of the run.
    """

    report: Mapping[str, Any]
    backend: Backend
    held: Callable[[], Mapping[ShareName, int]]
    buffers: Callable[[], int] | None = None
    loading: bool = False
    of_ranks: RankMemory = no_ranks

    def __post_init__(self) -> None:
        rss, available = sample_host_memory()
        self._others_on_host = others_on_host(host_limit(), available, rss)
        self._others_on_gpu = self._figures().others

    def holds(
        self, held: Callable[[], Mapping[ShareName, int]], buffers: Callable[[], int] | None = None
    ) -> None:
        """Replaces `held`, and sets `buffers` once the engine exists and loading is over."""
        self.held = held
        if buffers is not None:
            self.buffers = buffers
            self.loading = False

    def counts(self, of_ranks: RankMemory) -> None:
        """Counts the memory of further processes as the run's from now on."""
        self.of_ranks = of_ranks

    def ran_low(self, rss: int, available: int) -> str:
        """Returns the beginning of a sentence about low memory, for `MemoryWatch`."""
        return (
            f"RAM ran low, with {in_gib(available)} left of {in_gib(host_limit())}: "
            f"{self._of_the_host(rss, available)}"
        )

    def note(self) -> MemoryNote:
        """Returns a note of what each item takes now, for `note_memory`."""
        rss, available = sample_host_memory()
        rss += sum(self.of_ranks().values())
        return MemoryNote(self._of_the_host(rss, available), self._figures(), self._others_on_gpu)

    def watched(self, check: Callable[[], None], kept: str) -> Callable[[], None]:
        """Returns a function that calls `check` and also watches host memory.

        The kernel may kill a process that loads weights, just like one that trains. `kept` is a
        text on what is kept when the run ends here. The function raises HostMemoryError.
        """
        watch = MemoryWatch(self.ran_low, self.of_ranks)

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
        figures = HostFigures(
            held=self.held(),
            rss=rss,
            others=others_on_host(host_limit(), available, rss),
            others_before=self._others_on_host,
            loading=self.loading,
        )
        return host_oom_report(host_shares(self.report, figures), rss, 1 + len(self.of_ranks()))

    def _figures(self) -> GpuFigures:
        memory = self.backend.memory()
        return GpuFigures(
            buffers=memory["peak"] if self.buffers is None else self.buffers(),
            allocated=memory["allocated"],
            peak=memory["peak"],
            reserved=memory["reserved"],
            free=memory["free"],
            total=memory["total"],
        )


def data_bytes(data: PreparedData) -> int:
    """Returns the bytes of the data that stay in memory: the offsets of documents and rows."""
    total = 0
    for side in (data.train, data.eval):
        for array in (side.starts, side.row_lengths, side.rows.documents, side.rows.starts):
            total += array.nbytes
    return total

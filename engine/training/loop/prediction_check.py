"""Predictions of the fit report against measurements of a run.

The report's items are summed by kind, since not all are in memory at once: a margin is reserved but
never used, and the loading peak exists only while weights are read. This module does not import
torch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.fit.predictions import compared
from engine.runs.record.events import Comparison, ForecastChecked
from engine.training.loop.memory_watch import PeakMemory, RankMemory, no_ranks

FIRST_STEPS = 2
"""Number of steps at the start of a session that the median leaves out: blocks are compiled in
them, and memory is touched for the first time.
"""
KNOWN_STEPS = FIRST_STEPS + 3
"""Number of steps after which measured values are first recorded."""
MEDIAN_STEPS = 1000
"""Number of the latest steps over which the median is taken."""


class PredictionCheck:
    """Measured figures of one session of a run.

    It must be created when training begins, since host memory is measured from then on. `predicted`
    comes from `predictions`. `loading_peak` is in bytes, or None if nothing was loaded or measured.
    `gpu` is the backend's `memory`, or None on the CPU. `of_ranks` returns the memory of the other
    processes of the run. Any thread may call the methods, one at a time.
    """

    def __init__(
        self,
        predicted: Mapping[str, float],
        loading_peak: int | None,
        gpu: Callable[[], Mapping[str, int]] | None,
        of_ranks: RankMemory = no_ranks,
    ):
        self._predicted = dict(predicted)
        if loading_peak is None:  # there is nothing to compare the prediction with
            self._predicted.pop("loading_peak_bytes", None)
        self._measured: dict[str, float] = {}
        if loading_peak is not None:
            self._measured["loading_peak_bytes"] = loading_peak
        self._gpu = gpu
        self._host = PeakMemory()
        self._of_ranks = of_ranks
        self._ranks_peak = 0
        self._steps = 0
        self._written: tuple[int, int] | None = None
        """Bytes that were on the disk after each step."""
        self._seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def step(self, seconds: float) -> bool:
        """Adds a step that was applied `seconds` after the previous one.

        Returns True exactly once, when there are enough steps for a first comparison.
        """
        self._steps += 1
        self._sample_ranks()
        if self._steps > FIRST_STEPS:
            self._seconds.append(seconds)
        return self._steps == KNOWN_STEPS

    def checkpoint(self, nbytes: int) -> None:
        """Adds the size of a checkpoint that was written: of its planes, as predicted. Weights that
        are not trained are shared by all checkpoints of a run, and in none of them.
        """
        self._measured["checkpoint_bytes"] = nbytes

    def disk_offloaded(self, nbytes: int) -> None:
        """Adds the bytes that were written to the disk so far. It is called after every step from
        the first on. What was written until then is not counted, since a dry run writes block
        inputs, too.
        """
        if self._written is None:
            self._written = nbytes, self._steps
        before, steps = self._written
        if self._steps > steps and nbytes:
            self._measured["disk_offloaded_bytes"] = (nbytes - before) / (self._steps - steps)

    def event(self, step: int, moment: str, seconds: float | None = None) -> ForecastChecked:
        """Returns the current comparison; `seconds` are those of a step, used while there is no
        median.
        """
        self._sample_ranks()
        measured = self._measured | {"host_bytes": self._host.read() + self._ranks_peak}
        if self._seconds:
            seconds = statistics.median(self._seconds)
        if seconds is not None:
            measured["step_seconds"] = seconds
        if self._gpu is not None:
            # The prediction includes the allocator's gaps, so the reserved bytes are compared. The
            # CUDA context is added, since the allocator does not count it; the driver's figure
            # would count all programs on the card.
            measured["gpu_peak_bytes"] = self._gpu()["peak_reserved"] + CUDA_CONTEXT_BYTES
        quantities = cast(dict[str, Comparison], compared(self._predicted, measured))
        return ForecastChecked(step, moment, quantities)

    def _sample_ranks(self) -> None:
        """Takes a sample of the memory that the other processes of the run have for themselves."""
        self._ranks_peak = max(self._ranks_peak, sum(self._of_ranks().values()))

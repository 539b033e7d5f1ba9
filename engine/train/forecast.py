"""A `Forecast` compares what the fit report predicted of a run with what was measured.

The report's items are summed by their kinds, since items come and go: a margin is space that is set
aside and not taken, and the loading peak is there only while weights are read. No torch is
imported.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from engine.fit.predicted import compared
from engine.fit.sizes import CUDA_CONTEXT_BYTES
from engine.runs.events import ForecastChecked
from engine.runs.field_types import Comparison
from engine.train.memory_watch import PeakMemory

FIRST_STEPS = 2
"""The median leaves out so many first steps of a session: they compile, and touch memory for the
first time.
"""
KNOWN_STEPS = FIRST_STEPS + 3
"""The measured values are first recorded after so many steps."""
MEDIAN_STEPS = 1000
"""The median is taken of so many of the latest steps."""


class Forecast:
    """A `Forecast` gathers the measured figures of one session of a run.

    It must be made when training begins, since host memory is measured from then on. `predicted`
    comes from `predictions`. `loading_peak` is in bytes, None where nothing was loaded or measured.
    `gpu` is the backend's `memory`, None on the CPU. Any thread may call, one at a time.
    """

    def __init__(
        self,
        predicted: Mapping[str, float],
        loading_peak: int | None,
        gpu: Callable[[], Mapping[str, int]] | None,
    ):
        self._predicted = dict(predicted)
        if loading_peak is None:  # nothing to compare it with
            self._predicted.pop("loading_peak_bytes", None)
        self._measured: dict[str, float] = {}
        if loading_peak is not None:
            self._measured["loading_peak_bytes"] = loading_peak
        self._gpu = gpu
        self._host = PeakMemory()
        self._steps = 0
        self._seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def step(self, seconds: float) -> bool:
        """Notes a step that was applied `seconds` after the one before.

        Returns True when there are just enough steps for a first comparison.
        """
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self._seconds.append(seconds)
        return self._steps == KNOWN_STEPS

    def checkpoint(self, nbytes: int) -> None:
        """Notes the size of a checkpoint that was written."""
        self._measured["checkpoint_bytes"] = nbytes

    def event(self, step: int, moment: str, seconds: float | None = None) -> ForecastChecked:
        """Returns the comparison as it stands; `seconds` are a step's, while there is no median."""
        measured = self._measured | {"host_bytes": self._host.read()}
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

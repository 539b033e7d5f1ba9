"""Predicted against measured: what the fit report said of a run beside what the run came to. No
torch here.

The report's items are summed by their kinds, so that items may come and go: a margin is space that
is set aside and not taken, the loading peak is there while weights are read and not afterwards.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping

from engine.fit.predicted import compared
from engine.fit.sizes import CUDA_CONTEXT_BYTES
from engine.runs.events import ForecastChecked
from engine.train.memory_watch import PeakMemory

FIRST_STEPS = 2
"""Steps of a session that the median leaves out: they compile, and touch memory for the first time.
"""
KNOWN_STEPS = FIRST_STEPS + 3
"""Steps after which the measured values are first recorded."""
MEDIAN_STEPS = 1000
"""The latest steps, of which the median is taken."""


class Forecast:
    """Gathers what one session of a run comes to. Make it when training begins: host memory is
    measured from then on.

    predicted: by `predictions`. loading_peak: bytes, None where nothing was loaded or measured.
    gpu: the backend's `memory`, None on the CPU. Any thread may call, one at a time.
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
        self._measured: dict[str, float] = (
            {} if loading_peak is None else {"loading_peak_bytes": loading_peak}
        )
        self._gpu = gpu
        self._host = PeakMemory()
        self._steps = 0
        self._seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def step(self, seconds: float) -> bool:
        """A step is applied, `seconds` after the one before; True when enough are for a first
        comparison.
        """
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self._seconds.append(seconds)
        return self._steps == KNOWN_STEPS

    def checkpoint(self, nbytes: int) -> None:
        """A checkpoint is written."""
        self._measured["checkpoint_bytes"] = nbytes

    def event(self, step: int, moment: str, seconds: float | None = None) -> ForecastChecked:
        """The comparison as it stands. seconds: of a step, while no median is known."""
        measured = self._measured | {"host_bytes": self._host.read()}
        if self._seconds:
            seconds = statistics.median(self._seconds)
        if seconds is not None:
            measured["step_seconds"] = seconds
        if self._gpu is not None:
            # Gaps are part of what is predicted. The allocator does not count the context; the
            # driver counts all programs on the card.
            measured["gpu_peak_bytes"] = self._gpu()["peak_reserved"] + CUDA_CONTEXT_BYTES
        return ForecastChecked(step, moment, compared(self._predicted, measured))

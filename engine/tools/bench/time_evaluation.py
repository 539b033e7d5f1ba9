"""The time of an evaluation of random rows, beside the time of its kernels alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.data.batches.rows import MicroBatch
from engine.planning.fit.chosen import Chosen
from engine.planning.schedule.ops import Lane
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.tools.bench.steps import Planes

_REPEATS = 3
"""Number of times that each way of an evaluation is timed; the shortest time counts."""


class _WatchedBackend:
    """Another backend, whose fetches of weights are counted, and skipped if asked."""

    def __init__(self, backend: Any):
        self._backend = backend
        self._fetches = 0
        self._skips = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, lane: Lane, waits: Sequence[Any], work: Callable[[], None]) -> Any:
        if lane == Lane.H2D:
            self._fetches += 1
            if self._skips:
                return self._backend.submit(lane, waits, lambda: None)
        return self._backend.submit(lane, waits, work)

    def fetches(self) -> int:
        """Returns the number of fetches since the last call."""
        count, self._fetches = self._fetches, 0
        return count

    def skip(self, skips: bool) -> None:
        """Skips fetches from now on, or makes them again."""
        self._skips = skips


@dataclass(frozen=True)
class EvaluationFigures:
    """Figures of one evaluation, in seconds after kernels were compiled."""

    rows: int
    micro_batches: int
    seconds: float
    floor_seconds: float
    """Seconds of the same kernels on weights that are there: nothing is fetched."""
    fetches: int
    """Number of units fetched."""
    units: int
    apart_seconds: float
    """Seconds with a sweep for each micro-batch."""
    apart_fetches: int
    loss: float

    @property
    def of_floor(self) -> float:
        """Time of the evaluation as a multiple of its floor."""
        return self.seconds / self.floor_seconds


def time_evaluation(
    planes: Planes, batches: Sequence[MicroBatch], chosen: Chosen
) -> EvaluationFigures:
    """Evaluates `batches` with the buffers and kernels that a training with the plan `chosen`
    has.
    """
    gc.collect()
    planes.backend.reset_peak()
    backend = _WatchedBackend(planes.backend)
    settings = EngineSettings(
        chosen.choices, max(batch.input_ids.size for batch in batches), chosen.loss_chunk
    )
    engine = StreamingEngine(planes.model, planes.host_states, backend, settings, planes.updater)
    try:
        loss = engine.evaluate(batches)  # compiles the kernels
        backend.fetches()
        engine.evaluate(batches)
        fetches = backend.fetches()
        seconds = _shortest(lambda: engine.evaluate(batches))
        backend.skip(True)
        floor = _shortest(lambda: engine.evaluate(batches))
        backend.skip(False)
        backend.fetches()
        began = time.perf_counter()
        for batch in batches:
            engine.evaluate([batch])
        return EvaluationFigures(
            rows=sum(len(batch.input_ids) for batch in batches),
            micro_batches=len(batches),
            seconds=seconds,
            floor_seconds=floor,
            fetches=fetches,
            units=len(planes.model.units),
            apart_seconds=time.perf_counter() - began,
            apart_fetches=backend.fetches(),
            loss=loss,
        )
    finally:
        engine.close()


def _shortest(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)

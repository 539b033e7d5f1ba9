"""What a finished step leaves in the record: its numbers, where its time went, and at times its
spans, norms and memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.settings import TrainConfig
from engine.data.rows import MicroBatch
from engine.fit.cost import parameter_flops
from engine.machine.gpus import GpuSampler
from engine.plan.ops import Lane, Span
from engine.plan.waits import as_records, seconds_by_cause, waits_as_records, waits_of
from engine.runs.events import LogLine, MemorySampled, StepFinished, StepTimeline, UnitNorms
from engine.runs.recorder import RunRecorder
from engine.runtime.streaming_engine import AppliedStep
from engine.train.forecast import Forecast
from engine.train.memory_watch import LOOK_SECONDS, MemoryWatch, host_limit
from engine.train.prepare import Prepared

TIMELINES_KEPT = 500


@dataclass
class _Submitted:
    """What is known of a step before it is applied; rows were put together from `began` to `ended`,
    on the clock of spans.
    """

    tokens: int
    loss_tokens: int
    began: float
    ended: float


class Observer:
    """Writes the record of the steps of one session. `watch` and `forecast` are the trainer's."""

    def __init__(
        self,
        config: TrainConfig,
        recorder: RunRecorder,
        prepared: Prepared,
        watch: MemoryWatch,
        forecast: Forecast,
    ):
        self._every, self._recorder, self._p = config.output.timeline_every, recorder, prepared
        self._watch, self._forecast = watch, forecast
        self._submitted: dict[int, _Submitted] = {}
        self._spans: list[Span] | None = None
        self._mark = 0.0
        self._memory_at = 0.0
        self._compiling_told = False
        self._timelines = len(recorder.snapshot.timeline_steps)
        self._gpu = GpuSampler() if prepared.backend.device.type != "cpu" else None
        self._host_total = host_limit()

    def submitted(self, step: int, micro: Sequence[MicroBatch], began: float) -> None:
        """The rows of a step are put together, since `began` on the clock of `time.perf_counter`,
        and it starts now.
        """
        self._submitted[step] = _Submitted(
            sum(b.tokens for b in micro),
            sum(b.loss_tokens for b in micro),
            began,
            time.perf_counter(),
        )

    def start_clock(self) -> None:
        """Steps are timed from one applied step to the next; after a drain, from here."""
        self._mark = time.perf_counter()
        self._spans = None

    def on_applied(self, applied: AppliedStep) -> None:
        """On the HOST lane: the step's last update is applied, so reading its spans waits for
        nothing.
        """
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        submitted = self._submitted.pop(applied.step)
        inline = self._p.backend.device.type == "cpu"
        waits = waits_of(applied.spans, self._spans, inline, seconds)
        exposed = seconds_by_cause(waits)
        data = min(
            exposed["other"],
            data_wait(applied.spans, self._spans, submitted.began, submitted.ended),
        )
        self._spans = applied.spans
        flops = parameter_flops(self._p.model.active_parameters, submitted.tokens)
        self._recorder.emit(
            StepFinished(
                step=applied.step,
                loss=applied.loss,
                grad_norm=applied.grad_norm,
                learning_rate=applied.learning_rate,
                tokens=submitted.tokens,
                loss_tokens=submitted.loss_tokens,
                seconds=seconds,
                tokens_per_second=submitted.tokens / seconds,
                tflops=flops / seconds / 1e12,
                exposed={cause: round(value, 6) for cause, value in exposed.items()},
                data_seconds=round(data, 6),
            )
        )
        if self._forecast.step(seconds):
            self.compare(applied.step, "running")
        self.tell_compiling()
        if (
            applied.step == 1 or applied.step % self._every == 0
        ) and self._timelines < TIMELINES_KEPT:
            self._timelines += 1
            self._recorder.emit(
                StepTimeline(
                    applied.step, as_records(applied.spans), waits_as_records(waits, applied.spans)
                )
            )
            self._recorder.emit(
                UnitNorms(applied.step, [float(f"{norm:.4g}") for norm in applied.unit_norms])
            )
        if now - self._memory_at >= LOOK_SECONDS:
            self._memory_at = now
            self._sample_memory(applied.step)

    def compare(self, step: int, moment: str) -> None:
        """Predicted against measured, as far as it is known by now."""
        self._recorder.emit(self._forecast.event(step, moment))

    def tell_compiling(self, where: str = "the first step") -> None:
        """What the first step, or the dry run before it, took besides its work; told once."""
        if self._compiling_told:
            return
        self._compiling_told = True
        seconds, problems = self._p.engine.state.compiling
        if seconds:
            self._recorder.emit(
                LogLine("info", f"Compiling the blocks took {seconds:.0f} s of {where}.")
            )
        for problem in problems:
            self._recorder.emit(
                LogLine(
                    "warning",
                    "A block could not be compiled and runs as it is, more slowly and with more "
                    f"memory ({problem}); with engine.kernels at eager the plan counts on "
                    "that.",
                )
            )

    def close(self) -> None:
        self.tell_compiling()
        if self._gpu is not None:
            self._gpu.close()

    def _sample_memory(self, step: int) -> None:
        rss, _ = self._watch.look()
        device = self._p.backend.memory()
        driver = self._gpu.sample() if self._gpu is not None else None
        self._recorder.emit(
            MemorySampled(
                step=step,
                host_rss=rss,
                host_pinned=self._p.store.pinned_bytes + self._p.engine.boundary_bytes
                if self._gpu is not None
                else 0,
                gpu_allocated=device["allocated"],
                gpu_reserved=device["reserved"],
                gpu_peak=device["peak"],
                gpu_driver=driver.used if driver else device["total"] - device["free"],
                gpu_total=device["total"],
                host_total=self._host_total,
                power=driver.power or 0.0 if driver else 0.0,
            )
        )


def data_wait(
    spans: Sequence[Span], previous: Sequence[Span] | None, began: float, ended: float
) -> float:
    """Seconds from `began` to `ended` in which COMPUTE was done with the step before and had not
    begun this one.
    """
    compute = [span for span in spans if span.op.lane == Lane.COMPUTE]
    before = [span.end for span in previous or () if span.op.lane == Lane.COMPUTE]
    if not compute or not before:
        return 0.0
    return max(0.0, min(ended, compute[0].start) - max(began, max(before)))

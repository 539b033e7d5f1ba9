"""The record of each finished step.

Every step records its figures and where its time went; some steps also record their spans, their
norms and the memory in use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from msgspec.structs import replace

from engine.data.batches.rows import MicroBatch, PairTargets
from engine.machine.cpu_use import UNKNOWN, OtherPrograms
from engine.machine.gpus import GpuSampler
from engine.planning.schedule.ops import Lane
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.stalls import (
    Wait,
    as_records,
    first_start,
    records_of,
    seconds_by_cause,
    waits_as_records,
    waits_of,
)
from engine.planning.shape.active_parameters import parameter_flops
from engine.runs.record import events
from engine.runs.record.events import LogLine, MemorySampled, StepFinished, StepTimeline, UnitNorms
from engine.runtime.distributed.rank_samples import gpus_here, samples_of_ranks
from engine.runtime.step.engine_settings import AppliedStep
from engine.runtime.step.preference_metrics import PairSums
from engine.text import in_gib
from engine.training.loop.memory_watch import POLL_SECONDS, MemoryWatch, host_limit
from engine.training.loop.prediction_check import PredictionCheck
from engine.training.loop.prepare import Prepared
from engine.training.loop.reference_logps import mismatched_reference_logps
from engine.training.loop.session import Session

TIMELINES_KEPT = 500
"""Number of timelines in a record, at most, since they take nearly all of its bytes."""
SPANS_KEPT = 2_000_000
"""Number of spans in the timelines of a record, at most: some 200 MB. Plans of many ops have fewer
timelines for it: one of 21,000 ops has 95.
"""


@dataclass
class _Submitted:
    """A step that is not applied yet. Its rows were assembled from `began` to `ended`, on the clock
    used for spans.
    """

    tokens: int
    loss_tokens: int
    began: float
    ended: float
    pairs: list[PairTargets]
    """Reference values of a step of pairs, by micro-batch."""


class Measurements:
    """Records the steps of one session.

    `watch` and `prediction_check` are shared with the trainer.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        watch: MemoryWatch,
        prediction_check: PredictionCheck,
    ):
        self._every = session.config.output.timeline_every
        self._session = session
        self._recorder = session.recorder
        self._prepared = prepared
        self._watch = watch
        self._prediction_check = prediction_check
        self._submitted: dict[int, _Submitted] = {}
        self._spans: list[Span] | None = None
        self._mark = 0.0
        self._memory_at = 0.0
        self._compiling_reported = False
        self._problems_reported: set[tuple[str, str]] = set()
        self._limit_reported = False
        self._timelines = len(session.recorder.snapshot.timeline_steps)
        gpus = gpus_here(prepared.backend.device.type, prepared.workers)
        self._gpus = [GpuSampler(gpu) for gpu in range(gpus)] if self._on_gpu else []
        self._host_total = host_limit()
        # What other ranks use would count as that of other programs.
        self._others = OtherPrograms() if prepared.workers is None else None
        if prepared.workers is not None:
            prepared.workers.sample(self._is_sampled)

    def submitted(self, step: int, micro: Sequence[MicroBatch], began: float, ended: float) -> None:
        """Registers a step that starts now.

        Its rows were assembled from `began` to `ended`, times of `time.perf_counter`.
        """
        self._submitted[step] = _Submitted(
            tokens=sum(batch.tokens for batch in micro),
            loss_tokens=sum(batch.loss_tokens for batch in micro),
            began=began,
            ended=ended,
            pairs=[batch.pairs for batch in micro if batch.pairs is not None],
        )

    def forget(self, step: int) -> None:
        """Forgets `step` and later ones, which were submitted and have failed."""
        for submitted in [number for number in self._submitted if number >= step]:
            del self._submitted[submitted]

    def start_clock(self) -> None:
        """Starts the time of the next step now instead of at the previous step, since the engine
        was drained.
        """
        self._mark = time.perf_counter()
        self._spans = None

    def on_applied(self, applied: AppliedStep) -> None:
        """Records a step; the HOST lane calls this.

        The step's last update has been applied, so reading its spans does not block.
        """
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        submitted = self._submitted.pop(applied.step)
        inline = self._prepared.backend.device.type == "cpu"
        waits = waits_of(applied.spans, self._spans, inline, seconds)
        exposed = seconds_by_cause(waits)
        waited_for_data = data_wait(applied.spans, self._spans, submitted.began, submitted.ended)
        data_seconds = min(exposed["other"], waited_for_data)
        self._spans = applied.spans
        flops = parameter_flops(self._prepared.model.counted_parameters, submitted.tokens)
        figures = _figures_of_pairs(submitted.pairs, applied)
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
                data_seconds=round(data_seconds, 6),
                preference=figures,
            )
        )
        if applied.step == 1:
            self._report_mismatched_reference_logps(figures)
        is_known = self._prediction_check.step(seconds)
        self._prediction_check.disk_offloaded(
            sum(self._prepared.host_states.placement.written_bytes)
        )
        if is_known:
            self.compare(applied.step, "running")
        self.report_compiling()
        self.report_uncompiled(f"a shape of step {applied.step:,}")
        if self._is_sampled(applied.step) and self._has_room(len(applied.spans)):
            self._timelines += 1
            self._recorder.emit(self._timeline(applied, waits))
            norms = [float(f"{norm:.4g}") for norm in applied.unit_norms]
            self._recorder.emit(UnitNorms(applied.step, norms))
        if now - self._memory_at >= POLL_SECONDS:
            self._memory_at = now
            self._sample_memory(applied.step)

    def compare(self, step: int, moment: str) -> None:
        """Records the comparison of predictions and measurements, as far as they are known so
        far.
        """
        self._recorder.emit(self._prediction_check.event(step, moment))
        states = self._prepared.host_states
        if moment == "end" and any(states.placement.written_bytes):
            kinds = zip(("moments", "block inputs"), states.placement.written_bytes)
            written = " and ".join(f"{in_gib(size)} of {what}" for what, size in kinds if size)
            self._session.log(
                "info", f"This session has written {written} to {states.placement.disk.folder}."
            )

    def _report_mismatched_reference_logps(self, figures: dict[str, float]) -> None:
        """Logs a warning if the data's reference log-probabilities are of another model."""
        beta = self._session.config.preference.beta
        sentence = mismatched_reference_logps(self._prepared.data.train, figures, beta)
        if sentence is not None:
            self._session.log("warning", sentence)

    def report_compiling(self, where: str = "the first step") -> None:
        """Logs, once, how long compiling took in the first step or in the dry run."""
        if self._compiling_reported or not self._prepared.has_engine:
            return
        self._compiling_reported = True
        seconds, _ = self._prepared.engine.templates.compiling
        if seconds:
            self._recorder.emit(
                LogLine("info", f"Compiling the blocks took {seconds:.0f} s of {where}.")
            )
        self.report_uncompiled(where)

    def report_uncompiled(self, where: str) -> None:
        """Logs, once, what runs uncompiled against the plan, and why. This may also be found in a
        late step or in an evaluation, whose rows have another shape.
        """
        unrecorded = self._prepared.engine.unrecorded
        if unrecorded and ("graphs", unrecorded) not in self._problems_reported:
            self._problems_reported.add(("graphs", unrecorded))
            self._recorder.emit(
                LogLine(
                    "warning",
                    f"The kernels of a block could not be recorded in {where} ({unrecorded}), so "
                    "they are launched one by one from there on. Small steps take longer; results "
                    "are the same.",
                )
            )
        for what, problem in self._prepared.engine.uncompiled:
            if (what, problem) in self._problems_reported:
                continue
            self._problems_reported.add((what, problem))
            self._recorder.emit(
                LogLine(
                    "warning",
                    f"{what} could not be compiled in {where}. From there on it runs as it is, "
                    f"more slowly, with more memory and other rounding ({problem}); with "
                    "engine.kernels at eager the plan counts on that.",
                )
            )

    def _is_sampled(self, step: int) -> bool:
        """Returns whether a step gets a timeline, if the record takes one more."""
        return step == 1 or step % self._every == 0

    def _timeline(self, applied: AppliedStep, waits: Sequence[Wait]) -> StepTimeline:
        """Returns the timeline of a step on all ranks, on the clock that they share."""
        begin = first_start(applied.spans)
        spans = as_records(applied.spans, begin)
        waited = waits_as_records(waits, begin)
        workers = self._prepared.workers
        others = {} if workers is None else workers.take_timelines(applied.step)
        for rank, timeline in others.items():
            spans += records_of(timeline.ops, begin, rank)
            waited += waits_as_records(timeline.waits, begin, rank)
        return StepTimeline(
            applied.step,
            cast(list[events.Span], spans),
            cast(list[events.Wait], waited),
        )

    def _has_room(self, spans: int) -> bool:
        """Returns whether the record takes one more timeline of this number of spans on each rank.
        The first time it does not, that is logged.
        """
        workers = self._prepared.workers
        spans *= 1 if workers is None else workers.plan.ranks
        limit = min(TIMELINES_KEPT, max(1, SPANS_KEPT // max(1, spans)))
        if self._timelines < limit:
            return True
        if not self._limit_reported:
            self._limit_reported = True
            self._recorder.emit(
                LogLine(
                    "info",
                    f"The record has {self._timelines} timelines, as many as it takes; later steps "
                    "have none. A larger output.timeline_every spreads them over the run.",
                )
            )
        return False

    def close(self) -> None:
        self.report_compiling()
        for gpu in self._gpus:
            gpu.close()

    @property
    def _on_gpu(self) -> bool:
        return self._prepared.backend.device.type != "cpu"

    def _sample_memory(self, step: int) -> None:
        rss, _ = self._watch.poll()
        device = self._prepared.backend.memory()
        pinned = 0
        if self._on_gpu:
            pinned = (
                self._prepared.host_states.ram.pinned_bytes
                + self._prepared.engine.block_input_bytes
            )
        drivers = [gpu.sample() for gpu in self._gpus]
        powers = [(driver and driver.power) or 0.0 for driver in drivers]
        driver = drivers[0] if drivers else None
        sample = MemorySampled(
            step=step,
            host_rss=rss,
            host_pinned=pinned,
            gpu_allocated=device["allocated"],
            gpu_reserved=device["reserved"],
            gpu_peak=device["peak"],
            gpu_driver=driver.used if driver else device["total"] - device["free"],
            gpu_total=device["total"],
            host_total=self._host_total,
            power=sum(powers),
            cpu_others=UNKNOWN if self._others is None else round(self._others.share(), 3),
        )
        workers = self._prepared.workers
        if workers is not None:
            sample = replace(sample, ranks=samples_of_ranks(workers, sample, powers))
        self._recorder.emit(sample)


def _figures_of_pairs(targets: list[PairTargets], applied: AppliedStep) -> dict[str, float]:
    """Returns the figures of a step of pairs for the record; empty for any other step."""
    if not targets:
        return {}
    return PairSums.of(targets, np.array(applied.sequence_sums, dtype=np.float32)).metrics()


def data_wait(
    spans: Sequence[Span], previous: Sequence[Span] | None, began: float, ended: float
) -> float:
    """Returns the seconds between `began` and `ended` that fell after COMPUTE finished the previous
    step and before it began this one.
    """
    compute = [span for span in spans if span.op.lane == Lane.COMPUTE]
    before = [span.end for span in previous or () if span.op.lane == Lane.COMPUTE]
    if not compute or not before:
        return 0.0
    return max(0.0, min(ended, compute[0].start) - max(began, *before))

"""Some steps of a model with random weights. The figures come from the spans of their ops and from
the allocator.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.config.adapters import Adapters
from engine.config.optimizers import Optimizer, OptimizerSettings
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.data.batches.rows import IGNORED, MicroBatch
from engine.machine.cgroups import sample_host_memory
from engine.model.build.build import build_model
from engine.model.build.units import StreamedModel
from engine.planning.layout.layout import PLANE_ITEM_BYTES
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane, OpKind
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.shards import Shards
from engine.planning.schedule.stalls import as_records, overlap_seconds, seconds_by_cause, waits_of
from engine.planning.shape.active_parameters import parameter_flops
from engine.runtime.device.backend import Backend
from engine.runtime.distributed.build_engine import (
    RankZeroComponents,
    build_engines,
    sharing_with,
)
from engine.runtime.distributed.worker_group import WorkerGroup, WorkerGroupPlan
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates, Sharing
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.host.plane_version import PlaneVersion
from engine.runtime.host.shared_memory import OwnedMemory
from engine.runtime.optimizer.host_threads import default_threads
from engine.runtime.step.engine_settings import AppliedStep, EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.tools.bench.random_pairs import AnswersOfSteps
from engine.tools.bench.span_figures import longest_gaps, overlaps, seconds_by_kind
from engine.tools.bench.steady import steady
from engine.training.weights.adapter_weights import initialize_adapters
from engine.training.weights.weights import initialize

STEPS_KEPT = 256
"""Number of the last steps of a training whose spans are kept in memory until the training ends."""

RANDOM = ModelConfig(source="random", init="random")
"""Settings of a model with random weights."""


def random_rows(
    sizes: Sequence[int], length: int, vocabulary: int, seed: int = 0
) -> list[MicroBatch]:
    """Returns micro-batches of `sizes` full rows of random tokens. Low ids are far more frequent
    than high ones, so that there is something to learn.
    """
    generator = np.random.default_rng(seed)
    batches: list[MicroBatch] = []
    for rows in sizes:
        ids = (vocabulary * generator.random((rows, length)) ** 4).astype(np.int64)
        labels = np.full((rows, length), IGNORED)
        labels[:, :-1] = ids[:, 1:]
        batches.append(MicroBatch(ids, labels, None, ids.size, int((labels != IGNORED).sum())))
    return batches


@dataclass(frozen=True)
class Trained:
    """Which parameters of a model are trained, and where they are updated."""

    parts: Parts | Adapters | None = None
    """Trained parts, or adapters; None for the whole model."""
    is_shared: bool = False
    """Several ranks may compute on the planes."""


WHOLE = Trained()


@dataclass
class Planes:
    """A model with random weights in host planes, and the optimizer that updates them."""

    model: StreamedModel
    host_states: HostStates
    backend: Backend
    updater: HostOptimizer
    how: ModelConfig = RANDOM
    """Settings with which the model is built."""
    memory: OwnedMemory | None = None
    """Memory of the planes, which several ranks can share; None where it belongs to this process
    alone.
    """
    workers: WorkerGroup | None = None
    """Ranks that compute the next steps together with this process."""

    @classmethod
    def open(
        cls,
        config: Any,
        backend: Backend,
        how: ModelConfig = RANDOM,
        has_states: bool = True,
        trained: Trained = WHOLE,
    ) -> Planes:
        """Builds the model of a transformers `config`, in the dtype and with the attention of
        `how`, and fills its planes. Without states, `use` must allocate them before a step. Raises
        ModelError, FitError, or ConfigError where the model lacks what is to be trained.
        """
        model = build_model(config, replace(how, source="random", init="random"), trained.parts)
        on_device = backend.device.type != "cpu"
        memory = OwnedMemory() if trained.is_shared else None
        states = HostStates(
            model.layouts,
            how.dtype,
            backend.register if on_device else None,
            backend.unregister if on_device else None,
            sharing=None if memory is None else Sharing(memory),
        )
        try:
            states.allocate_weights()
            initialize(model, states, 0, backend.device)
            initialize_adapters(model, states, 0)
            if has_states:
                states.allocate_states()
        except BaseException:
            states.close()
            raise
        how = replace(how, init="random")
        return cls(model, states, backend, host_optimizer(states, OptimizerSettings()), how, memory)

    def use(self, optimizer: Optimizer, choices: PlanChoices) -> None:
        """Makes `optimizer` the one that updates the planes, which are where a plan with these
        `choices` has them. The states of another one are freed, and the new ones are zeros.
        """
        workers_before = self.workers
        self._use_ranks(choices.sharding.ranks)
        gradients = not choices.gradients.gradients_on_gpu
        is_there = self.host_states.allocated == (optimizer, gradients)
        if not is_there:
            self.host_states.release_states()
        blocks = [block.name for block in self.model.blocks]
        self.host_states.placement.arrange(
            choices.placement.gpu_resident(blocks),
            self.backend,
            choices.placement.disk_offloaded(blocks),
        )
        if not is_there:
            self.host_states.allocate_states(optimizer=optimizer, gradients=gradients)
        if not is_there or self.workers is not workers_before:
            self.updater.close()
            # As in a run, each rank has its share of the cores.
            threads = None if self.workers is None else self.workers.plan.threads
            self.updater = host_optimizer(self.host_states, OptimizerSettings(), threads)

    def _use_ranks(self, ranks: int) -> None:
        """Starts the ranks that compute the next steps. Raises RankError where one cannot."""
        if ranks == (1 if self.workers is None else self.workers.plan.ranks):
            return
        self._end_workers()
        self.host_states.use_ranks(None, PlaneVersion())
        if ranks > 1:
            assert self.memory is not None  # the planes were opened for several ranks
            threads = max(1, default_threads() // ranks)
            plan = WorkerGroupPlan(ranks, self.backend.device.type, threads)
            self.workers = WorkerGroup(
                plan, self.memory, lambda trace: print(trace, file=sys.stderr)
            )
            sharing = sharing_with(self.workers, list(self.host_states.layouts))
            self.host_states.use_ranks(sharing.others, sharing.version)

    def host_memory(self) -> int:
        """Returns the bytes of RAM that all ranks hold, with what they share counted once."""
        others = {} if self.workers is None else self.workers.host_memory()
        return sample_host_memory()[0] + sum(others.values())

    def _end_workers(self) -> None:
        if self.workers is not None:
            self.workers.close()
        self.workers = None

    def engine(self, settings: EngineSettings) -> StreamingEngine:
        """Returns an engine over the planes."""
        if self.workers is None:
            return StreamingEngine(
                self.model, self.host_states, self.backend, settings, self.updater
            )
        parts = RankZeroComponents(self.model, self.host_states, self.backend, self.updater)
        return build_engines(self.workers, parts, self.how, OptimizerSettings(), settings)

    def leave_device(self) -> None:
        """Brings the weights of all units to host memory, if some live on the device. The states of
        the optimizer are freed then.
        """
        if self.host_states.placement.gpu_resident or self.host_states.placement.disk_offloaded:
            self.host_states.release_states()
            self.host_states.placement.arrange((), self.backend)

    def close(self) -> None:
        """Frees the memory of the planes. The backend belongs to the caller."""
        self.updater.close()
        self.host_states.close()  # it asks the other ranks to free what they hold
        self._end_workers()


@dataclass
class StepFigures:
    """Figures of a step, from the end of the last update before it to the end of its own last
    update.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tflops: float
    """6 x parameters that a token passes through x tokens / seconds / 1e12."""
    exposed: dict[str, float]
    """Seconds for which COMPUTE waited, by cause."""
    overlap: dict[str, float]
    """Seconds in which each pair of lanes, and H2D, COMPUTE and D2H together, were busy at the same
    time.
    """
    busy: dict[str, float]
    """Seconds in which each lane was busy."""
    by_kind: dict[str, float]
    """Seconds that the ops of each kind took together."""
    gaps: list[tuple[str, float]]
    """Longest waits of COMPUTE: the op after the wait, and the seconds."""
    retries: int
    """Number of times since the process began that the allocator ran out of memory and had to wait
    for the device.
    """
    rates: dict[str, float | None]
    """GB/s of whole planes to and from the device, and billions of parameters that AdamW updated in
    a second, on the host and on the device; None of what did not take place.
    """


@dataclass(frozen=True)
class RunFigures:
    """Figures of some consecutive steps."""

    steps: list[StepFigures]
    timeline: list[dict[str, Any]]
    """Spans of the last step and of the one before it, in the form of a run record, in seconds from
    the first of them.
    """
    peak: int
    """Device bytes that were allocated at once, at most."""
    reserved: int
    """Bytes that were reserved from the driver, at most, gaps included."""
    fixed: int
    """Bytes of the buffers that the plan keeps on the device."""
    offloaded_block_inputs: int
    launches: list[float]
    """Seconds of processor time, in each step, of the thread that launches the ops of COMPUTE."""
    seconds: list[float]
    """Seconds of every step, also of those before the ones that `steps` has."""
    updated: dict[str, int]
    """Number of parameters updated in a step on the `host` and on the `device`, by all ranks."""
    reference_seconds: float | None = None
    """As in `AnswersOfSteps`."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of some consecutive steps."""

    choices: PlanChoices
    steps: int
    """Number of steps, at least."""
    rate: float
    loss_chunk: int = 1024
    first: int = 1
    """Number of the first step."""
    seconds: float = 0.0
    """Seconds that must have passed before steps end; twice as many where no two steps in a row
    have agreed.
    """
    answers: AnswersOfSteps | None = None
    """Answers that are compared, in the micro-batches of every step; None where none are."""


def run_steps(planes: Planes, batches: Sequence[MicroBatch], settings: RunSettings) -> RunFigures:
    """Trains on one fixed batch, without a pause between steps, and returns the figures."""
    backend = planes.backend
    gc.collect()
    backend.reset_peak()
    engine = planes.engine(
        EngineSettings(
            settings.choices,
            tokens=max(batch.input_ids.size for batch in batches),
            loss_chunk=settings.loss_chunk,
            max_grad_norm=1.0,
        )
    )
    answers = settings.answers
    try:
        if answers is not None:
            answers.compare(engine)
            batches = answers.batches()
        applied, launches, seconds = _take_steps(engine, batches, settings)
        last_spans = [span for step in list(applied)[-2:] for span in step.applied.spans]
        tokens = sum(batch.tokens for batch in batches)
        figures: list[StepFigures] = []
        previous: list[Span] | None = None
        for step in applied:
            figures.append(_step_figures(step, previous, tokens, planes))
            previous = step.applied.spans
        memory = backend.memory()
        return RunFigures(
            steps=figures,
            timeline=as_records(last_spans),
            peak=memory["peak"],
            reserved=memory["peak_reserved"],
            fixed=engine.state.fixed_bytes(),
            offloaded_block_inputs=engine.block_input_bytes,
            launches=launches,
            seconds=seconds,
            updated=updated_by_place(applied[-1].applied.spans, planes),
            reference_seconds=None if answers is None else answers.reference_seconds,
        )
    finally:
        engine.close()


@dataclass(frozen=True)
class _TakenStep:
    """A step with its seconds, and the allocator's retries up to its end."""

    applied: AppliedStep
    seconds: float
    retries: int


def _take_steps(
    engine: StreamingEngine, batches: Sequence[MicroBatch], settings: RunSettings
) -> tuple[deque[_TakenStep], list[float], list[float]]:
    """Runs the steps, and returns the last of them, the processor time of each launch, and the
    seconds of each step.
    """
    taken: deque[_TakenStep] = deque(maxlen=STEPS_KEPT)
    launches: list[float] = []
    seconds: list[float] = []
    began = mark = time.perf_counter()

    def on_applied(applied: AppliedStep) -> None:
        # Do no more than this here: computing figures from thousands of spans would keep the
        # interpreter from the thread that launches ops.
        nonlocal mark
        now = time.perf_counter()
        taken.append(_TakenStep(applied, now - mark, engine.backend.memory()["retries"]))
        seconds.append(now - mark)
        mark = now

    def continues() -> bool:
        if number < settings.first + settings.steps:
            return True
        passed = time.perf_counter() - began
        if passed >= 2 * settings.seconds:
            return False
        return passed < settings.seconds or not (seconds and steady(seconds).is_steady)

    number, answers = settings.first, settings.answers
    while continues():
        before = time.thread_time()
        own = batches if answers is None else answers.of_step(engine, list(batches))
        engine.train_step(number, own, settings.rate, on_applied)
        launches.append(time.thread_time() - before)
        number += 1
    engine.drain()
    return taken, launches, seconds


def _step_figures(
    taken: _TakenStep, previous: list[Span] | None, tokens: int, planes: Planes
) -> StepFigures:
    """Returns the figures of a step of `tokens` tokens. `previous` holds the spans of the step
    before it.
    """
    applied, spans = taken.applied, taken.applied.spans
    inline = planes.backend.device.type == "cpu"
    flops = parameter_flops(planes.model.counted_parameters, tokens)
    # The updates of the step before run under this one's forward.
    updates_before = [span for span in previous or () if span.op.lane == Lane.HOST]
    return StepFigures(
        step=applied.step,
        loss=applied.loss,
        grad_norm=applied.grad_norm,
        seconds=taken.seconds,
        tflops=flops / taken.seconds / 1e12,
        exposed=seconds_by_cause(waits_of(spans, previous, inline=inline)),
        overlap=overlaps([*updates_before, *spans]),
        busy={lane: overlap_seconds(spans, lane, lane) for lane in Lane},
        by_kind=seconds_by_kind(spans),
        gaps=longest_gaps(spans, previous),
        retries=taken.retries,
        rates=rates(spans, planes),
    )


UPDATED = {
    "host": (OpKind.UPDATE, OpKind.UPDATE_MOMENTS),
    "device": (OpKind.DEVICE_UPDATE, OpKind.UPDATE_IN_PLACE),
}
"""Ops of AdamW, by where it runs."""


def updates_of(
    spans: Sequence[Span], planes: Planes, kinds: Collection[OpKind]
) -> list[tuple[int, float]]:
    """Returns the parameters, of all ranks, and the seconds of each op of some `kinds`. The second
    pass over moments updates parameters that the first has counted.
    """
    layouts = planes.host_states.layouts
    shards = Shards(1 if planes.workers is None else planes.workers.plan.ranks)
    found = []
    for span in spans:
        op = span.op
        if op.kind not in kinds:
            continue
        chunk = getattr(op, "chunk", None)
        own = shards.numel(layouts[op.unit].numel) if chunk is None else chunk[1] - chunk[0]
        numel = 0 if op.kind == OpKind.UPDATE_MOMENTS else shards.ranks * own
        found.append((numel, span.end - span.start))
    return found


def updated_by_place(spans: Sequence[Span], planes: Planes) -> dict[str, int]:
    """Returns the number of parameters that the ops of a step update, by where they run: elements
    of their planes, of which a few lie between parameters.
    """
    updated = {}
    for where, kinds in UPDATED.items():
        updated[where] = sum(numel for numel, _ in updates_of(spans, planes, kinds))
    return updated


def rates(spans: Sequence[Span], planes: Planes) -> dict[str, float | None]:
    """Returns GB/s of whole planes to and from the device, and billions of parameters that AdamW
    updated a second where it ran: by all ranks, as if each was as fast as this one. A rate is None
    where no such copy or update took place.
    """
    item = PLANE_ITEM_BYTES[planes.model.dtype]
    layouts = planes.host_states.layouts
    shards = Shards(1 if planes.workers is None else planes.workers.plan.ranks)
    result: dict[str, float | None] = {}
    for name, kind, nbytes in (
        ("h2d_gb_s", OpKind.PREFETCH, item["weight_high"]),
        ("d2h_gb_s", OpKind.OFFLOAD, item["grad"]),
    ):
        copies = [span for span in spans if span.op.kind == kind]
        # Frozen weights are fetched, too.
        plane = "high_numel" if kind == OpKind.PREFETCH else "numel"
        numels = []
        for span in copies:
            numel = getattr(layouts[span.op.unit], plane)
            # A rank brings its shard, or all of it.
            numels.append(numel if getattr(span.op, "whole", None) else shards.numel(numel))
        seconds = sum(span.end - span.start for span in copies)
        result[name] = nbytes * sum(numels) / seconds / 1e9 if seconds else None
    for name, kinds in (("adamw_g_s", UPDATED["host"]), ("device_adamw_g_s", UPDATED["device"])):
        updates = updates_of(spans, planes, kinds)
        seconds = sum(took for _, took in updates)
        result[name] = sum(numel for numel, _ in updates) / seconds / 1e9 if seconds else None
    return result


def mean_rate(steps: Sequence[StepFigures], name: str) -> float | None:
    """Returns the mean over the steps of a rate; None where one of them lacks it."""
    found = [step.rates[name] for step in steps]
    known = [rate for rate in found if rate is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def mean_of(steps: Sequence[StepFigures], name: str) -> dict[str, float]:
    """Returns the mean over the steps of each value in their dictionary `name`."""
    means = {}
    for key in dict.fromkeys(key for step in steps for key in getattr(step, name)):
        means[key] = statistics.fmean(getattr(step, name).get(key, 0.0) for step in steps)
    return means

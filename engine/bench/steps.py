"""Steps of a model with random weights, and what their spans and the allocator say of them."""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.checkpoints.weights import initialise
from engine.config.settings import ModelConfig
from engine.data.rows import IGNORED, MicroBatch
from engine.fit.cost import parameter_flops
from engine.model.build import build_model
from engine.model.units import StreamedModel
from engine.plan.choices import PlanChoices
from engine.plan.ops import Lane, Span
from engine.plan.waits import as_records, overlap_seconds, seconds_by_cause, waits_of
from engine.runtime.backend import Backend
from engine.runtime.host_adamw import AdamWSettings, HostAdamW
from engine.runtime.host_store import HostStore
from engine.runtime.streaming_engine import AppliedStep, EngineSettings, StreamingEngine

STEPS_KEPT = 256
"""The last steps of a training, of which all spans are in memory until it ends."""

PAIRS = (
    (Lane.H2D, Lane.COMPUTE),
    (Lane.D2H, Lane.COMPUTE),
    (Lane.H2D, Lane.D2H),
    (Lane.HOST, Lane.COMPUTE),
)


def random_rows(
    sizes: Sequence[int], length: int, vocabulary: int, seed: int = 0
) -> list[MicroBatch]:
    """Micro-batches of `sizes` full rows of random tokens, low ids far more often than high ones,
    so that there is something to learn.
    """
    generator = np.random.default_rng(seed)
    batches = []
    for rows in sizes:
        ids = (vocabulary * generator.random((rows, length)) ** 4).astype(np.int64)
        labels = np.full((rows, length), IGNORED)
        labels[:, :-1] = ids[:, 1:]
        batches.append(MicroBatch(ids, labels, None, ids.size, int((labels != IGNORED).sum())))
    return batches


@dataclass
class Planes:
    """A model with random weights in host planes, and what updates them."""

    model: StreamedModel
    store: HostStore
    backend: Backend
    adamw: HostAdamW

    @classmethod
    def open(
        cls,
        config: Any,
        backend: Backend,
        dtype: str = "bfloat16",
        seed: int = 0,
        attention: str = "auto",
    ) -> Planes:
        """config: of transformers. Raises ModelError or FitError."""
        model = build_model(
            config, ModelConfig(source="random", init="random", dtype=dtype, attention=attention)
        )
        on_device = backend.device.type != "cpu"
        store = HostStore(
            model.layouts,
            dtype,
            backend.register if on_device else None,
            backend.unregister if on_device else None,
        )
        try:
            store.allocate_weights()
            initialise(model, store, seed, backend.device)
            store.allocate_states()
        except BaseException:
            store.close()
            raise
        return cls(model, store, backend, HostAdamW(store, AdamWSettings()))

    def close(self) -> None:
        """The backend belongs to the caller."""
        self.adamw.close()
        self.store.close()


@dataclass
class StepFigures:
    """One step, from the end of the last update before it to the end of its own."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tflops: float
    """6 x parameters that a token passes through x tokens / seconds."""
    exposed: dict[str, float]
    """Seconds that COMPUTE waited, by cause."""
    overlap: dict[str, float]
    """Seconds in which two lanes worked at once, and all three of the device."""
    busy: dict[str, float]
    """Seconds of work by lane."""
    by_kind: dict[str, float]
    """Seconds of work by kind of op."""
    gaps: list[tuple[str, float]]
    """The longest waits of COMPUTE: the op that came after, and seconds."""
    retries: int
    """How often, since the process began, the allocator ran out and had to wait for the device."""
    rates: dict[str, float]
    """GB/s of whole planes to and from the device, and billions of parameters updated a second."""


@dataclass(frozen=True)
class RunFigures:
    """What some steps in a row came to."""

    steps: list[StepFigures]
    timeline: list[dict[str, Any]]
    """Spans of the last step and of the one before it, in seconds from the first, as the record of
    a run keeps them.
    """
    peak: int
    """Most device bytes allocated at once."""
    reserved: int
    """Most that was reserved from the driver, gaps included."""
    fixed: int
    """Bytes of the plan's own buffers."""
    host_boundaries: int
    launches: list[float]
    """Seconds of processor time, by step, of the thread that launches the ops of COMPUTE."""


def run_steps(
    planes: Planes,
    choices: PlanChoices,
    batches: Sequence[MicroBatch],
    steps: int,
    rate: float,
    loss_chunk: int = 1024,
    first: int = 1,
    seconds: float = 0.0,
) -> RunFigures:
    """Train on one fixed batch, without a pause between steps: `steps` of them, and more until
    `seconds` are over. `first`: number of the first step.
    """
    tokens = max(b.input_ids.size for b in batches)
    backend, model = planes.backend, planes.model
    gc.collect()
    backend.reset_peak()
    engine = StreamingEngine(
        model,
        planes.store,
        backend,
        EngineSettings(choices, tokens, loss_chunk),
        planes.adamw,
    )
    launches: list[float] = []
    began = mark = time.perf_counter()
    applied_steps: deque[tuple[AppliedStep, float, int]] = deque(maxlen=STEPS_KEPT)

    def on_applied(applied: AppliedStep) -> None:
        # No more than this: figures of thousands of spans would take the interpreter from the
        # thread that launches.
        nonlocal mark
        now = time.perf_counter()
        applied_steps.append((applied, now - mark, backend.memory()["retries"]))
        mark = now

    try:
        number = first
        while number < first + steps or time.perf_counter() - began < seconds:
            before = time.thread_time()
            engine.train_step(number, batches, rate, on_applied)
            launches.append(time.thread_time() - before)
            number += 1
        engine.drain()
        timeline = as_records(
            [span for applied, *_ in list(applied_steps)[-2:] for span in applied.spans]
        )
        tokens_per_step, previous, figures = sum(b.tokens for b in batches), None, []
        for applied, took, retries in applied_steps:
            figures.append(_step_figures(applied, previous, took, retries, tokens_per_step, planes))
            previous = applied.spans
        memory = backend.memory()
        return RunFigures(
            figures,
            timeline,
            memory["peak"],
            memory["peak_reserved"],
            engine.state.fixed_bytes(),
            engine.boundary_bytes,
            launches,
        )
    finally:
        engine.close()


def _step_figures(
    applied: AppliedStep,
    previous: list[Span] | None,
    took: float,
    retries: int,
    tokens: int,
    planes: Planes,
) -> StepFigures:
    return StepFigures(
        applied.step,
        applied.loss,
        applied.grad_norm,
        took,
        parameter_flops(planes.model.active_parameters, tokens) / took / 1e12,
        seconds_by_cause(
            waits_of(applied.spans, previous, inline=planes.backend.device.type == "cpu")
        ),
        # The updates of the step before run under this one's forward.
        overlaps([*(s for s in previous or () if s.op.lane == Lane.HOST), *applied.spans]),
        {lane: overlap_seconds(applied.spans, lane, lane) for lane in Lane},
        seconds_by_kind(applied.spans),
        longest_gaps(applied.spans, previous),
        retries,
        rates(applied.spans, planes),
    )


# ---------------------------------------------------------------------- what spans say


def overlaps(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds in which pairs of lanes, and H2D, COMPUTE and D2H together, were at work."""
    result = {f"{a}+{b}": overlap_seconds(spans, a, b) for a, b in PAIRS}
    edges = sorted(
        [(s.start, s.op.lane, 1) for s in spans] + [(s.end, s.op.lane, -1) for s in spans]
    )
    running, last, together = defaultdict(int), 0.0, 0.0
    for moment, lane, change in edges:
        if all(running[name] for name in (Lane.H2D, Lane.COMPUTE, Lane.D2H)):
            together += moment - last
        running[lane] += change
        last = moment
    return result | {"H2D+COMPUTE+D2H": together}


def longest_gaps(
    spans: Sequence[Span], previous: Sequence[Span] | None, count: int = 12
) -> list[tuple[str, float]]:
    """Between two ops of COMPUTE, the last op of the step before among them, in the order of their
    length.
    """
    own = [s for s in spans if s.op.lane == Lane.COMPUTE]
    last = (
        [max((s for s in previous if s.op.lane == Lane.COMPUTE), key=lambda s: s.end)]
        if previous
        else []
    )
    pairs = zip([*last, *own], [*last, *own][1:])
    gaps = [(after.op.label, after.start - before.end) for before, after in pairs]
    return sorted(gaps, key=lambda gap: gap[1], reverse=True)[:count]


def seconds_by_kind(spans: Sequence[Span]) -> dict[str, float]:
    result: dict[str, float] = defaultdict(float)
    for span in spans:
        result[span.op.kind] += span.end - span.start
    return dict(result)


def rates(spans: Sequence[Span], planes: Planes) -> dict[str, float]:
    item = (
        {"weight_high": 2, "grad": 2}
        if planes.model.dtype == "bfloat16"
        else {"weight_high": 4, "grad": 4}
    )
    layouts = planes.store.layouts
    result = {}
    for name, kind, scale in (
        ("h2d_gb_s", "prefetch", item["weight_high"] / 1e9),
        ("d2h_gb_s", "offload", item["grad"] / 1e9),
        ("adamw_g_s", "update", 1e-9),
    ):
        chosen = [s for s in spans if s.op.kind == kind]
        seconds = sum(s.end - s.start for s in chosen)
        result[name] = (
            scale * sum(layouts[s.op.unit].numel for s in chosen) / seconds if seconds else 0.0
        )
    return result

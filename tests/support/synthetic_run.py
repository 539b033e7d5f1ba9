"""Made-up records of a run, for tests of whatever reads records."""

from __future__ import annotations

import json
import math
from pathlib import Path

from engine.planning.fit.predictions import compared
from engine.runs.record.events import (
    CheckpointWritten,
    DataPrepared,
    EvalFinished,
    Event,
    ExactMatchMeasured,
    ExportWritten,
    ForecastChecked,
    JobProgressed,
    LogLine,
    MemorySampled,
    PlanBuilt,
    Record,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
    StepTimeline,
    UnitNorms,
)
from engine.runs.record.snapshot import RunSnapshot

GIB = 1 << 30
START = 1_760_000_000.0


def span(unit, op, lane, start, end, micro_batch=None):
    return {
        "unit": unit,
        "op": op,
        "lane": lane,
        "micro_batch": micro_batch,
        "start": start,
        "end": end,
    }


def timeline(step: int, blocks: int = 6, micro_batches: int = 1) -> StepTimeline:
    """A step whose transfers run under its compute, with one wait before the first block."""
    spans, now = [], 0.004
    for index in range(blocks):
        unit = f"block {index}"
        spans.append(span(unit, "prefetch", "H2D", max(0.0, now - 0.004), now - 0.001))
        for _ in range(micro_batches):
            spans.append(span(unit, "forward", "COMPUTE", now, now + 0.006))
            now += 0.006
    for index in reversed(range(blocks)):
        unit = f"block {index}"
        spans.append(span(unit, "prefetch", "H2D", now - 0.005, now - 0.002))
        for _ in range(micro_batches):
            spans.append(span(unit, "recompute", "COMPUTE", now, now + 0.005))
            spans.append(span(unit, "backward", "COMPUTE", now + 0.005, now + 0.016))
            now += 0.016
        spans.append(span(unit, "offload", "D2H", now, now + 0.004))
        spans.append(span(unit, "update", "HOST", now + 0.004, now + 0.009))
    return StepTimeline(
        step=step, spans=spans, waits=[{"start": 0.0, "end": 0.004, "cause": "h2d"}]
    )


def step_finished(step: int, total: int) -> StepFinished:
    return StepFinished(
        step=step,
        loss=0.1 + 4 * math.exp(-6 * step / total) + 0.05 * math.sin(step * 1.7),
        grad_norm=1.0 + 0.4 * math.cos(step),
        learning_rate=1e-3 * (1 - step / (total + 1)),
        tokens=4096,
        loss_tokens=512,
        seconds=0.25,
        tokens_per_second=16384.0 + 500 * math.sin(step / 3),
        tflops=1.25 + 0.04 * math.sin(step / 3),
        exposed={"h2d": 0.01, "d2h": 0.0, "optimizer": 0.02, "other": 0.0},
    )


def unit_norms(step: int, total: int, units: int) -> UnitNorms:
    """Norms that fall with the step and rise with the unit's place, with a ripple."""
    return UnitNorms(
        step,
        [
            0.02
            * (1 + 3 * math.exp(-6 * step / total))
            * math.exp(2.5 * k / max(1, units - 1))
            * (1 + 0.3 * math.sin(k + step / 7))
            for k in range(units)
        ],
    )


def run_events(
    steps: int = 120,
    total: int | None = None,
    gpu: bool = True,
    name: str = "Synthetic",
    ended: str | None = "finished",
    blocks: int = 1,
) -> list[Event]:
    """The events of a run that did `steps` of `total` steps; `ended` None leaves it going on."""
    total = total or steps
    units = ["embed", *(f"block {k}" for k in range(blocks)), "head"]
    events: list[Event] = [
        StateChanged(state="preparing"),
        JobProgressed(job="load_model", done=1, total=4),
        JobProgressed(job="load_model", done=4, total=4),
        DataPrepared(summary={"format": "messages", "rows": 1200, "trained_tokens": 34567}),
        PlanBuilt(
            choices={"rounds": 1, "slots": 2, "activation_checkpointing": "full"},
            grid="H2D     | prefetch embed",
        ),
        RunStarted(
            name=name,
            pid=1,
            device="cuda" if gpu else "cpu",
            device_name="NVIDIA H200" if gpu else "CPU",
            total_steps=total,
            parameters=7_615_616_512,
            units=units,
            program_version="0.1.0",
            flops_formula="6 x parameters x tokens",
            ceiling_tflops=2.0 if gpu else 0.0,
        ),
        ExactMatchMeasured(
            step=0,
            moment="before",
            correct=1,
            total=50,
            samples=[{"prompt": "2+2=", "expected": "4", "answer": "q"}],
        ),
        StateChanged(state="running"),
    ]
    for step in range(1, steps + 1):
        events.append(step_finished(step, total))
        events.append(
            MemorySampled(
                step=step,
                host_rss=100 * GIB + step * 1000,
                host_pinned=90 * GIB,
                gpu_allocated=40 * GIB if gpu else 0,
                gpu_reserved=44 * GIB if gpu else 0,
                gpu_peak=43 * GIB if gpu else 0,
                gpu_driver=46 * GIB if gpu else 0,
                gpu_total=139 * GIB if gpu else 0,
                host_total=128 * GIB,
                power=540 + 20 * math.sin(step / 5) if gpu else 0.0,
            )
        )
        if step % 10 == 0:
            events += [timeline(step), unit_norms(step, total, len(units))]
        if step % 40 == 0:
            events.append(
                EvalFinished(
                    step=step,
                    loss=0.3 + 4 * math.exp(-5 * step / total),
                    loss_tokens=900,
                    seconds=1,
                )
            )
            events.append(
                CheckpointWritten(step=step, path=f"step-{step}", bytes=91 * GIB, seconds=40)
            )
        if step % 25 == 0:
            events.append(
                LogLine(level="info", text=f"Step {step} <img src=x onerror=window.hacked=1>")
            )
    if ended == "finished":
        events += [
            ExactMatchMeasured(
                step=steps,
                moment="after",
                correct=48,
                total=50,
                samples=[{"prompt": "2+2=", "expected": "4", "answer": "4"}],
            ),
            ExportWritten(step=steps, path="export", bytes=15 * GIB),
        ]
    if ended is not None:
        events.append(
            ForecastChecked(
                steps,
                "end",
                compared(
                    {
                        "loading_peak_bytes": 30 * GIB,
                        "host_bytes": 101 * GIB,
                        "checkpoint_bytes": 91 * GIB,
                        "step_seconds": 0.22,
                    }
                    | ({"gpu_peak_bytes": 45 * GIB} if gpu else {}),
                    {
                        "loading_peak_bytes": 30.5 * GIB,
                        "host_bytes": 100 * GIB,
                        "checkpoint_bytes": 91 * GIB,
                        "step_seconds": 0.25,
                    }
                    | ({"gpu_peak_bytes": 43.6 * GIB} if gpu else {}),
                ),
            )
        )
        events += [
            StateChanged(state="saving"),
            RunEnded(
                state=ended,
                reason="" if ended != "failed" else "The disk is full: free 91 GiB and resume.",
            ),
        ]
    return events


def records(
    events: list[Event], run_id: str = "run-1", first_seq: int = 1, start: float = START
) -> list[Record]:
    """With their envelopes, a tenth of a second apart."""
    return [
        Record(run_id, first_seq + index, start + 0.1 * index, event)
        for index, event in enumerate(events)
    ]


def write_events(path: Path, listed: list[Record]) -> None:
    """Appends, a JSON line each."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record.to_json()) + "\n" for record in listed)


def cannot_apply_step(monkeypatch, step: int) -> None:
    """As if the program had a fault: a snapshot does not take this step's record."""
    apply = RunSnapshot.apply

    def failing(self, record):
        if isinstance(record.event, StepFinished) and record.event.step == step:
            raise ZeroDivisionError
        apply(self, record)

    monkeypatch.setattr(RunSnapshot, "apply", failing)

"""A record as points of the curves that a tracker shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.runs.record.events import (
    EvalFinished,
    Event,
    ExactMatchMeasured,
    MemorySampled,
    Record,
    StepFinished,
)

LOSS = "train/loss"
LEARNING_RATE = "train/learning_rate"
GRAD_NORM = "train/grad_norm"
TOKENS_RATE = "speed/tokens_per_second"
TFLOPS = "speed/tflops"
VALIDATION_LOSS = "eval/loss"
EXACT_MATCH = "eval/exact_match"
HOST_GIB = "memory/host_gib"
GPU_GIB = "memory/gpu_gib"
CURVES = (
    LOSS,
    LEARNING_RATE,
    GRAD_NORM,
    TOKENS_RATE,
    TFLOPS,
    VALIDATION_LOSS,
    EXACT_MATCH,
    HOST_GIB,
    GPU_GIB,
)
"""Curves that a run may have."""
_GIB = float(1 << 30)


@dataclass(frozen=True)
class Point:
    """Values of some curves after a step."""

    step: int
    time: float
    """Unix time at which it was recorded."""
    values: Mapping[str, float]


def points_of(record: Record) -> Point | None:
    """Returns what a record adds to the curves, or None if that is nothing."""
    event = record.event
    if not isinstance(event, _WITH_VALUES):
        return None
    values = _values(event)
    return Point(event.step, record.time, values) if values else None


_WITH_VALUES = (StepFinished, EvalFinished, ExactMatchMeasured, MemorySampled)


def _values(event: Event) -> dict[str, float]:
    if isinstance(event, StepFinished):
        return {
            LOSS: event.loss,
            LEARNING_RATE: event.learning_rate,
            GRAD_NORM: event.grad_norm,
            TOKENS_RATE: event.tokens_per_second,
            TFLOPS: event.tflops,
        }
    if isinstance(event, EvalFinished):
        return {VALIDATION_LOSS: event.loss}
    if isinstance(event, ExactMatchMeasured) and event.total:
        return {EXACT_MATCH: event.correct / event.total}
    if isinstance(event, MemorySampled):
        values = {HOST_GIB: event.host_rss / _GIB}
        if event.gpu_total:
            values[GPU_GIB] = event.gpu_driver / _GIB
        return values
    return {}

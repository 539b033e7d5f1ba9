"""A worker tells rank 0 when its ops ran, and what it holds of its device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec.structs import replace

from engine.machine.cgroups import private_memory
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.stalls import ran, waits_of
from engine.runtime.device.backend import Backend
from engine.runtime.distributed.messages import DeviceMemory, OptimizerStep, Timeline
from engine.runtime.step.streaming_engine import AppliedStep

MEMORY_SECONDS = 1.0
"""Seconds in which memory is reported at most once."""


class Reporter:
    """Makes the reports of one rank, which computes on `backend`. tells_node_memory: they tell of
    its RAM, too.
    """

    def __init__(self, backend: Backend, tells_node_memory: bool = False):
        self._backend = backend
        self._tells_host = tells_node_memory
        self._before: Sequence[Span] | None = None
        self._mark = 0.0
        self._told_memory_at = 0.0

    def drained(self) -> None:
        """Says that all steps are over, so that the next one waits for none before it."""
        self._before = None
        self._mark = time.perf_counter()

    def applied(self, step: AppliedStep, has_timeline: bool) -> OptimizerStep:
        """Returns the report of a step. has_timeline: it tells when the step's ops ran."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        before, self._before = self._before, step.spans
        timeline = None
        if has_timeline and step.spans:
            inline = self._backend.device.type == "cpu"
            timeline = Timeline(ran(step.spans), waits_of(step.spans, before, inline, seconds))
        memory = None
        if now - self._told_memory_at >= MEMORY_SECONDS:
            self._told_memory_at = now
            memory = device_memory(self._backend)
            if self._tells_host:
                memory = replace(memory, host=private_memory())
        return OptimizerStep(step.step, timeline, memory)


def device_memory(backend: Backend) -> DeviceMemory:
    """Returns what this process holds of its device now."""
    device = backend.memory()
    return DeviceMemory(
        device["allocated"],
        device["reserved"],
        device["peak"],
        device["peak_reserved"],
        device["total"] - device["free"],
        device["total"],
    )

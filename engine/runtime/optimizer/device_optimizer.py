"""A `DeviceOptimizer` updates chunks of units whose planes are on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config.optimizers import MOMENTS, OPTIMIZERS, Optimizer
from engine.planning.layout.layout import UnitLayout
from engine.runtime.optimizer.device_adamw import StepFactors, update
from engine.runtime.optimizer.device_moments import (
    RoundedPlanes,
    RoundedStep,
    moment_tables,
    update_rounded,
)


@dataclass(frozen=True)
class DeviceChunk:
    """Chunk of a unit's planes that is on the device."""

    layout: UnitLayout
    start: int
    """First element in the unit."""
    grad: torch.Tensor
    """Gradients, flat [elements]."""
    weights: dict[str, torch.Tensor]
    """Planes of the weights, flat [elements]."""
    states: dict[str, torch.Tensor]
    """Planes of the optimizer's states, flat. Each begins with the first element of the chunk, and
    may be longer.
    """

    @property
    def stop(self) -> int:
        return self.start + self.grad.numel()


@dataclass(frozen=True)
class DeviceStep:
    """A step is applied to a chunk with these values."""

    factors: StepFactors
    key: int
    """`HostOptimizer.key` returned it for the unit and the step."""
    compiled: bool
    """Whether kernels may be compiled."""


class DeviceOptimizer(Protocol):
    """Updates chunks on one device."""

    def update(self, chunk: DeviceChunk, step: DeviceStep) -> None:
        """Applies a step to weights and states, in place. Where the flag in the clip factors is 0,
        no bit changes.
        """


class DeviceAdamW:
    """AdamW with moments in any format."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self._optimizer: Optimizer = optimizer
        self._is_rounded = OPTIMIZERS[optimizer].is_rounded
        self._tables = moment_tables(device) if self._is_rounded else []

    def update(self, chunk: DeviceChunk, step: DeviceStep) -> None:
        decay_numel, numel = chunk.layout.decay_numel, chunk.grad.numel()
        if not self._is_rounded:
            decayed = min(max(0, decay_numel - chunk.start), numel)
            moments = {name: chunk.states[name][:numel] for name in MOMENTS}
            planes = chunk.weights | moments
            update(planes, chunk.grad, step.factors, decayed, step.compiled)
            return
        ranges = chunk.layout.state_ranges(self._optimizer)[MOMENTS[0]]
        parts = [range_.within(chunk.start, chunk.stop) for range_ in ranges]
        rounded = RoundedPlanes(
            [part for part in parts if part is not None],
            chunk.start,
            chunk.grad,
            list(chunk.weights.values()),
            [chunk.states[name] for name in MOMENTS],
        )
        rounded_step = RoundedStep(step.factors, self._tables, step.key)
        update_rounded(rounded, rounded_step, decay_numel, step.compiled)

"""Muon updates the matrices of blocks, and AdamW all other parameters.

This file has the formula (https://kellerjordan.github.io/posts/muon/), for the host and for the
device. An update's size depends on the larger side of its matrix:

    g = clip * gradient
    m = m + (g - m) * (1 - momentum)
    o = orthogonalized(g + (m - g) * momentum)
    w = (1 - rate * decay) * w - 0.2 * sqrt(side) * rate * o

- That is `torch.optim.Muon` with its defaults (a momentum of 0.95, Nesterov, five iterations of
  Newton and Schulz with the same coefficients and rounding to bf16) and with
  `adjust_lr_fn="match_rms_adamw"`: an element of an update is about as large as AdamW's, so that
  one learning rate and one weight decay serve both ("Muon is Scalable for LLM Training", arXiv
  2502.16982).
- A matrix is updated at once, since each element of the update depends on all of them.
- As with AdamW, a subnormal momentum becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from engine.config.optimizers import MOMENTS, StateFormat, is_matrix_of_block
from engine.planning.layout.layout import UnitLayout
from engine.planning.layout.optimizer_states import StateRange, unit_kind
from engine.planning.schedule.shards import cut
from engine.runtime.optimizer.device_adamw import AT_ONCE, StepFactors, update, write_weights
from engine.runtime.optimizer.device_optimizer import DeviceChunk, DeviceStep

_MOMENTUM = 0.95
_RMS = 0.2
"""Root of the mean square of the elements of an update, over the learning rate."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of an iteration of Newton and Schulz, of odd powers in order."""
ITERATIONS = 5
LEAST_NORM = 1e-7
PRODUCTS = torch.bfloat16
"""Matrices are multiplied in this dtype, in the mode `float32` too, as torch does."""
_SMALLEST_NORMAL = 2.0**-126
RATE = 8
"""Place of the learning rate among the scalars of a step. The ones before it are AdamW's."""


class Matrix(NamedTuple):
    """A matrix of a block, in the planes of its unit."""

    start: int
    stop: int
    shape: tuple[int, int]
    decays: bool
    """Whether weight decay applies."""


class MatrixPlanes(NamedTuple):
    """The planes of a matrix, each flat [elements]."""

    grad: torch.Tensor
    weights: list[torch.Tensor]
    """One plane in fp32, or weight_high and weight_low."""
    momentum: torch.Tensor


def matrices_of(layout: UnitLayout) -> Iterator[Matrix]:
    """Yields the matrices of a unit that are trained."""
    kind = unit_kind(layout.unit)
    for spec, offset in layout.trained:
        if is_matrix_of_block(spec.shape, kind):
            rows, columns = spec.shape
            yield Matrix(offset, offset + spec.numel, (rows, columns), spec.decay)


def adamw_ranges(layout: UnitLayout) -> list[StateRange]:
    """Returns the ranges of elements that AdamW updates, each with its place in the plane of second
    moments.
    """
    ranges = layout.state_ranges("muon")[MOMENTS[1]]
    return [range_ for range_ in ranges if range_.kind != StateFormat.NONE]


@torch.no_grad()
def update_matrix(
    planes: MatrixPlanes,
    matrix: Matrix,
    factors: StepFactors,
    orthogonalize: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Applies a step to a matrix, in place. Where the flag in the clip factors is 0, no bit
    changes.

    orthogonalize: replaces the singular values of a matrix of `PRODUCTS`, which it may change, by
    numbers near 1.
    """
    apply, numel = factors.clip[1] > 0, matrix.stop - matrix.start
    direction = torch.empty(numel, dtype=PRODUCTS, device=planes.grad.device)
    for start, stop in cut(numel, AT_ONCE):
        momentum = planes.momentum[start:stop]
        gradient = planes.grad[start:stop].float() * factors.clip[0]
        new = momentum + (gradient - momentum) * (1 - _MOMENTUM)
        # The host does the same, because subnormal numbers are slow there.
        new = torch.where(new.abs() < _SMALLEST_NORMAL, 0.0, new)
        direction[start:stop] = new - (new - gradient) * (1 - _MOMENTUM)
        momentum.copy_(torch.where(apply, new, momentum))
    taken = orthogonalize(direction.view(matrix.shape)).reshape(-1)
    rate = factors.scalars[RATE] * (_RMS * math.sqrt(max(matrix.shape)))
    keep = factors.scalars[RATE - 1] if matrix.decays else torch.ones_like(rate)
    for start, stop in cut(numel, AT_ONCE):
        weights = [plane[start:stop] for plane in planes.weights]
        write_weights(weights, taken[start:stop].float() * rate, keep, apply)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the matrix [rows, columns] of `update_matrix` with singular values near 1, by
    products on its device.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x.div_(x.norm().clamp(min=LEAST_NORM))
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class DeviceMuon:
    """Updates chunks on the device. Those of blocks are whole units."""

    def update(self, chunk: DeviceChunk, step: DeviceStep) -> None:
        """Raises ValueError where the chunk cuts a matrix."""
        weights, first = list(chunk.weights.values()), chunk.states[MOMENTS[0]]
        for matrix in matrices_of(chunk.layout):
            if chunk.start >= matrix.stop or chunk.stop <= matrix.start:
                continue
            if chunk.start > matrix.start or chunk.stop < matrix.stop:
                raise ValueError(f"a chunk of {chunk.layout.unit} cuts a matrix in two")
            inside = slice(matrix.start - chunk.start, matrix.stop - chunk.start)
            planes = MatrixPlanes(
                chunk.grad[inside], [plane[inside] for plane in weights], first[inside]
            )
            update_matrix(planes, matrix, step.factors, orthogonalized)
        factors = StepFactors(step.factors.clip, step.factors.scalars[:RATE])
        place = None
        for range_ in adamw_ranges(chunk.layout):
            part = range_.within(chunk.start, chunk.stop)
            if part is None:
                continue
            place = part.place if place is None else place  # where the chunk begins in its plane
            inside = slice(part.start - chunk.start, part.stop - chunk.start)
            second = (part.place - place) // 4
            moments = {
                MOMENTS[0]: first[inside],
                MOMENTS[1]: chunk.states[MOMENTS[1]][second : second + part.stop - part.start],
            }
            decayed = min(max(0, chunk.layout.decay_numel - part.start), part.stop - part.start)
            parts = {name: plane[inside] for name, plane in chunk.weights.items()}
            update(parts | moments, chunk.grad[inside], factors, decayed, step.compiled)

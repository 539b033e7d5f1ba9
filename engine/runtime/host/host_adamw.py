"""`HostAdamW` applies AdamW to the planes of a `HostStates`, in place, at memory speed.

- The formula, its rounding and the differences from `torch.optim.AdamW` are described in
  `engine.runtime.optimizer.host_kernels`, whose kernels do the arithmetic.
- This file computes the scalars of a step in double precision and rounds each to fp32 once.
- Weight decay is decoupled. It applies to the decayed range at the front of each plane.
- Gradients are multiplied by the clip factor as they are read; the gradient plane is not changed.
- Moments that are not all in fp32 are updated range by range
  (`engine.planning.layout.optimizer_states`), each with the kernel for its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from engine.config.optimizers import MOMENTS, OPTIMIZERS, OptimizerSettings, StateFormat
from engine.planning.layout.optimizer_states import StateRange
from engine.runtime.host.host_optimizer import GradientChunk, HostOptimizer, HostStep
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.host_kernels import Scalars, kernel
from engine.runtime.optimizer.host_threads import Workers
from engine.runtime.optimizer.moment_codes import moment_map
from engine.runtime.optimizer.moment_kernels import moment_kernel
from engine.runtime.optimizer.two_pass_kernels import two_pass_kernel

_SQUARE_BIAS = 2.0**-108
"""Bias that is added to squared gradients, so that exp_avg_sq is never subnormal. When its root is
added to an eps of at least 1.9e-9, the root rounds away. For a smaller eps no bias is used.
"""


class _Part(NamedTuple):
    """Range of the elements of a unit, with what is not in planes of the host states."""

    unit: str
    start: int
    gradient: np.ndarray
    moments: tuple[np.ndarray, ...]
    """Both moments are rows of bytes, uint8 [bytes], of which the unit's planes are a part."""
    place: int
    """Byte of the unit's planes of moments at which these rows begin."""

    @property
    def numel(self) -> int:
        return self.gradient.size

    @property
    def stop(self) -> int:
        return self.start + self.gradient.size

    def between(self, start: int, stop: int) -> _Part:
        """Returns the part of these elements of the unit."""
        gradient = self.gradient[start - self.start : stop - self.start]
        return self._replace(start=start, gradient=gradient)

    def moments_of(self, range_: StateRange) -> list[np.ndarray]:
        """Returns the bytes of both moments of a range, uint8 [bytes]."""
        begin = range_.place - self.place
        return [moment[begin : begin + range_.bytes] for moment in self.moments]


class HostAdamW(HostOptimizer):
    """Updates the units of one `HostStates`. With moments in fp32, its results are those of
    `torch.optim.AdamW` on fp32 masters except for rounding. They do not depend on `threads` (by
    default all cores but two). The kernels are compiled by the constructor, not in the first step.
    """

    def __init__(self, states: HostStates, settings: OptimizerSettings, threads: int | None = None):
        super().__init__(settings.seed)
        self._states = states
        self._beta1 = settings.beta1
        self._beta2 = settings.beta2
        self._weight_decay = settings.weight_decay
        # With an eps that is 0 in fp32, 0 would be divided by 0 wherever the gradient has always
        # been 0, which is at least the case in alignment gaps.
        self._eps = max(settings.eps, float(np.finfo(np.float32).tiny))
        # The root of the bias is 2**-54. It rounds away if it is below half a unit in the last
        # place of eps.
        bias_vanishes = settings.eps >= math.sqrt(_SQUARE_BIAS) * 2.0**25
        self._bias = _SQUARE_BIAS if bias_vanishes else 0.0
        is_split = states.dtype == "bfloat16"
        self._weights = ["weight_high", "weight_low"] if is_split else ["weight_high"]
        weights = self._kind = "split" if is_split else "float"
        self._kernel = kernel(f"adamw_{weights}")
        self._codes_kernel = self._halves_kernel = self._kernel
        if OPTIMIZERS[states.optimizer].is_rounded:
            self._codes_kernel = moment_kernel(f"codes_{weights}")
            self._halves_kernel = moment_kernel(f"halves_{weights}")
            first, second = moment_map(signed=True), moment_map(signed=False)
            self._maps = first.values, first.entries, second.values, second.entries
        self._workers = Workers(threads, "adamw")

    def scalars(self, step: int, learning_rate: float) -> np.ndarray:
        """Returns the scalars of step `step` (from 1), float32 [8]: 1 - beta1, beta2, 1 - beta2,
        the rate over the first bias correction, the inverse root of the second one, eps, the bias
        for squared gradients, and the factor by which decay scales a weight.
        """
        return np.array(
            [
                1.0 - self._beta1,
                self._beta2,
                1.0 - self._beta2,
                learning_rate / (1.0 - self._beta1**step),
                1.0 / math.sqrt(1.0 - self._beta2**step),
                self._eps,
                self._bias,
                1.0 - learning_rate * self._weight_decay,
            ],
            dtype=np.float32,
        )

    def update(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        whole = self._whole(unit, chunk)
        scalars = self._with_clip(step)
        layout = self._states.layouts[unit]
        key = self.key(unit, step.number)
        for range_ in layout.state_ranges(self._states.optimizer)[MOMENTS[0]]:
            here = range_.within(whole.start, whole.stop)
            if here is None:
                continue
            if here.kind == StateFormat.FP32:
                self._update_fp32(whole.between(here.start, here.stop), here, scalars)
                continue
            for each, factors in _by_decay(here, layout.decay_numel, scalars):
                part = whole.between(each.start, each.stop)
                self._update_rounded(part, each, factors, key)

    def update_weights(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        """All moments must be in fp32."""
        part = self._whole(unit, chunk)
        scalars = self._with_clip(step)
        weights, _ = self._two_pass_kernels()
        self._run_fp32(weights, part, self._fp32_moments(part), scalars)

    def update_moments(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        part = self._whole(unit, chunk)
        scalars = self._with_clip(step)
        planes = (part.gradient, *self._fp32_moments(part))
        _, moments = self._two_pass_kernels()
        self._workers.share(moments, part.numel, planes, scalars)

    def compile_for(self, two_passes: bool) -> None:
        if two_passes and OPTIMIZERS[self._states.optimizer].has_two_passes:
            self._two_pass_kernels()
        else:
            super().compile_for(two_passes)

    def _two_pass_kernels(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Returns the kernel that updates weights, and the one that updates moments."""
        return two_pass_kernel(f"weights_{self._kind}"), two_pass_kernel(f"moments_{self._kind}")

    def _with_clip(self, step: HostStep) -> Scalars:
        """Returns the scalars of a step in the order in which kernels take them."""
        *others, keep = HostAdamW.scalars(self, step.number, step.learning_rate)
        return (np.float32(step.clip_factor), keep, *others)

    def _whole(self, unit: str, chunk: GradientChunk | None) -> _Part:
        """Returns the elements of a chunk with their moments; those of the unit without one."""
        if chunk is None:
            chunk = GradientChunk(0, self._states.array(unit, "grad"))
        if chunk.states is None:
            planes = (self._states.array(unit, plane).view(np.uint8) for plane in MOMENTS)
            return _Part(unit, chunk.start, chunk.grad, tuple(planes), 0)
        stop = chunk.start + chunk.grad.size
        layout, optimizer = self._states.layouts[unit], self._states.optimizer
        place, _ = layout.state_bounds(optimizer, MOMENTS[0], chunk.start, stop)
        return _Part(unit, chunk.start, chunk.grad, chunk.states, place)

    def _update_fp32(self, part: _Part, range_: StateRange, scalars: Scalars) -> None:
        """Updates elements whose moments are in fp32. They are those of `range_`."""
        moments = [moment.view(np.float32) for moment in part.moments_of(range_)]
        self._run_fp32(self._kernel, part, moments, scalars)

    def _run_fp32(
        self,
        kernel: Callable[..., None],
        part: _Part,
        moments: Sequence[np.ndarray],
        scalars: Scalars,
    ) -> None:
        """Runs a kernel on elements whose `moments` are in fp32."""
        decay_numel = self._states.layouts[part.unit].decay_numel
        decayed = min(max(0, decay_numel - part.start), part.numel)
        planes = (part.gradient, *self._weights_of(part), *moments)
        self._workers.share(kernel, part.numel, decayed, planes, scalars)

    def _fp32_moments(self, part: _Part) -> list[np.ndarray]:
        """Returns both moments of a part, all of which are in fp32."""
        begin, end = (4 * element - part.place for element in (part.start, part.stop))
        return [moment[begin:end].view(np.float32) for moment in part.moments]

    def _update_rounded(self, part: _Part, range_: StateRange, scalars: Scalars, key: int) -> None:
        """Updates elements whose moments are in bf16 or in 8 bits. They are those of `range_`."""
        grad, weights = part.gradient, self._weights_of(part)
        first, second = part.moments_of(range_)
        if range_.kind == StateFormat.CODES:
            codes = (first, first.view(np.float32), second, second.view(np.float32))
            self._workers.share(
                self._codes_kernel, part.numel, (grad, weights, codes), scalars, self._maps
            )
            return
        halves = (first.view(np.uint16), second.view(np.uint16))
        keyed = (np.uint32(key), np.uint32(part.start))
        self._workers.share(
            self._halves_kernel, part.numel, (grad, weights, halves), scalars, keyed
        )

    def _weights_of(self, part: _Part) -> tuple[np.ndarray, ...]:
        planes = [self._states.array(part.unit, plane) for plane in self._weights]
        return tuple(plane[part.start : part.stop] for plane in planes)

    def close(self) -> None:
        self._workers.close()


def _by_decay(
    range_: StateRange, decay_numel: int, scalars: Scalars
) -> list[tuple[StateRange, Scalars]]:
    """Returns the part of a range that weight decay applies to, and the other one, each with its
    scalars.
    """
    found = []
    for start, stop, keep in (
        (range_.start, decay_numel, scalars[1]),
        (decay_numel, range_.stop, np.float32(1)),
    ):
        part = range_.within(start, stop)
        if part is not None:
            found.append((part, (scalars[0], keep, *scalars[2:])))
    return found

"""These kernels apply one step of AdamW in two passes: the first one updates the weights, and the
second one the moments. Both compute the moments by the formula of
`engine.runtime.optimizer.host_kernels`, so the bits are those of one pass.

The next forward pass waits for weights, not for moments. For a parameter in the mode `bfloat16`,
one pass reads 14 bytes and writes 12. The first of two passes reads 14 and writes 4, so weights are
ready in two thirds of the time. The second one reads 10 and writes 8 while the device computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from engine.runtime.optimizer.host_kernels import (
    CHUNKS,
    FLOAT,
    FLOAT_PLANES,
    HALF,
    SCALARS,
    SPLIT_PLANES,
    Planes,
    Scalars,
    bits_to_keep,
    compiled,
    first_moment,
    high_of,
    inner,
    joined,
    low_of,
    second_moment,
    taken,
    updated_weight,
    widen,
    without_decay,
)

_SPLIT_MOMENTS = types.Tuple((HALF, FLOAT, FLOAT))
_FLOAT_MOMENTS = types.Tuple((FLOAT, FLOAT, FLOAT))

# ---------------------------------------------------------------- loops over a chunk


@inner
def _update_split(planes: Planes, scalars: Scalars) -> None:
    grad, high, low, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        g = widen(grad[i]) * scalars[0]
        m = first_moment(exp_avg[i], g, scalars)
        v = second_moment(exp_avg_sq[i], g, scalars)
        bits = bits_to_keep(updated_weight(joined(high[i], low[i]), m, v, scalars))
        high[i] = high_of(bits)
        low[i] = low_of(bits)


@inner
def _update_float(planes: Planes, scalars: Scalars) -> None:
    grad, weight, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        g = grad[i] * scalars[0]
        m = first_moment(exp_avg[i], g, scalars)
        v = second_moment(exp_avg_sq[i], g, scalars)
        weight[i] = updated_weight(weight[i], m, v, scalars)


@inner
def _move_by_halves(planes: Planes, scalars: Scalars) -> None:
    grad, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        g = widen(grad[i]) * scalars[0]
        exp_avg[i] = first_moment(exp_avg[i], g, scalars)
        exp_avg_sq[i] = second_moment(exp_avg_sq[i], g, scalars)


@inner
def _move_by_floats(planes: Planes, scalars: Scalars) -> None:
    grad, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        g = grad[i] * scalars[0]
        exp_avg[i] = first_moment(exp_avg[i], g, scalars)
        exp_avg_sq[i] = second_moment(exp_avg_sq[i], g, scalars)


# ---------------------------------------------------------------- kernels that take chunks


def _weights_split(
    counter: np.ndarray, chunk: int, decayed: int, planes: Planes, scalars: Scalars
) -> None:
    grad, high, low, exp_avg, exp_avg_sq = planes
    undecayed = without_decay(scalars)
    a, b, c = taken(counter, chunk, decayed, grad.size)
    while a < grad.size:
        _update_split((grad[a:b], high[a:b], low[a:b], exp_avg[a:b], exp_avg_sq[a:b]), scalars)
        _update_split((grad[b:c], high[b:c], low[b:c], exp_avg[b:c], exp_avg_sq[b:c]), undecayed)
        a, b, c = taken(counter, chunk, decayed, grad.size)


def _weights_float(
    counter: np.ndarray, chunk: int, decayed: int, planes: Planes, scalars: Scalars
) -> None:
    grad, weight, exp_avg, exp_avg_sq = planes
    undecayed = without_decay(scalars)
    a, b, c = taken(counter, chunk, decayed, grad.size)
    while a < grad.size:
        _update_float((grad[a:b], weight[a:b], exp_avg[a:b], exp_avg_sq[a:b]), scalars)
        _update_float((grad[b:c], weight[b:c], exp_avg[b:c], exp_avg_sq[b:c]), undecayed)
        a, b, c = taken(counter, chunk, decayed, grad.size)


def _moments_split(counter: np.ndarray, chunk: int, planes: Planes, scalars: Scalars) -> None:
    grad, exp_avg, exp_avg_sq = planes
    a, _, b = taken(counter, chunk, 0, grad.size)
    while a < grad.size:
        _move_by_halves((grad[a:b], exp_avg[a:b], exp_avg_sq[a:b]), scalars)
        a, _, b = taken(counter, chunk, 0, grad.size)


def _moments_float(counter: np.ndarray, chunk: int, planes: Planes, scalars: Scalars) -> None:
    grad, exp_avg, exp_avg_sq = planes
    a, _, b = taken(counter, chunk, 0, grad.size)
    while a < grad.size:
        _move_by_floats((grad[a:b], exp_avg[a:b], exp_avg_sq[a:b]), scalars)
        a, _, b = taken(counter, chunk, 0, grad.size)


_SIGNATURES: dict[str, tuple[Callable, Any]] = {
    "weights_split": (_weights_split, types.void(*CHUNKS, types.int64, SPLIT_PLANES, SCALARS)),
    "weights_float": (_weights_float, types.void(*CHUNKS, types.int64, FLOAT_PLANES, SCALARS)),
    "moments_split": (_moments_split, types.void(*CHUNKS, _SPLIT_MOMENTS, SCALARS)),
    "moments_float": (_moments_float, types.void(*CHUNKS, _FLOAT_MOMENTS, SCALARS)),
}


@functools.cache
def two_pass_kernel(name: str) -> Callable[..., None]:
    """Returns a compiled kernel, for `Workers.share`. Its arrays are flat, contiguous and equally
    long, shape [numel].

    - `weights_split(counter, chunk, decayed, planes, scalars)` and `weights_float(...)` take what
      `adamw_split` and `adamw_float` take. They change the weights and leave the moments.
    - `moments_split(counter, chunk, planes, scalars)` and `moments_float(...)` change the moments.
      Their planes are the gradient, exp_avg and exp_avg_sq.
    """
    return compiled(*_SIGNATURES[name])

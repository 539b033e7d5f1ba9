"""Host kernels at memory speed: AdamW on planes, and splitting fp32 values into two 16-bit planes
and joining them.

Each kernel is serial and releases the GIL; several threads run it on chunks of fixed bounds, so
bits do not depend on how many threads there are. An fp32 value is its bf16 rounding (`high`, half
away from zero) and a signed 16-bit rest (`low`): ``bits == (high << 16) + low``. Two kinds of
values are changed by the split, so that `high` alone tells the truth: NaNs become the quiet NaN,
and finite values that would round to infinity become the largest that does not.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.machine.cgroups import usable_cores

CHUNK = 1 << 20
"""Elements that a worker takes at once: some milliseconds of work, and a multiple of every vector
width.
"""
SHARE = 1 << 18
"""The same where a kernel itself takes the next ones, without the interpreter's lock."""

MAX_THREADS = 32
FREE_CORES = 2
"""Of eight and more, those that are left to the threads that launch the device's work."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def default_threads() -> int:
    """The cores that this process may use but for two, 32 at most: host memory is saturated by
    then.
    """
    cores = usable_cores()
    return min(cores - FREE_CORES if cores >= 4 * FREE_CORES else cores, MAX_THREADS)


class Workers:
    """Own threads that drain a list of chunks; with one thread the caller does the work itself."""

    def __init__(self, threads: int | None, name: str):
        self.threads = default_threads() if threads is None else max(1, threads)
        self._pool = (
            ThreadPoolExecutor(self.threads, thread_name_prefix=name) if self.threads > 1 else None
        )

    def run(self, task: Callable[..., None], chunks: Iterable[tuple]) -> None:
        """Call ``task(*chunk)`` for every chunk and return when all are done; the first error is
        raised.
        """
        waiting = deque(chunks)
        if self._pool is None or len(waiting) == 1:
            _drain(task, waiting)
            return
        futures = [
            self._pool.submit(_drain, task, waiting) for _ in range(min(self.threads, len(waiting)))
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def share(self, kernel: Callable[..., None], numel: int, *arguments: Any) -> None:
        """Call ``kernel(next, SHARE, *arguments)`` in every thread: a kernel for `numel` elements
        that takes its chunks from the counter ``next`` itself, so that no thread waits for the
        interpreter's lock between two of them.
        """
        counter = np.zeros(1, np.int64)
        self.run(kernel, [(counter, SHARE, *arguments)] * min(self.threads, -(-numel // SHARE)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _drain(task: Callable[..., None], waiting: deque) -> None:
    while True:
        try:
            chunk = waiting.popleft()
        except IndexError:
            return
        try:
            task(*chunk)
        except BaseException:
            waiting.clear()
            raise


def ranges(start: int, stop: int, size: int = CHUNK) -> list[tuple[int, int]]:
    """``(start, stop)`` pairs of at most `size` that cover a range in order."""
    return [(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


# ---------------------------------------------------------------- bits

# numba widens every 32-bit integer operation to 64 bits, which halves the vector width: these are
# written as LLVM code.


@intrinsic
def _widen(typing_context, high):
    def generate(context, builder, signature, args):
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(types.uint16), generate


@intrinsic
def _joined(typing_context, high, low):
    def generate(context, builder, signature, args):
        upper = builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(builder.add(upper, builder.sext(args[1], _I32)), _F32)

    return types.float32(types.uint16, types.int16), generate


@intrinsic
def _bits_to_keep(typing_context, value):
    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
        sign = builder.and_(bits, _I32(0x80000000))
        rounds_to_infinity = builder.and_(
            builder.icmp_unsigned(">=", magnitude, _I32(0x7F7F8000)),
            builder.icmp_unsigned("<", magnitude, _I32(0x7F800000)),
        )
        is_nan = builder.icmp_unsigned(">", magnitude, _I32(0x7F800000))
        bits = builder.select(rounds_to_infinity, builder.or_(sign, _I32(0x7F7F7FFF)), bits)
        return builder.select(is_nan, builder.or_(sign, _I32(0x7FC00000)), bits)

    return types.int32(types.float32), generate


@intrinsic
def _high(typing_context, bits):
    def generate(context, builder, signature, args):
        return builder.trunc(builder.lshr(builder.add(args[0], _I32(0x8000)), _I32(16)), _I16)

    return types.uint16(types.int32), generate


@intrinsic
def _low(typing_context, bits):
    def generate(
        context, builder, signature, args
    ):  # high << 16 ends in 16 zeros, so the rest is the lower half
        return builder.trunc(args[0], _I16)

    return types.int16(types.int32), generate


# ---------------------------------------------------------------- kernels

_HALF, _REST, _FLOAT = types.uint16[::1], types.int16[::1], types.float32[::1]
_SCALARS = (types.float32,) * 9
_CHUNKS = (types.int64[::1], types.int64)
_SMALLEST_NORMAL = np.float32(2.0**-126)

# Subnormal moments would cost 6 to 18 times a step's time, and for ever: decay rounds them back to
# themselves. Rows of an embedding or a head that are no longer seen get there. So a subnormal
# exp_avg becomes 0, and a `bias` that vanishes in eps keeps exp_avg_sq out of that range.


def _split(source, high, low):
    for i in range(source.size):
        bits = _bits_to_keep(source[i])
        high[i] = _high(bits)
        low[i] = _low(bits)


def _join(high, low, target):
    for i in range(target.size):
        target[i] = _joined(high[i], low[i])


@intrinsic
def _take(typing_context, counter):
    def generate(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.IntType(64)(1), "monotonic")

    return types.int64(types.int64[::1]), generate


_OPTIONS = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}


@njit(**_OPTIONS)
def _update_split(
    grad,
    high,
    low,
    exp_avg,
    exp_avg_sq,
    clip,
    keep,
    take1,
    beta2,
    take2,
    step_size,
    root2,
    eps,
    bias,
):
    for i in range(grad.size):
        g = _widen(grad[i]) * clip
        m = exp_avg[i]
        m += (g - m) * take1
        m = np.float32(0) if abs(m) < _SMALLEST_NORMAL else m
        v = exp_avg_sq[i] * beta2 + take2 * (g * g + bias)
        w = _joined(high[i], low[i]) * keep - step_size * (m / (math.sqrt(v) * root2 + eps))
        exp_avg[i] = m
        exp_avg_sq[i] = v
        bits = _bits_to_keep(w)
        high[i] = _high(bits)
        low[i] = _low(bits)


@njit(**_OPTIONS)
def _update_float(
    grad, weight, exp_avg, exp_avg_sq, clip, keep, take1, beta2, take2, step_size, root2, eps, bias
):
    for i in range(grad.size):
        g = grad[i] * clip
        m = exp_avg[i]
        m += (g - m) * take1
        m = np.float32(0) if abs(m) < _SMALLEST_NORMAL else m
        v = exp_avg_sq[i] * beta2 + take2 * (g * g + bias)
        weight[i] = weight[i] * keep - step_size * (m / (math.sqrt(v) * root2 + eps))
        exp_avg[i] = m
        exp_avg_sq[i] = v


@njit(**_OPTIONS)
def _update_nothing(grad, high, low, exp_avg, exp_avg_sq):
    for i in range(grad.size):
        high[i] ^= grad[i]
        low[i] = ~low[i]
        exp_avg[i] = -exp_avg[i]
        exp_avg_sq[i] = -exp_avg_sq[i]


# The updates above are given slices: loops over part of an array are not vectorised, for a start
# might be negative.


@njit(**_OPTIONS)
def _ranges(counter, chunk, decayed, numel):
    """Start, stop and whether weight decay applies, in chunks that no other thread has taken."""
    while True:
        start = _take(counter) * chunk
        if start >= numel:
            return
        stop = min(start + chunk, numel)
        middle = min(max(start, decayed), stop)
        yield start, middle, True
        yield middle, stop, False


def _adamw_split(
    counter,
    chunk,
    decayed,
    grad,
    high,
    low,
    exp_avg,
    exp_avg_sq,
    clip,
    keep,
    take1,
    beta2,
    take2,
    step_size,
    root2,
    eps,
    bias,
):
    for a, b, decays in _ranges(counter, chunk, decayed, grad.size):
        _update_split(
            grad[a:b],
            high[a:b],
            low[a:b],
            exp_avg[a:b],
            exp_avg_sq[a:b],
            clip,
            keep if decays else np.float32(1),
            take1,
            beta2,
            take2,
            step_size,
            root2,
            eps,
            bias,
        )


def _adamw_float(
    counter,
    chunk,
    decayed,
    grad,
    weight,
    exp_avg,
    exp_avg_sq,
    clip,
    keep,
    take1,
    beta2,
    take2,
    step_size,
    root2,
    eps,
    bias,
):
    for a, b, decays in _ranges(counter, chunk, decayed, grad.size):
        _update_float(
            grad[a:b],
            weight[a:b],
            exp_avg[a:b],
            exp_avg_sq[a:b],
            clip,
            keep if decays else np.float32(1),
            take1,
            beta2,
            take2,
            step_size,
            root2,
            eps,
            bias,
        )


def _touch(counter, chunk, grad, high, low, exp_avg, exp_avg_sq):
    for a, b, _ in _ranges(counter, chunk, 0, grad.size):
        _update_nothing(grad[a:b], high[a:b], low[a:b], exp_avg[a:b], exp_avg_sq[a:b])


_SIGNATURES: dict[str, tuple[Callable, Any]] = {
    "split": (_split, types.void(_FLOAT, _HALF, _REST)),
    "join": (_join, types.void(_HALF, _REST, _FLOAT)),
    "adamw_split": (
        _adamw_split,
        types.void(*_CHUNKS, types.int64, _HALF, _HALF, _REST, _FLOAT, _FLOAT, *_SCALARS),
    ),
    "adamw_float": (
        _adamw_float,
        types.void(*_CHUNKS, types.int64, _FLOAT, _FLOAT, _FLOAT, _FLOAT, *_SCALARS),
    ),
    "touch": (_touch, types.void(*_CHUNKS, _HALF, _HALF, _REST, _FLOAT, _FLOAT)),
}


@functools.cache
def kernel(name: str) -> Callable[..., None]:
    """The compiled kernel, on flat contiguous arrays of equal length: `split(source, high, low)`,
    `join(high, low, target)`, or, for `Workers.share` and with so many `decayed` elements at the
    front, `adamw_split(next, chunk, decayed, grad, high, low, exp_avg, exp_avg_sq, *scalars)` and
    `adamw_float(next, chunk, decayed, grad, weight, exp_avg, exp_avg_sq, *scalars)`; `touch(next,
    chunk, grad, high, low, exp_avg, exp_avg_sq)` moves the same bytes and computes next to nothing.
    The first call in a process compiles it or reads it from numba's cache.
    """
    function, signature = _SIGNATURES[name]
    try:
        return njit(signature, cache=True, **_OPTIONS)(function)
    except (RuntimeError, OSError):  # no folder that the cache can be written to
        return njit(signature, **_OPTIONS)(function)

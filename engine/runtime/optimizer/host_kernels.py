"""These kernels work on planes at the speed of host memory. They apply AdamW, split fp32 values
into two 16-bit planes, and join such planes again.

How an fp32 value becomes two 16-bit values:

- `high` (uint16) holds the bits of the value rounded to bf16. Ties, values halfway between two bf16
  values, go away from zero: ``high = (bits + 0x8000) >> 16``. The remainder of a tie is then
  -32,768, which int16 holds; rounding down would need +32,768. (Gradients are not split: torch's
  `copy_` rounds them, with ties to even.)
- `low` (int16) holds the signed remainder, so that ``bits == (high << 16) + low``. Its bits are the
  lower half of `bits`, since ``high << 16`` ends in 16 zeros.
- Joining gives the fp32 value back exactly, except for two kinds of values. The split changes them
  so that `high` alone is NaN or infinite exactly when the fp32 value is: a NaN becomes the quiet
  NaN of its sign, and a finite value that would round to infinity becomes the largest that does
  not.

One step of AdamW (arXiv 1711.05101), in fp32 and in one pass over the planes:

    g = clip * gradient
    m = m + (g - m) * (1 - beta1)
    v = beta2 * v + (1 - beta2) * (g * g + bias)
    w = (1 - rate * decay) * w - rate / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

Where this differs from `torch.optim.AdamW`:

- The root is multiplied by an inverse where torch divides. Results differ in their last bits.
- An exp_avg (m) in the subnormal range becomes 0.
- `bias` (see `engine.runtime.host.host_adamw`) keeps exp_avg_sq (v) out of the subnormal range.
- In the mode `bfloat16`, gradients are read from bf16, and weights are split fp32 values.

Subnormal moments would make every later step 6 to 18 times as slow, because the decay of such a
moment rounds back to the same value. Without these rules, they would arise in the rows of an
embedding or a head whose tokens no longer occur in the data.

Each kernel is serial and releases the interpreter's lock; `engine.runtime.optimizer.host_threads`
runs it on chunks in several threads. `engine.runtime.optimizer.moment_kernels` has those for
moments that are not in fp32, and `engine.runtime.optimizer.two_pass_kernels` those that update
weights before moments.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()

_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000
"""Masks that take the magnitude and the sign from the bits of an fp32 value."""
_INFINITY = 0x7F800000
_FIRST_TO_ROUND_TO_INFINITY = 0x7F7F8000
_LARGEST_TO_KEEP = 0x7F7F7FFF
_QUIET_NAN = 0x7FC00000
_SMALLEST_NORMAL = np.float32(2.0**-126)

HALF, REST, FLOAT = types.uint16[::1], types.int16[::1], types.float32[::1]
CHUNKS = (types.int64[::1], types.int64)
SCALARS = types.UniTuple(types.float32, 9)
SPLIT_PLANES = types.Tuple((HALF, HALF, REST, FLOAT, FLOAT))
FLOAT_PLANES = types.Tuple((FLOAT, FLOAT, FLOAT, FLOAT))

Planes = tuple[np.ndarray, ...]
"""A kernel receives the planes of one unit in this order: the gradient, the weights (`high` and
`low`, or one plane in fp32), exp_avg and exp_avg_sq. Each is flat, shape [numel].
"""
Scalars = tuple[np.float32, ...]
"""A kernel receives the scalars of a step in this order: the clip factor, the factor by which
weight decay scales a weight, 1 - beta1, beta2, 1 - beta2, the rate over the first bias correction,
the inverse root of the second one, eps, and the bias for squared gradients.
"""


def llvm(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that generates LLVM code callable from kernels."""
    return intrinsic(function)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that kernels call."""
    return njit(**_options())(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that is written into every kernel that calls it. A call would copy each
    array that it is given, field by field.
    """
    return njit(forceinline=True, **_options())(function)


def _options() -> dict[str, Any]:
    """Returns numba's options: no interpreter lock, and division by zero as in IEEE 754.

    Products and sums are not contracted to fused multiply-adds. Each is rounded, as on the device,
    so that the bits depend neither on where a unit is updated nor on the processor.
    """
    return {"nogil": True, "error_model": "numpy"}


# ---------------------------------------------------------------- bits

# Numba widens every 32-bit integer operation to 64 bits, which halves the vector width. So these
# functions are written as LLVM code.


@llvm
def widen(_typing: Any, _high: Any) -> Any:
    """Returns the fp32 value of a bf16 value."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(types.uint16), generate


@llvm
def joined(_typing: Any, _high: Any, _low: Any) -> Any:
    """Returns the fp32 value of `high` and `low`: ``(high << 16) + low`` as bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        upper = builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(builder.add(upper, builder.sext(args[1], _I32)), _F32)

    return types.float32(types.uint16, types.int16), generate


@llvm
def bits_to_keep(_typing: Any, _value: Any) -> Any:
    """Returns the bits of an fp32 value, with NaNs and the largest finite values changed as
    described at the top of this file.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        magnitude = builder.and_(bits, _I32(_MAGNITUDE))
        sign = builder.and_(bits, _I32(_SIGN))
        rounds_to_infinity = builder.and_(
            builder.icmp_unsigned(">=", magnitude, _I32(_FIRST_TO_ROUND_TO_INFINITY)),
            builder.icmp_unsigned("<", magnitude, _I32(_INFINITY)),
        )
        is_nan = builder.icmp_unsigned(">", magnitude, _I32(_INFINITY))
        largest = builder.or_(sign, _I32(_LARGEST_TO_KEEP))
        bits = builder.select(rounds_to_infinity, largest, bits)
        return builder.select(is_nan, builder.or_(sign, _I32(_QUIET_NAN)), bits)

    return types.int32(types.float32), generate


@llvm
def high_of(_typing: Any, _bits: Any) -> Any:
    """Returns the upper half of the bits, rounded. Adding half a unit of its last place rounds ties
    away from zero, since the sign bit is separate from the magnitude.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.trunc(builder.lshr(builder.add(args[0], _I32(0x8000)), _I32(16)), _I16)

    return types.uint16(types.int32), generate


@llvm
def low_of(_typing: Any, _bits: Any) -> Any:
    """Returns the signed remainder, which is the lower half of the bits, since ``high << 16`` ends
    in 16 zeros.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.trunc(args[0], _I16)

    return types.int16(types.int32), generate


@llvm
def _take(_typing: Any, _counter: Any) -> Any:
    """Adds 1 to a counter that threads share, atomically, and returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.IntType(64)(1), "monotonic")

    return types.int64(types.int64[::1]), generate


# ---------------------------------------------------------------- loops over a chunk


def _split(source: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    for i in range(source.size):
        bits = bits_to_keep(source[i])
        high[i] = high_of(bits)
        low[i] = low_of(bits)


def _join(high: np.ndarray, low: np.ndarray, target: np.ndarray) -> None:
    for i in range(target.size):
        target[i] = joined(high[i], low[i])


@inlined
def first_moment(m: np.float32, g: np.float32, scalars: Scalars) -> np.float32:
    """Returns exp_avg after a step with the gradient `g`."""
    m += (g - m) * scalars[2]
    return np.float32(0) if abs(m) < _SMALLEST_NORMAL else m


@inlined
def second_moment(v: np.float32, g: np.float32, scalars: Scalars) -> np.float32:
    """Returns exp_avg_sq after a step with the gradient `g`."""
    return v * scalars[3] + scalars[4] * (g * g + scalars[8])


@inlined
def updated_weight(w: np.float32, m: np.float32, v: np.float32, scalars: Scalars) -> np.float32:
    """Returns a weight after a step, from the moments after it."""
    return w * scalars[1] - scalars[5] * (m / (math.sqrt(v) * scalars[6] + scalars[7]))


@inner
def update_split(planes: Planes, scalars: Scalars) -> None:
    """Applies the formula at the top of this file to split weights."""
    grad, high, low, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        g = widen(grad[i]) * scalars[0]
        m = first_moment(exp_avg[i], g, scalars)
        v = second_moment(exp_avg_sq[i], g, scalars)
        w = updated_weight(joined(high[i], low[i]), m, v, scalars)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        bits = bits_to_keep(w)
        high[i] = high_of(bits)
        low[i] = low_of(bits)


@inner
def update_float(planes: Planes, scalars: Scalars) -> None:
    """Applies the formula at the top of this file to fp32 weights."""
    grad, weight, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        g = grad[i] * scalars[0]
        m = first_moment(exp_avg[i], g, scalars)
        v = second_moment(exp_avg_sq[i], g, scalars)
        weight[i] = updated_weight(weight[i], m, v, scalars)
        exp_avg[i] = m
        exp_avg_sq[i] = v


@inner
def _update_nothing(planes: Planes) -> None:
    """Reads and writes the same memory as `update_split`, with almost no arithmetic."""
    grad, high, low, exp_avg, exp_avg_sq = planes
    for i in range(grad.size):
        high[i] ^= grad[i]
        low[i] = ~low[i]
        exp_avg[i] = -exp_avg[i]
        exp_avg_sq[i] = -exp_avg_sq[i]


# ---------------------------------------------------------------- kernels that take chunks

# The updates above are given slices. A loop over a part of an array would not be vectorised,
# because the compiler cannot rule out a negative start.


# They take chunks in a loop of their own and not from a generator: numba 0.68 never releases the
# arrays that a generator was given. Each update then left its counter in memory, and such small
# rests, scattered between the tensors of a step, kept the C library from using the freed memory
# around them again.


@inner
def taken(counter: np.ndarray, chunk: int, decayed: int, numel: int) -> tuple[int, int, int]:
    """Returns a chunk that no other thread has taken, as its start, the end of its decayed elements
    and its stop. The start is at least `numel` when no chunk is left. `counter` is int64 [1].
    """
    start = _take(counter) * chunk
    stop = min(start + chunk, numel)
    return start, min(max(start, decayed), stop), stop


@inner
def without_decay(scalars: Scalars) -> Scalars:
    """Returns the scalars with 1 as the factor by which decay scales a weight."""
    return (scalars[0], np.float32(1), *scalars[2:])


def _adamw_split(
    counter: np.ndarray, chunk: int, decayed: int, planes: Planes, scalars: Scalars
) -> None:
    grad, high, low, exp_avg, exp_avg_sq = planes
    undecayed = without_decay(scalars)
    a, b, c = taken(counter, chunk, decayed, grad.size)
    while a < grad.size:
        update_split((grad[a:b], high[a:b], low[a:b], exp_avg[a:b], exp_avg_sq[a:b]), scalars)
        update_split((grad[b:c], high[b:c], low[b:c], exp_avg[b:c], exp_avg_sq[b:c]), undecayed)
        a, b, c = taken(counter, chunk, decayed, grad.size)


def _adamw_float(
    counter: np.ndarray, chunk: int, decayed: int, planes: Planes, scalars: Scalars
) -> None:
    grad, weight, exp_avg, exp_avg_sq = planes
    undecayed = without_decay(scalars)
    a, b, c = taken(counter, chunk, decayed, grad.size)
    while a < grad.size:
        update_float((grad[a:b], weight[a:b], exp_avg[a:b], exp_avg_sq[a:b]), scalars)
        update_float((grad[b:c], weight[b:c], exp_avg[b:c], exp_avg_sq[b:c]), undecayed)
        a, b, c = taken(counter, chunk, decayed, grad.size)


def _touch(counter: np.ndarray, chunk: int, planes: Planes) -> None:
    grad, high, low, exp_avg, exp_avg_sq = planes
    a, _, b = taken(counter, chunk, 0, grad.size)
    while a < grad.size:
        _update_nothing((grad[a:b], high[a:b], low[a:b], exp_avg[a:b], exp_avg_sq[a:b]))
        a, _, b = taken(counter, chunk, 0, grad.size)


_SIGNATURES: dict[str, tuple[Callable, Any]] = {
    "split": (_split, types.void(FLOAT, HALF, REST)),
    "join": (_join, types.void(HALF, REST, FLOAT)),
    "adamw_split": (_adamw_split, types.void(*CHUNKS, types.int64, SPLIT_PLANES, SCALARS)),
    "adamw_float": (_adamw_float, types.void(*CHUNKS, types.int64, FLOAT_PLANES, SCALARS)),
    "touch": (_touch, types.void(*CHUNKS, SPLIT_PLANES)),
}


@functools.cache
def kernel(name: str) -> Callable[..., None]:
    """Returns a compiled kernel. Its arrays are flat, contiguous and equally long, shape [numel].

    - `split(source, high, low)` and `join(high, low, target)` convert whole arrays.
    - `adamw_split(counter, chunk, decayed, planes, scalars)` and `adamw_float(...)` are for
      `Workers.share`. `decayed` counts the elements at the front that weight decay applies to.
      `planes` and `scalars` are tuples in the order of `Planes` and `Scalars`.
    - `touch(counter, chunk, planes)` moves the same bytes as `adamw_split`, with almost no
      arithmetic.

    The first call in a process compiles the kernel, or reads it from numba's cache.
    """
    return compiled(*_SIGNATURES[name])


def compiled(function: Any, signature: Any) -> Callable[..., None]:
    """Compiles a kernel for a signature, or reads it from numba's cache."""
    # Numba's cache detects a change only in the file that defines a kernel, and a kernel may call
    # functions of another file. So the kernel has a name of its own for each state of the files.
    code = function.__code__.replace(co_qualname=f"{function.__name__}_{_digest()}")
    named = FunctionType(code, function.__globals__)
    try:
        return njit(signature, cache=True, **_options())(named)
    except (RuntimeError, OSError):  # numba found no writable folder for its cache
        return njit(signature, **_options())(named)


@functools.cache
def _digest() -> str:
    """Returns a digest of all files that define kernels, or constants in them."""
    folder = Path(__file__).parent
    paths = [*sorted(folder.glob("*_kernels.py")), folder / "moment_codes.py"]
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:12]

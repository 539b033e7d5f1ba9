"""These kernels multiply matrices on the host, for Muon. Their results do not depend on the number
of threads, which no library of matrix products promises: each sum has a fixed order.

Matrices are fp32 and hold bf16 values. Sums are in fp32 and are rounded to bf16 at the end, as
those of a GPU are, unless they are asked for exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from engine.runtime.optimizer.host_kernels import compiled, inner, llvm, widen

TILE = 32
"""Rows of a result that a thread computes at once."""
_COLUMNS = 512
"""Columns of a result that are computed at once: with 8 rows of a factor they fit in a core's
nearest cache.
"""
_TOGETHER = 8
"""Products that are added to a result at once."""

_I32 = ir.IntType(32)
_MATRIX = types.float32[:, ::1]


@llvm
def nearest_half(_typing: Any, _value: Any) -> Any:
    """Returns the bits of an fp32 value rounded to bf16, ties to even. A NaN stays one."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(builder.add(bits, _I32(0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        rounded = builder.select(is_nan, _I32(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(rounded, _I32(16)), ir.IntType(16))

    return types.uint16(types.float32), generate


@inner
def _add_rows(row: np.ndarray, factor: np.ndarray, columns: int, k: int, by: np.ndarray) -> None:
    """Adds the rows of `factor` from row `k` on, times the numbers `by`, to a part of a row that
    begins at a column.
    """
    end = columns + row.size
    if by.size == 8:
        r0, r1 = factor[k, columns:end], factor[k + 1, columns:end]
        r2, r3 = factor[k + 2, columns:end], factor[k + 3, columns:end]
        r4, r5 = factor[k + 4, columns:end], factor[k + 5, columns:end]
        r6, r7 = factor[k + 6, columns:end], factor[k + 7, columns:end]
        b0, b1, b2, b3, b4, b5, b6, b7 = by[0], by[1], by[2], by[3], by[4], by[5], by[6], by[7]
        for j in range(row.size):
            row[j] += ((b0 * r0[j] + b1 * r1[j]) + (b2 * r2[j] + b3 * r3[j])) + (
                (b4 * r4[j] + b5 * r5[j]) + (b6 * r6[j] + b7 * r7[j])
            )
        return
    for number in range(by.size):
        other, b = factor[k + number, columns:end], by[number]
        for j in range(row.size):
            row[j] += b * other[j]


@inner
def _round(values: np.ndarray) -> None:
    """Rounds fp32 values to bf16, ties to even, in place."""
    for i in range(values.size):
        values[i] = widen(nearest_half(values[i]))


@inner
def _add_gram(matrix: np.ndarray, target: np.ndarray, start: int, stop: int) -> None:
    """Sets rows of `target` to those of the product of the transposed matrix with itself."""
    target[start:stop] = np.float32(0)
    numbers = np.empty(_TOGETHER, np.float32)
    for columns in range(0, matrix.shape[1], _COLUMNS):
        end = min(columns + _COLUMNS, matrix.shape[1])
        for k in range(0, matrix.shape[0], _TOGETHER):
            count = min(_TOGETHER, matrix.shape[0] - k)
            for i in range(start, stop):
                for number in range(count):
                    numbers[number] = matrix[k + number, i]
                _add_rows(target[i, columns:end], matrix, columns, k, numbers[:count])


def _divide(matrix: np.ndarray, number: np.float32, exact: bool, start: int, stop: int) -> None:
    for i in range(start, stop):
        row = matrix[i]
        for j in range(row.size):
            row[j] /= number
        if not exact:
            _round(row)


def _gram(matrix: np.ndarray, target: np.ndarray, exact: bool, start: int, stop: int) -> None:
    _add_gram(matrix, target, start, stop)
    for i in range(start, stop):
        if not exact:
            _round(target[i])


def _factor(
    gram: np.ndarray,
    target: np.ndarray,
    by: tuple[np.float32, np.float32],
    exact: bool,
    start: int,
    stop: int,
) -> None:
    _add_gram(gram, target, start, stop)
    for i in range(start, stop):
        row, of_gram = target[i], gram[i]
        for j in range(row.size):
            row[j] = by[0] * of_gram[j] + by[1] * row[j]
        if not exact:
            _round(row)


def _times(
    matrix: np.ndarray, factor: np.ndarray, a: np.float32, exact: bool, start: int, stop: int
) -> None:
    sums = matrix[start:stop] * a
    for columns in range(0, factor.shape[1], _COLUMNS):
        end = min(columns + _COLUMNS, factor.shape[1])
        for k in range(0, factor.shape[0], _TOGETHER):
            last = min(k + _TOGETHER, factor.shape[0])
            for i in range(stop - start):
                _add_rows(sums[i, columns:end], factor, columns, k, matrix[start + i, k:last])
    for i in range(stop - start):
        if not exact:
            _round(sums[i])
    matrix[start:stop] = sums


_REST = (types.boolean, types.int64, types.int64)
_PAIR = types.UniTuple(types.float32, 2)
_SIGNATURES: dict[str, tuple[Callable[..., None], Any]] = {
    "divide": (_divide, types.void(_MATRIX, types.float32, *_REST)),
    "gram": (_gram, types.void(_MATRIX, _MATRIX, *_REST)),
    "factor": (_factor, types.void(_MATRIX, _MATRIX, _PAIR, *_REST)),
    "times": (_times, types.void(_MATRIX, _MATRIX, types.float32, *_REST)),
}

KERNELS = tuple(_SIGNATURES)


@functools.cache
def muon_kernel(name: str) -> Callable[..., None]:
    """Returns a compiled kernel, for `Workers.run`. It computes the rows of its result from `start`
    to `stop`.

    - `divide(matrix, number, exact, start, stop)` divides the matrix by a number.
    - `gram(matrix, target, exact, start, stop)` writes the product of the transposed matrix with
      itself to `target`.
    - `factor(gram, target, by, exact, start, stop)` writes a symmetric matrix times `by[0]`, plus
      its square times `by[1]`, to `target`.
    - `times(matrix, factor, a, exact, start, stop)` replaces the matrix by `a` times itself plus
      its product with the square `factor`.
    """
    return compiled(*_SIGNATURES[name])

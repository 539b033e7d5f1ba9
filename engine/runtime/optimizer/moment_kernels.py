"""The file contains the kernels of AdamW for moments in bf16 and in 8 bits.

All of them work on at most 256 elements at a time, which stay in the processor's first cache:

- They read both moments into fp32.
- They apply the update of `engine.runtime.optimizer.host_kernels` to the weights and to these fp32
  moments. So the weights change by moments that are not rounded yet.
- They round the new moments, and write them back.

Moments in 8 bits are rounded to the nearest number of their map
(`engine.runtime.optimizer.moment_codes`) times the largest magnitude of their block. Moments in
bf16 are rounded stochastically: up with a probability that is the part of a step by which the value
exceeds the lower neighbor. Rounding to the nearest would never change a second moment that moves
by less than half of a step, which is so with the usual beta2 of 0.999: a step of bf16 is 0.4 % to
0.8 % of the value.

The random bits of an element are a hash of its position and of a key, which `HostAdamW` derives
from the seed, the step and the unit. They depend on neither the threads nor the order of the work,
so a resumed run rounds as an uninterrupted one. The hash is "lowbias32" of Chris Wellons (public
domain); its lower 16 bits are for exp_avg, its upper 16 bits for exp_avg_sq.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.config.optimizers import BLOCK
from engine.planning.layout.optimizer_states import BLOCK_BYTES, MAXIMUM_BYTES
from engine.runtime.optimizer.host_kernels import (
    CHUNKS,
    FLOAT,
    HALF,
    REST,
    SCALARS,
    Scalars,
    compiled,
    inlined,
    taken,
    update_float,
    update_split,
    widen,
)
from engine.runtime.optimizer.moment_codes import SIZE
from engine.runtime.optimizer.value_kernels import (
    TABLE,
    code_of,
    decoded,
    entry_of,
    from_bits,
    halves_of,
    index_of,
    larger,
    noise_of,
    rounded,
    unowned,
)

_WORDS = BLOCK_BYTES // 4
"""A block begins at every such multiple of a plane that is seen as 32-bit numbers."""
_SIGNED_SIZE = SIZE[True]
BYTES = types.uint8[::1]
_KEYED = types.UniTuple(types.uint32, 2)
_MAPS = types.Tuple((FLOAT, TABLE, FLOAT, TABLE))

Maps = tuple[np.ndarray, ...]
"""A kernel receives the values and the entries of the map of exp_avg, then those of exp_avg_sq."""
Keyed = tuple[np.uint32, np.uint32]
"""A kernel receives the key of the unit's random bits, and the position of its first element in the
unit.
"""


# ---------------------------------------------------------------- the moments of a block


@inlined
def _decode(codes: np.ndarray, largest: np.float32, values: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.size):
        out[i] = decoded(codes[i], values) * largest


@inlined
def _largest(moment: np.ndarray) -> np.float32:
    bits = np.uint32(0)
    for i in range(moment.size):
        bits = larger(bits, moment[i])
    return from_bits(bits)


@inlined
def _encode(
    moment: np.ndarray, table: np.ndarray, is_signed: bool, codes: np.ndarray, room: np.ndarray
) -> np.float32:
    """Writes the codes of a moment, and returns its largest magnitude. `room` is uint32 of the
    moment's shape.
    """
    largest = _largest(moment)
    # A block of zeros is divided by 1.
    inverse = np.float32(1) / largest if largest > 0 else np.float32(1)
    # Second moments get at least the code above that of 0, except in a block of zeros.
    least = np.int32(1) if largest > 0 and not is_signed else np.int32(0)
    # These loops are apart, because only the second one, which reads the table, cannot be
    # vectorised.
    for i in range(moment.size):
        room[i] = index_of(moment[i] * inverse, is_signed)
    for i in range(moment.size):
        room[i] = entry_of(room[i], table)
    for i in range(moment.size):
        codes[i] = code_of(room[i], moment[i] * inverse, is_signed, least)
    return largest


@inlined
def _widen_all(halves: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.size):
        out[i] = widen(halves[i])


@inlined
def _round_both(
    first: np.ndarray, second: np.ndarray, halves: tuple[np.ndarray, np.ndarray], keyed: Keyed
) -> None:
    """Rounds both moments to bf16. Each is rounded with bits of its own."""
    exp_avg, exp_avg_sq = halves
    key, start = keyed
    for i in range(first.size):
        lower, upper = halves_of(noise_of(start + i, key))
        exp_avg[i] = rounded(first[i], lower)
        exp_avg_sq[i] = rounded(second[i], upper)


# ---------------------------------------------------------------- kernels that take chunks


def _update(_grad: Any, _weights: Any, _moments: Any, _scalars: Scalars) -> None:
    """Applies a step to at most 256 weights, which are split or one plane in fp32, and to their
    fp32 moments. Kernels call what `_update_by_planes` chooses.
    """


@overload(_update, jit_options={"forceinline": True})
def _update_by_planes(_grad: Any, _weights: Any, _moments: Any, _scalars: Any) -> Any:
    """Returns the function for these planes of weights."""
    if len(_weights) == 1:

        def of_float(_grad: Any, _weights: Any, _moments: Any, _scalars: Any) -> Any:
            update_float((_grad, _weights[0], _moments[0], _moments[1]), _scalars)

        return of_float

    def of_split(_grad: Any, _weights: Any, _moments: Any, _scalars: Any) -> Any:
        update_split((_grad, _weights[0], _weights[1], _moments[0], _moments[1]), _scalars)

    return of_split


def _part(_planes: Any, _start: int, _stop: int) -> Any:
    """Returns a part of each plane. Kernels call what `_part_of_planes` chooses."""


@overload(_part, jit_options={"forceinline": True})
def _part_of_planes(_planes: Any, _start: Any, _stop: Any) -> Any:
    """Returns the function for this many planes."""
    if len(_planes) == 1:

        def of_one(_planes: Any, _start: Any, _stop: Any) -> Any:
            return (_planes[0][_start:_stop],)

        return of_one

    def of_two(_planes: Any, _start: Any, _stop: Any) -> Any:
        return _planes[0][_start:_stop], _planes[1][_start:_stop]

    return of_two


def _all_unowned(_arrays: Any) -> Any:
    """Applies `unowned` to each array of a tuple. Kernels call what `_unowned_by_count`
    chooses.
    """


@overload(_all_unowned, jit_options={"forceinline": True})
def _unowned_by_count(_arrays: Any) -> Any:
    """Returns the function for this many arrays."""
    if len(_arrays) == 1:

        def of_one(_arrays: Any) -> Any:
            return (unowned(_arrays[0]),)

        return of_one
    if len(_arrays) == 2:

        def of_two(_arrays: Any) -> Any:
            return unowned(_arrays[0]), unowned(_arrays[1])

        return of_two

    def of_four(_arrays: Any) -> Any:
        return (
            unowned(_arrays[0]),
            unowned(_arrays[1]),
            unowned(_arrays[2]),
            unowned(_arrays[3]),
        )

    return of_four


@inlined
def _update_codes(planes: Any, scalars: Scalars, maps: Maps, room: Any, place: Any) -> None:
    """Applies a step to a block. `place` is its first element and the number of its elements."""
    grad, weights, (first_codes, first_largest, second_codes, second_largest) = planes
    first_values, first_entries, second_values, second_entries = maps
    start, count = place
    end, block = start + count, start // BLOCK
    exp_avg, exp_avg_sq, entries = room[0][:count], room[1][:count], room[2][:count]
    begin = block * BLOCK_BYTES + MAXIMUM_BYTES
    first, second = first_codes[begin : begin + count], second_codes[begin : begin + count]
    _decode(first, first_largest[block * _WORDS], first_values, exp_avg)
    _decode(second, second_largest[block * _WORDS], second_values, exp_avg_sq)
    _update(grad[start:end], _part(weights, start, end), (exp_avg, exp_avg_sq), scalars)
    first_largest[block * _WORDS] = _encode(exp_avg, first_entries, True, first, entries)
    second_largest[block * _WORDS] = _encode(exp_avg_sq, second_entries, False, second, entries)


def _adamw_codes(
    counter: np.ndarray, chunk: int, planes: Any, scalars: Scalars, maps: Maps
) -> None:
    grad, weights, moments = planes
    planes = unowned(grad), _all_unowned(weights), _all_unowned(moments)
    maps = _all_unowned(maps)
    owned = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint32)
    room = unowned(owned[0]), unowned(owned[1]), unowned(owned[2])
    start, _, stop = taken(counter, chunk, 0, grad.size)
    while start < grad.size:
        for a in range(start, stop, BLOCK):
            # The compiler writes the loops for whole blocks apart: it knows their length.
            if a + BLOCK <= stop:
                _update_codes(planes, scalars, maps, room, (a, BLOCK))
            else:
                _update_codes(planes, scalars, maps, room, (a, stop - a))
        start, _, stop = taken(counter, chunk, 0, grad.size)
    # What `room` refers to is freed after its last use.
    owned[0][0], owned[1][0], owned[2][0] = 0, 0, 0


def _adamw_halves(
    counter: np.ndarray, chunk: int, planes: Any, scalars: Scalars, keyed: Keyed
) -> None:
    grad, weights, moments = planes
    grad, weights, moments = unowned(grad), _all_unowned(weights), _all_unowned(moments)
    key, position = keyed
    owned = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    scratch = _all_unowned(owned)
    start, _, stop = taken(counter, chunk, 0, grad.size)
    while start < grad.size:
        for a in range(start, stop, BLOCK):
            b = min(a + BLOCK, stop)
            both, halves = _part(scratch, 0, b - a), _part(moments, a, b)
            _widen_all(halves[0], both[0])
            _widen_all(halves[1], both[1])
            _update(grad[a:b], _part(weights, a, b), both, scalars)
            _round_both(both[0], both[1], halves, (key, position + a))
        start, _, stop = taken(counter, chunk, 0, grad.size)
    # What `scratch` refers to is freed after its last use.
    owned[0][0], owned[1][0] = 0, 0


def _encode_all(
    values: np.ndarray, table: np.ndarray, words: np.ndarray, plane: np.ndarray
) -> None:
    room = np.empty(BLOCK, np.uint32)
    for block in range(-(-values.size // BLOCK)):
        a = block * BLOCK
        b = min(a + BLOCK, values.size)
        begin = block * BLOCK_BYTES + MAXIMUM_BYTES
        codes, is_signed = plane[begin : begin + b - a], table.size == _SIGNED_SIZE
        words[block * _WORDS] = _encode(values[a:b], table, is_signed, codes, room[: b - a])


def _decode_all(plane: np.ndarray, words: np.ndarray, map_: np.ndarray, values: Any) -> None:
    for block in range(-(-values.size // BLOCK)):
        a = block * BLOCK
        b = min(a + BLOCK, values.size)
        begin = block * BLOCK_BYTES + MAXIMUM_BYTES
        _decode(plane[begin : begin + b - a], words[block * _WORDS], map_, values[a:b])


_CODES = types.Tuple((BYTES, FLOAT, BYTES, FLOAT))
_HALVES = types.UniTuple(HALF, 2)
_WEIGHTS, _WEIGHT = types.Tuple((HALF, REST)), types.UniTuple(FLOAT, 1)
_CODES_SPLIT = types.Tuple((HALF, _WEIGHTS, _CODES))
_CODES_FLOAT = types.Tuple((FLOAT, _WEIGHT, _CODES))
_HALVES_SPLIT = types.Tuple((HALF, _WEIGHTS, _HALVES))
_HALVES_FLOAT = types.Tuple((FLOAT, _WEIGHT, _HALVES))
_SIGNATURES: dict[str, tuple[Callable, Any]] = {
    "codes_split": (_adamw_codes, types.void(*CHUNKS, _CODES_SPLIT, SCALARS, _MAPS)),
    "codes_float": (_adamw_codes, types.void(*CHUNKS, _CODES_FLOAT, SCALARS, _MAPS)),
    "halves_split": (_adamw_halves, types.void(*CHUNKS, _HALVES_SPLIT, SCALARS, _KEYED)),
    "halves_float": (_adamw_halves, types.void(*CHUNKS, _HALVES_FLOAT, SCALARS, _KEYED)),
    "encode": (_encode_all, types.void(FLOAT, TABLE, FLOAT, BYTES)),
    "decode": (_decode_all, types.void(BYTES, FLOAT, FLOAT, FLOAT)),
}


@functools.cache
def moment_kernel(name: str) -> Callable[..., None]:
    """Returns a compiled kernel. Its arrays are flat and contiguous.

    - `codes_split(counter, chunk, planes, scalars, maps)`, `codes_float(...)`, `halves_split(...,
      keyed)` and `halves_float(..., keyed)` are for `Workers.share`. `planes` are the gradient, the
      planes of weights, and the moments: for codes, the bytes of both planes, each followed by the
      same memory as float32; for halves, both planes as uint16.
    - `encode(values, entries, words, plane)` writes a moment in 8 bits from fp32 `values`, and
      `decode(plane, words, map, values)` reads it. `words` is the memory of `plane` as float32.
    """
    return compiled(*_SIGNATURES[name])

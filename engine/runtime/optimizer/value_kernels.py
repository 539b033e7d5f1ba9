"""Single values of moments are read and rounded by the functions of this file. The kernels of
`engine.runtime.optimizer.moment_kernels` call them.

They are written as LLVM code, because numba widens 32-bit integers, which halves the vector width.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.runtime.optimizer.host_kernels import FLOAT, llvm
from engine.runtime.optimizer.moment_codes import CODE_SHIFT, INDEX_SHIFT, LARGEST, LEAST, ZERO

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
TABLE = types.uint32[::1]


@llvm
def decoded(_typing: Any, _code: Any, _values: Any) -> Any:
    """Returns the fp32 number of a code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[1])(context, builder, args[1])
        return builder.load(builder.gep(array.data, [builder.zext(args[0], _I64)]))

    return types.float32(types.uint8, FLOAT), generate


@llvm
def index_of(_typing: Any, _value: Any, _is_signed: Any) -> Any:
    """Returns the index of an fp32 value between -1 and 1 in the table of a map."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        magnitude = builder.and_(builder.bitcast(args[0], _I32), _I32(0x7FFFFFFF))
        is_small = builder.icmp_unsigned("<", magnitude, _I32(LEAST))
        magnitude = builder.select(is_small, _I32(LEAST), magnitude)
        is_large = builder.icmp_unsigned(">", magnitude, _I32(LARGEST))
        magnitude = builder.select(is_large, _I32(LARGEST), magnitude)
        shift = builder.select(args[1], _I32(INDEX_SHIFT[True]), _I32(INDEX_SHIFT[False]))
        return builder.sub(builder.lshr(magnitude, shift), builder.lshr(_I32(LEAST), shift))

    return types.uint32(types.float32, types.boolean), generate


@llvm
def entry_of(_typing: Any, _index: Any, _entries: Any) -> Any:
    """Returns an entry of the table of a map."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[1])(context, builder, args[1])
        return builder.load(builder.gep(array.data, [builder.zext(args[0], _I64)]))

    return types.uint32(types.uint32, TABLE), generate


@llvm
def code_of(_typing: Any, _entry: Any, _value: Any, _is_signed: Any, _least: Any) -> Any:
    """Returns the code of an fp32 value between -1 and 1 from its entry of the table, as
    `engine.runtime.optimizer.moment_codes` describes it.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        entry, value, is_signed, least = args
        bits = builder.bitcast(value, _I32)
        masks = [_I32((1 << INDEX_SHIFT[signed]) - 1) for signed in (True, False)]
        found = builder.add(entry, builder.and_(bits, builder.select(is_signed, *masks)))
        # The sign is -1 for negative values, else 0.
        sign = builder.select(is_signed, builder.ashr(bits, _I32(31)), _I32(0))
        steps = builder.lshr(builder.sub(found, sign), _I32(CODE_SHIFT))
        mirrored = builder.sub(builder.xor(steps, sign), sign)
        code = builder.add(mirrored, builder.select(is_signed, _I32(ZERO), _I32(0)))
        is_below = builder.icmp_signed("<", code, least)
        return builder.trunc(builder.select(is_below, least, code), _I8)

    return types.uint8(types.uint32, types.float32, types.boolean, types.int32), generate


@llvm
def larger(_typing: Any, _magnitude: Any, _value: Any) -> Any:
    """Returns the larger of a magnitude, as bits, and that of an fp32 value. The order of positive
    fp32 values is that of their bits, and such a maximum is vectorised.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        other = builder.and_(builder.bitcast(args[1], _I32), _I32(0x7FFFFFFF))
        return builder.select(builder.icmp_unsigned(">", other, args[0]), other, args[0])

    return types.uint32(types.uint32, types.float32), generate


@llvm
def from_bits(_typing: Any, _bits: Any) -> Any:
    """Returns the fp32 value with these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), generate


@llvm
def noise_of(_typing: Any, _position: Any, _key: Any) -> Any:
    """Returns 32 random bits for an element at a position (int64) of a unit."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = builder.add(builder.trunc(args[0], _I32), args[1])
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            word = builder.xor(word, builder.lshr(word, _I32(shift)))
            word = builder.mul(word, _I32(factor))
        return builder.xor(word, builder.lshr(word, _I32(16)))

    return types.uint32(types.int64, types.uint32), generate


@llvm
def rounded(_typing: Any, _value: Any, _bits: Any) -> Any:
    """Returns an fp32 value rounded to bf16 stochastically, with 16 random bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.add(builder.bitcast(args[0], _I32), builder.zext(args[1], _I32))
        return builder.trunc(builder.lshr(bits, _I32(16)), _I16)

    return types.uint16(types.float32, types.uint16), generate


@llvm
def halves_of(_typing: Any, _noise: Any) -> Any:
    """Returns the lower and the upper half of random bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lower = builder.trunc(args[0], _I16)
        upper = builder.trunc(builder.lshr(args[0], _I32(16)), _I16)
        return _context.make_tuple(builder, _signature.return_type, (lower, upper))

    return types.UniTuple(types.uint16, 2)(types.uint32), generate


@llvm
def unowned(_typing: Any, _array: Any) -> Any:
    """Returns an array without its counter of references. Slices of it cost nothing, while threads
    that slice the same array contend for its counter. The array itself must outlive the result.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        copy = context.make_array(signature.args[0])(context, builder, args[0])
        copy.meminfo = cgutils.get_null_value(copy.meminfo.type)
        return copy._getvalue()

    return _array(_array), generate

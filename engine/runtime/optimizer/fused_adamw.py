"""AdamW on a GPU is one kernel here, written in Triton: each plane is read and written once.

There is a kernel for each way to keep moments: in fp32, in bf16 and in 8 bits. Their results have
the bits of the host's kernels (`engine.runtime.optimizer.host_kernels`,
`engine.runtime.optimizer.moment_kernels`): products and sums are not contracted to fused
multiply-adds, roots and quotients are rounded as in IEEE 754, and moments are rounded with the same
codes and the same random bits. A kernel that torch compiles promises none of that.

Triton needs a C compiler when it first runs. Where that is missing, or Triton is, the tensor
operations of `engine.runtime.optimizer.device_adamw` and `engine.runtime.optimizer.device_moments`
run instead. They take longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.config.optimizers import BLOCK
from engine.errors import first_line

tl: Any = None
moments_of: Any = None
written: Any = None
encoded: Any = None
"""`triton.language` and the functions that kernels share, once `_import_triton` has set them. The
kernels look them up here.
"""
_ELEMENTS = 1024
"""A program of a kernel updates this many elements."""
_ROWS = _ELEMENTS // BLOCK
"""A program of the kernel for codes updates this many blocks of them."""


@dataclass(frozen=True)
class FusedChunk:
    """Chunk of a unit's planes on a GPU, with moments of one kind."""

    grad: torch.Tensor
    """Gradients, flat [elements]."""
    weights: Sequence[torch.Tensor]
    """weight_high and, with split weights, weight_low, flat."""
    moments: Sequence[torch.Tensor]
    """exp_avg and exp_avg_sq: fp32 and flat, or rows of bytes, uint8."""
    factors: tuple[torch.Tensor, torch.Tensor]
    """The clip factors, float32 [2], and the scalars, float32 [8]."""
    decayed: int
    """Number of first elements that weight decay applies to."""


class FusedAdamW:
    """Launches the kernels. Each is compiled when it first runs. Its methods return False where
    they cannot apply a step, and have changed nothing then.
    """

    what = "AdamW on the GPU"

    def __init__(self) -> None:
        self.problem = ""
        """Why the kernels cannot run; empty where they can."""

    def in_fp32(self, part: FusedChunk) -> bool:
        """Applies a step to weights whose moments are in fp32."""
        return self._launch("_of_floats", part, part.moments, {"BLOCK": _ELEMENTS})

    def in_bf16(self, part: FusedChunk, base: int) -> bool:
        """Applies a step to weights whose moments are in bf16. base: the position of the first
        element in its unit, with the key of its random bits added.
        """
        halves = [moment.view(torch.int16) for moment in part.moments]
        word = base & 0xFFFFFFFF
        # As a signed number it always has the same type.
        word -= (word >> 31) << 32
        return self._launch("_of_halves", part, halves, {"base": word, "BLOCK": _ELEMENTS})

    def in_codes(self, part: FusedChunk, tables: Sequence[torch.Tensor]) -> bool:
        """Applies a step to weights whose moments are in 8 bits. `tables` are those of
        `engine.runtime.optimizer.device_moments.moment_tables`.
        """
        planes = [view for moment in part.moments for view in (moment, moment.view(torch.float32))]
        return self._launch("_of_codes", part, [*planes, *tables], {"ROWS": _ROWS})

    def _launch(
        self,
        name: str,
        part: FusedChunk,
        others: Sequence[torch.Tensor],
        named: dict[str, int],
    ) -> bool:
        if self.problem or not part.grad.is_cuda:
            return False
        numel = part.grad.numel()
        if not numel:
            return True
        is_split = len(part.weights) == 2
        high, low = part.weights[0], part.weights[-1]  # one plane in fp32 is given twice
        planes = (high.view(torch.int16) if is_split else high, low, *others)
        try:
            kernel = _kernel(name)[(-(-numel // _ELEMENTS),)]
            kernel(
                part.grad,
                *planes,
                *part.factors,
                numel,
                part.decayed,
                **named,
                SPLIT=is_split,
                enable_fp_fusion=False,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  the compiler raises many kinds
            # Nothing was launched: the kernel is compiled first.
            self.problem = first_line(error)
            return False
        return True

    def try_again(self) -> None:
        """Tries to compile again, if that has failed."""
        self.problem = ""


@functools.cache
def _kernel(name: str) -> Any:
    """Returns a kernel of this module."""
    # Another number of decayed elements or other random bits need no kernel of their own.
    return _import_triton().jit(_KERNELS[name], do_not_specialize=["decayed", "base"])


@functools.cache
def _import_triton() -> Any:
    """Returns Triton, and makes its language known to the kernels."""
    global tl, moments_of, written, encoded  # noqa: PLW0603  Triton looks up names of a module
    import triton
    import triton.language

    tl = triton.language
    moments_of, written, encoded = map(triton.jit, (_moments_of, _written, _encoded))
    return triton


# ---------------------------------------------------------------- what kernels share


def _moments_of(g, m, v, scalars):  # type: ignore[no-untyped-def]  # Triton reads the types
    """Returns the new moments, and what is subtracted from the weights."""
    new_m = m + (g - m) * tl.load(scalars)
    # The host does the same, because subnormal moments are slow there.
    new_m = tl.where(tl.abs(new_m) < 1.1754943508222875e-38, 0.0, new_m)
    new_v = v * tl.load(scalars + 1) + tl.load(scalars + 2) * (g * g + tl.load(scalars + 6))
    below = tl.sqrt_rn(new_v) * tl.load(scalars + 4) + tl.load(scalars + 5)
    return new_m, new_v, tl.load(scalars + 3) * tl.div_rn(new_m, below)


def _written(  # type: ignore[no-untyped-def]  # Triton reads the types
    high,
    low,
    at,
    inside,
    taken,
    keep,
    apply,
    SPLIT: tl.constexpr,  # noqa: N803
):
    """Scales weights by `keep` and subtracts `taken`, where the flag `apply` says so."""
    if SPLIT:
        upper = tl.load(high + at, mask=inside, other=0).to(tl.int32) << 16
        old = upper + tl.load(low + at, mask=inside, other=0).to(tl.int32)
        bits = (old.to(tl.float32, bitcast=True) * keep - taken).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        sign = bits ^ magnitude
        # A finite value that bf16 would round to infinity becomes the largest that it does not, and
        # a NaN the quiet NaN of its sign.
        is_large = (magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000)
        bits = tl.where(is_large, sign | 0x7F7F7FFF, bits)
        bits = tl.where(magnitude > 0x7F800000, sign | 0x7FC00000, bits)
        bits = tl.where(apply, bits, old)
        tl.store(high + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(low + at, bits.to(tl.int16), mask=inside)
    else:
        w = tl.load(high + at, mask=inside, other=0.0)
        tl.store(high + at, tl.where(apply, w * keep - taken, w), mask=inside)


def _encoded(  # type: ignore[no-untyped-def]  # Triton reads the types
    moment,
    table,
    SIGNED: tl.constexpr,  # noqa: N803
    SHIFT: tl.constexpr,  # noqa: N803
):
    """Returns the codes and the largest magnitudes of a moment [blocks, elements of a block], as
    `engine.runtime.optimizer.moment_codes` describes them.
    """
    bits = moment.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    is_zero = largest == 0.0
    # A block of zeros is divided by 1.
    inverse = tl.where(is_zero, 1.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, largest)))
    bits = (moment * inverse[:, None]).to(tl.int32, bitcast=True)
    # The table is for magnitudes from 2**-24 to 1.
    magnitude = tl.minimum(tl.maximum(bits & 0x7FFFFFFF, 0x33800000), 0x3F800000) - 0x33800000
    found = tl.load(table + (magnitude >> SHIFT)) + (magnitude & ((1 << SHIFT) - 1))
    if SIGNED:
        away = (found + tl.where(bits < 0, 1, 0)) >> 18
        codes = tl.maximum(tl.where(bits < 0, 127 - away, 127 + away), 0)
    else:
        # A second moment never gets the code of 0, except in a block of zeros.
        codes = tl.where(is_zero[:, None], found >> 18, tl.maximum(found >> 18, 1))
    return codes.to(tl.uint8), largest


# ---------------------------------------------------------------- the kernels


def _of_floats(  # type: ignore[no-untyped-def]  # Triton reads the types
    grad,
    high,
    low,
    exp_avg,
    exp_avg_sq,
    clip,
    scalars,
    numel,
    decayed,
    BLOCK: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    apply = tl.load(clip + 1) > 0
    keep = tl.where(at < decayed, tl.load(scalars + 7), 1.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(clip)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    new_m, new_v, taken = moments_of(g, m, v, scalars)
    written(high, low, at, inside, taken, keep, apply, SPLIT)
    tl.store(exp_avg + at, tl.where(apply, new_m, m), mask=inside)
    tl.store(exp_avg_sq + at, tl.where(apply, new_v, v), mask=inside)


def _of_halves(  # type: ignore[no-untyped-def]  # Triton reads the types
    grad,
    high,
    low,
    exp_avg,
    exp_avg_sq,
    clip,
    scalars,
    numel,
    decayed,
    base,
    BLOCK: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    apply = tl.load(clip + 1) > 0
    keep = tl.where(at < decayed, tl.load(scalars + 7), 1.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(clip)
    first = tl.load(exp_avg + at, mask=inside, other=0)
    second = tl.load(exp_avg_sq + at, mask=inside, other=0)
    m = (first.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    v = (second.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    new_m, new_v, taken = moments_of(g, m, v, scalars)
    written(high, low, at, inside, taken, keep, apply, SPLIT)
    # The hash of `engine.runtime.optimizer.moment_kernels`.
    word = (at + base).to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    word = word ^ (word >> 16)
    new_m = (new_m.to(tl.uint32, bitcast=True) + (word & 0xFFFF)) >> 16
    new_v = (new_v.to(tl.uint32, bitcast=True) + (word >> 16)) >> 16
    tl.store(exp_avg + at, tl.where(apply, new_m.to(tl.int16), first), mask=inside)
    tl.store(exp_avg_sq + at, tl.where(apply, new_v.to(tl.int16), second), mask=inside)


def _of_codes(  # type: ignore[no-untyped-def]  # Triton reads the types
    grad,
    high,
    low,
    exp_avg,
    exp_avg_words,
    exp_avg_sq,
    exp_avg_sq_words,
    first_numbers,
    first_table,
    second_numbers,
    second_table,
    clip,
    scalars,
    numel,
    decayed,
    ROWS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
):
    # A block is 256 codes after their largest magnitude, which is a number of 4 bytes.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 256)
    at = row[:, None] * 256 + column[None, :]
    byte = row[:, None] * 260 + 4 + column[None, :]
    inside, is_row = at < numel, row * 256 < numel
    apply = tl.load(clip + 1) > 0
    keep = tl.where(at < decayed, tl.load(scalars + 7), 1.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(clip)
    first = tl.load(exp_avg + byte, mask=inside, other=0)
    second = tl.load(exp_avg_sq + byte, mask=inside, other=0)
    first_largest = tl.load(exp_avg_words + row * 65, mask=is_row, other=0.0)
    second_largest = tl.load(exp_avg_sq_words + row * 65, mask=is_row, other=0.0)
    m = tl.load(first_numbers + first.to(tl.int32)) * first_largest[:, None]
    v = tl.load(second_numbers + second.to(tl.int32)) * second_largest[:, None]
    new_m, new_v, taken = moments_of(g, m, v, scalars)
    written(high, low, at, inside, taken, keep, apply, SPLIT)
    # What follows the last element has no part in the largest magnitude.
    codes, largest = encoded(tl.where(inside, new_m, 0.0), first_table, True, 17)
    tl.store(exp_avg + byte, tl.where(apply, codes, first), mask=inside)
    tl.store(exp_avg_words + row * 65, tl.where(apply, largest, first_largest), mask=is_row)
    codes, largest = encoded(tl.where(inside, new_v, 0.0), second_table, False, 16)
    tl.store(exp_avg_sq + byte, tl.where(apply, codes, second), mask=inside)
    tl.store(exp_avg_sq_words + row * 65, tl.where(apply, largest, second_largest), mask=is_row)


_KERNELS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (_of_floats, _of_halves, _of_codes)
}

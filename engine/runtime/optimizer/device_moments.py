"""The device updates weights whose moments are kept in bf16 or in 8 bits. On a GPU, one kernel does
so that has the bits of the host's (`engine.runtime.optimizer.fused_adamw`).

Where Triton cannot compile it, the arithmetic of `engine.runtime.optimizer.moment_kernels` runs as
tensor operations. Given the same fp32 moments, their rounding has the bits of the host's: the same
table of codes, and the same random bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.config.optimizers import BLOCK, MOMENTS, StateFormat
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.planning.layout.optimizer_states import BLOCK_BYTES, MAXIMUM_BYTES, StateRange
from engine.planning.schedule.shards import cut
from engine.runtime.optimizer.device_adamw import (
    AT_ONCE,
    StepFactors,
    fused,
    new_moments,
    update,
    write_weights,
)
from engine.runtime.optimizer.fused_adamw import FusedChunk
from engine.runtime.optimizer.moment_codes import (
    CODE_SHIFT,
    INDEX_SHIFT,
    LARGEST,
    LEAST,
    ZERO,
    moment_map,
)

_MASK = 0xFFFFFFFF


def moment_tables(device: torch.device) -> list[torch.Tensor]:
    """Returns the numbers and the table of the map of exp_avg, then those of exp_avg_sq, on the
    device: float32 [256] and int32 [indices] each (`engine.runtime.optimizer.moment_codes`).
    """
    maps = (moment_map(signed=True), moment_map(signed=False))
    return [
        torch.from_numpy(array).to(device)
        for map_ in maps
        for array in (map_.values, map_.entries.view(np.int32))
    ]


@dataclass(frozen=True)
class RoundedPlanes:
    """A chunk of a unit's planes. Not all of its moments are in fp32."""

    ranges: Sequence[StateRange]
    """Ranges of the unit that are the whole chunk."""
    start: int
    """The chunk begins at this element of the unit."""
    grad: torch.Tensor
    """Gradients, flat [elements]."""
    weights: list[torch.Tensor]
    """weight_high and, with split weights, weight_low, flat."""
    moments: list[torch.Tensor]
    """Moments, each a row of bytes, uint8, that begins with the first of the ranges."""


@dataclass(frozen=True)
class RoundedStep:
    """A step is applied to rounded moments with these values."""

    factors: StepFactors
    tables: list[torch.Tensor]
    """`moment_tables` returned these."""
    key: int
    """`HostAdamW.key` returned it for the unit and the step."""


def update_rounded(
    chunk: RoundedPlanes, step: RoundedStep, decay_numel: int, compiled: bool
) -> None:
    """Applies a step to weights and moments in place. Where the flag in the clip factors is 0, no
    bit changes. Weight decay applies to the first `decay_numel` elements of the unit.
    """
    undecayed = None
    for range_ in chunk.ranges:
        if compiled and _ran_fused(chunk, range_, step, decay_numel):
            continue
        undecayed = undecayed or replace(step, factors=step.factors.undecayed())
        for start, stop, each in (
            (range_.start, decay_numel, step),
            (decay_numel, range_.stop, undecayed),
        ):
            part = range_.within(start, stop)
            if part is not None:
                _update_part(chunk, part, each)


def _ran_fused(
    chunk: RoundedPlanes, range_: StateRange, step: RoundedStep, decay_numel: int
) -> bool:
    """Updates a range of the chunk with one kernel. Returns False where there is none; nothing is
    changed then.
    """
    between = slice(range_.start - chunk.start, range_.stop - chunk.start)
    place = range_.place - chunk.ranges[0].place
    moments = [moment[place : place + range_.bytes] for moment in chunk.moments]
    if range_.kind == StateFormat.FP32:
        moments = [moment.view(torch.float32) for moment in moments]
    part = FusedChunk(
        chunk.grad[between],
        [plane[between] for plane in chunk.weights],
        moments,
        (step.factors.clip, step.factors.scalars),
        min(max(0, decay_numel - range_.start), range_.stop - range_.start),
    )
    match range_.kind:
        case StateFormat.FP32:
            return fused().in_fp32(part)
        case StateFormat.BF16:
            return fused().in_bf16(part, step.key + range_.start)
    return fused().in_codes(part, step.tables)


def _update_part(chunk: RoundedPlanes, part: StateRange, step: RoundedStep) -> None:
    """Updates a part of the chunk whose moments are kept in one way, by tensor operations."""
    between = slice(part.start - chunk.start, part.stop - chunk.start)
    grad, weights = chunk.grad[between], [plane[between] for plane in chunk.weights]
    place = part.place - chunk.ranges[0].place
    moments = [moment[place : place + part.bytes] for moment in chunk.moments]
    clip, scalars = step.factors.clip, step.factors.scalars
    if part.kind == StateFormat.FP32:
        floats = [moment.view(torch.float32) for moment in moments]
        names = (*WEIGHT_PLANES[: len(weights)], *MOMENTS)
        planes = dict(zip(names, (*weights, *floats)))
        update(planes, grad, step.factors, grad.numel(), compiled=False)
        return
    whole = grad.numel() // BLOCK * BLOCK
    chunks = [*cut(whole, AT_ONCE), (whole, grad.numel())]  # a shorter last block is by itself
    for start, stop in chunks:
        if start == stop:
            continue
        of_weights = [plane[start:stop] for plane in weights]
        if part.kind == StateFormat.CODES:
            blocks = [view for moment in moments for view in _blocks(moment, start, stop)]
            _update_codes(grad[start:stop], of_weights, blocks, step.tables, clip, scalars)
        else:
            halves = [moment.view(torch.bfloat16)[start:stop] for moment in moments]
            base = (step.key + part.start + start) & _MASK
            _update_halves(grad[start:stop], of_weights, halves, base, clip, scalars)


def _blocks(moment: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes, uint8 [blocks, elements of a block], and the largest magnitudes, float32
    [blocks], of the elements from `start` to `stop`, sharing the memory of `moment`.
    """
    first, count = start // BLOCK, -(-(stop - start) // BLOCK)
    size = min(BLOCK, stop - start)
    place = first * BLOCK_BYTES
    memory = moment[place : place + count * (size + MAXIMUM_BYTES)]
    codes = memory.view(count, size + MAXIMUM_BYTES)[:, MAXIMUM_BYTES:]
    words = memory.view(torch.float32).view(count, -1)[:, 0]
    return codes, words


# ---------------------------------------------------------------- 8 bits


def _update_codes(  # an update takes all planes
    grad: torch.Tensor,
    weights: list[torch.Tensor],
    moments: list[torch.Tensor],
    tables: list[torch.Tensor],
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """Updates weights with moments in 8 bits. `moments` are codes and largest magnitudes of
    exp_avg, then those of exp_avg_sq.
    """
    first_codes, first_largest, second_codes, second_largest = moments
    first_numbers, first_table, second_numbers, second_table = tables
    apply = clip[1] > 0
    exp_avg = _decoded(first_codes, first_largest, first_numbers)
    exp_avg_sq = _decoded(second_codes, second_largest, second_numbers)
    m, v, taken = new_moments(grad, exp_avg, exp_avg_sq, clip, scalars)
    write_weights(weights, taken, scalars[7], apply)
    codes, largest = _encoded(m.view(first_codes.shape), first_table, signed=True)
    first_codes.copy_(torch.where(apply, codes, first_codes))
    first_largest.copy_(torch.where(apply, largest, first_largest))
    codes, largest = _encoded(v.view(second_codes.shape), second_table, signed=False)
    # A second moment never gets the code of 0, except in a block of zeros.
    codes = torch.where(largest[:, None] > 0, codes.clamp(min=1), codes)
    second_codes.copy_(torch.where(apply, codes, second_codes))
    second_largest.copy_(torch.where(apply, largest, second_largest))


def _decoded(codes: torch.Tensor, largest: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Returns moments in fp32, flat."""
    return (numbers[codes.to(torch.int32)] * largest[:, None]).reshape(-1)


def _encoded(
    moment: torch.Tensor, table: torch.Tensor, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes, uint8, and the largest magnitudes of a moment [blocks, elements of a
    block]. The codes are found in a table, as on the host: a search takes several times as long.
    """
    largest = moment.abs().amax(1)
    inverse = torch.where(largest > 0, 1.0 / largest, 1.0)
    bits = (moment * inverse[:, None]).view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).clamp(LEAST, LARGEST) - LEAST
    shift = INDEX_SHIFT[signed]
    found = table[magnitude >> shift] + (magnitude & ((1 << shift) - 1))
    if not signed:
        return (found >> CODE_SHIFT).to(torch.uint8), largest
    # A negative value has the mirrored code, and on a boundary that of the larger magnitude.
    is_negative = bits < 0
    away = (found + is_negative.to(torch.int32)) >> CODE_SHIFT
    codes = torch.where(is_negative, ZERO - away, ZERO + away)
    return codes.clamp(min=0).to(torch.uint8), largest


# ---------------------------------------------------------------- bf16


def _update_halves(  # an update takes all planes
    grad: torch.Tensor,
    weights: list[torch.Tensor],
    moments: list[torch.Tensor],
    base: int,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """Updates weights with moments in bf16, rounded stochastically. The random bits are those of
    positions from `base` on.
    """
    apply = clip[1] > 0
    first, second = moments
    m, v, taken = new_moments(grad, first.float(), second.float(), clip, scalars)
    write_weights(weights, taken, scalars[7], apply)
    noise = _noise(torch.arange(grad.numel(), device=grad.device) + base)
    for moment, values, bits in ((first, m, noise & 0xFFFF), (second, v, noise >> 16)):
        rounded = (values.view(torch.int32) + bits.to(torch.int32)) >> 16
        halves = rounded.to(torch.int16).view(torch.bfloat16)
        moment.copy_(torch.where(apply, halves, moment))


def _noise(positions: torch.Tensor) -> torch.Tensor:
    """Returns 32 random bits for each position (with the key added), int64. Products of int64 wrap,
    which keeps their lower 32 bits.
    """
    word = positions & _MASK
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _MASK
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _MASK
    return word ^ (word >> 16)

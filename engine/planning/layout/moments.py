"""AdamW's two moments are kept in fp32, in bf16 or in 8 bits (`train.optimizer`). This file says
where the moments of each parameter are in their plane, and how many bytes they take.

In 8 bits, the moments of a parameter are cut into blocks of 256 elements, as in "8-bit Optimizers
via Block-wise Quantization" (arXiv 2110.02861). A block is kept as its largest magnitude, in fp32,
followed by one code of 8 bits for each element. It takes 260 bytes. Blocks never cross parameters,
nor multiples of 256 elements of their unit. So the first block of a parameter and its last one may
be shorter, and take 4 bytes more than their elements. The device can update a unit in chunks that
begin at such multiples: none of them cuts a block.

Small parameters and embeddings are kept more exactly, because they are where small moments hurt
first and where they save least:

- Parameters of fewer than 4,096 elements keep their moments in fp32.
- Other parameters of the unit `embed` keep theirs in bf16, where the rest is kept in 8 bits.

A plane of fp32 moments alone has one number for each element of the unit. Another plane of moments
is a row of bytes, in which ranges of elements of one kind follow each other without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.config.settings import Optimizer
from engine.planning.schedule.buffers import EMBED, Word

FP32_MOMENTS: Final = "adamw"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Planes that hold the moments."""
BLOCK = 256
"""Number of elements of a block of codes."""
MAXIMUM_BYTES = 4
"""Bytes of the largest magnitude of a block, with which the block begins."""
BLOCK_BYTES = BLOCK + MAXIMUM_BYTES
SMALL = 4096
"""Number of elements below which parameters keep their moments in fp32."""


class MomentKind(Word):
    """How the moments of a range of elements are kept."""

    FP32 = "fp32"
    BF16 = "bf16"
    CODES = "8 bits"


KINDS: dict[Optimizer, MomentKind] = {
    FP32_MOMENTS: MomentKind.FP32,
    "adamw_bf16": MomentKind.BF16,
    "adamw_8bit": MomentKind.CODES,
}
"""How each optimizer keeps all moments that are not kept more exactly. The optimizers are ordered
from the most exact one.
"""


def moment_bytes(kind: MomentKind, numel: int) -> int:
    """Returns the bytes that one moment of `numel` elements takes, from the start of a block on."""
    if kind == MomentKind.CODES:
        return numel + MAXIMUM_BYTES * -(-numel // BLOCK)
    return numel * (4 if kind == MomentKind.FP32 else 2)


@dataclass(frozen=True)
class MomentRange:
    """A range of a unit's elements whose moments are kept in one way."""

    start: int
    """First element in the unit's planes."""
    stop: int
    kind: MomentKind
    place: int
    """First byte in a plane of moments."""

    @property
    def bytes(self) -> int:
        """Bytes that each moment of the range takes."""
        return moment_bytes(self.kind, self.stop - self.start)

    def within(self, start: int, stop: int) -> MomentRange | None:
        """Returns the part of the range between two elements of the unit, or None if there is none.
        Raises ValueError where that would cut a block.
        """
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        offset = first - self.start
        if self.kind == MomentKind.CODES and (
            offset % BLOCK or (last < self.stop and (last - self.start) % BLOCK)
        ):
            raise ValueError(f"elements {start} to {stop} cut a block of {BLOCK} in two")
        return MomentRange(first, last, self.kind, self.place + moment_bytes(self.kind, offset))


@dataclass(frozen=True)
class MomentCounts:
    """How many elements of a unit are kept in which way. The bytes of the moments follow from it,
    for every optimizer.
    """

    numel: int
    """Number of elements of the unit, alignment included."""
    small: int
    """Number of them that belong to small parameters, alignment included."""
    blocks: int
    """Number of blocks into which the other elements are cut."""
    is_embed: bool

    @property
    def large(self) -> int:
        """Number of elements of large parameters, alignment included."""
        return self.numel - self.small

    def bytes(self, optimizer: Optimizer) -> int:
        """Returns the bytes that one moment of the unit takes."""
        kind = KINDS[optimizer]
        if kind == MomentKind.FP32:
            return 4 * self.numel
        if kind == MomentKind.BF16 or self.is_embed:
            return 4 * self.small + 2 * self.large
        return 4 * self.small + self.large + MAXIMUM_BYTES * self.blocks

    def most_bytes(self, optimizer: Optimizer, numel: int) -> int:
        """Returns the most bytes that one moment of a chunk takes: of at most `numel` elements, in
        whole blocks if the moments are in 8 bits.
        """
        if numel >= self.numel:
            return self.bytes(optimizer)
        kind = KINDS[optimizer]
        if kind == MomentKind.FP32:
            return 4 * numel
        small = min(self.small, numel)
        large = numel - small
        if kind == MomentKind.BF16 or self.is_embed:
            return 4 * small + 2 * large
        # Shorter blocks leave no more elements unfilled in the chunk than in the whole unit.
        unfilled = self.blocks * BLOCK - self.large
        return 4 * small + large + MAXIMUM_BYTES * ((large + unfilled) // BLOCK)


def moment_ranges(
    parameters: Sequence[tuple[int, int, int]], unit: str, optimizer: Optimizer
) -> tuple[MomentRange, ...]:
    """Returns the ranges of a unit's planes of moments, in order.

    parameters: for each parameter, its first element, the element after its last one (alignment
    included), and the number of its own elements, in the order of the planes.
    """
    found: list[MomentRange] = []
    place = 0
    for start, stop, numel in parameters:
        if start == stop:
            continue
        kind = _kind(numel, unit, optimizer)
        for first, after in _in_whole_blocks(start, stop, kind):
            last = found[-1] if found else None
            # Ranges that follow each other are joined, so that a kernel runs on as few as possible.
            if last is not None and last.kind == kind and _may_grow(last):
                found[-1] = MomentRange(last.start, after, kind, last.place)
            else:
                found.append(MomentRange(first, after, kind, place))
            place = found[-1].place + found[-1].bytes
    return tuple(found)


def block_count(start: int, stop: int) -> int:
    """Returns the number of blocks of a parameter that lies between two elements of its unit."""
    return -(-stop // BLOCK) - start // BLOCK


def is_small(numel: int) -> bool:
    """Returns whether a parameter of `numel` elements keeps its moments in fp32."""
    return numel < SMALL


def _kind(numel: int, unit: str, optimizer: Optimizer) -> MomentKind:
    kind = KINDS[optimizer]
    if kind == MomentKind.FP32 or is_small(numel):
        return MomentKind.FP32
    return MomentKind.BF16 if unit == EMBED else kind


def _in_whole_blocks(start: int, stop: int, kind: MomentKind) -> list[tuple[int, int]]:
    """Returns the ranges of a parameter: one, or two where its first block is shorter."""
    cut = -(-start // BLOCK) * BLOCK
    if kind != MomentKind.CODES or not start < cut < stop:
        return [(start, stop)]
    return [(start, cut), (cut, stop)]


def _may_grow(range_: MomentRange) -> bool:
    """Returns whether the next parameter can follow in the same range: all blocks of the range must
    be whole.
    """
    is_whole = range_.start % BLOCK == range_.stop % BLOCK == 0
    return range_.kind != MomentKind.CODES or is_whole

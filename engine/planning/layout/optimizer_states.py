"""The states of an optimizer, such as AdamW's two moments, are kept in fp32, in bf16 or in 8 bits
(`engine.config.optimizers`). This file says where those of each parameter are in their plane, and
how many bytes they take.

In 8 bits, the states of a parameter are cut into blocks of 256 elements, as in "8-bit Optimizers
via Block-wise Quantization" (arXiv 2110.02861). A block is kept as its largest magnitude, in fp32,
followed by one code of 8 bits for each element. It takes 260 bytes. Blocks never cross parameters,
nor multiples of 256 elements of their unit. So the first block of a parameter and its last one may
be shorter, and take 4 bytes more than their elements. The device can update a unit in chunks that
begin at such multiples: none of them cuts a block.

Small parameters and embeddings are kept more exactly, because they are where small states hurt
first and where they save least:

- Parameters of fewer than 4,096 elements keep their states in fp32.
- Other parameters of the unit `embed` keep theirs in bf16, where the rest is kept in 8 bits.

A plane of fp32 states alone has one number for each element of the unit. Another plane of states
is a row of bytes, in which ranges of elements of one kind follow each other without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.optimizers import BLOCK, OPTIMIZERS, Optimizer, StateFormat
from engine.planning.schedule.buffers import EMBED

MAXIMUM_BYTES = 4
"""Bytes of the largest magnitude of a block, with which the block begins."""
BLOCK_BYTES = BLOCK + MAXIMUM_BYTES
SMALL = 4096
"""Number of elements below which parameters keep their states in fp32."""


def format_bytes(kind: StateFormat, numel: int) -> int:
    """Returns the bytes that a state of `numel` elements takes, from the start of a block on."""
    if kind == StateFormat.CODES:
        return numel + MAXIMUM_BYTES * -(-numel // BLOCK)
    return numel * (4 if kind == StateFormat.FP32 else 2)


@dataclass(frozen=True)
class StateRange:
    """A range of a unit's elements of which a state is kept in one way."""

    start: int
    """First element in the unit's planes."""
    stop: int
    kind: StateFormat
    place: int
    """First byte in the plane of the state."""

    @property
    def bytes(self) -> int:
        """Bytes that the state of the range takes."""
        return format_bytes(self.kind, self.stop - self.start)

    def within(self, start: int, stop: int) -> StateRange | None:
        """Returns the part of the range between two elements of the unit, or None if there is none.
        Raises ValueError where that would cut a block.
        """
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        offset = first - self.start
        if self.kind == StateFormat.CODES and (
            offset % BLOCK or (last < self.stop and (last - self.start) % BLOCK)
        ):
            raise ValueError(f"elements {start} to {stop} cut a block of {BLOCK} in two")
        return StateRange(first, last, self.kind, self.place + format_bytes(self.kind, offset))


@dataclass(frozen=True)
class StateCounts:
    """How many elements of a unit are kept in which way. The bytes of the states follow from it,
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

    def bytes(self, optimizer: Optimizer) -> dict[str, int]:
        """Returns the bytes of each state of the unit, by its name."""
        return self.most_bytes(optimizer, self.numel)

    def most_bytes(self, optimizer: Optimizer, numel: int) -> dict[str, int]:
        """Returns the most bytes that each state of a chunk takes, by its name. The chunk has at
        most `numel` elements, in whole blocks if states are in 8 bits.
        """
        described = OPTIMIZERS[optimizer]
        return dict.fromkeys(described.planes, self._most_bytes(described.format, numel))

    def _most_bytes(self, kind: StateFormat, numel: int) -> int:
        """Returns the most bytes of a state that is kept in this way where it is large enough."""
        if kind == StateFormat.FP32:
            return 4 * min(numel, self.numel)
        is_chunk = numel < self.numel
        small = min(self.small, numel) if is_chunk else self.small
        large = numel - small if is_chunk else self.large
        if kind == StateFormat.BF16 or self.is_embed:
            return 4 * small + 2 * large
        blocks = self.blocks
        if is_chunk:
            # Shorter blocks leave no more elements unfilled in the chunk than in the whole unit.
            blocks = (large + self.blocks * BLOCK - self.large) // BLOCK
        return 4 * small + large + MAXIMUM_BYTES * blocks


def state_ranges(
    parameters: Sequence[tuple[int, int, int]], unit: str, optimizer: Optimizer
) -> dict[str, tuple[StateRange, ...]]:
    """Returns the ranges of each of a unit's planes of states, in order, by the plane's name.

    parameters: for each parameter, its first element, the element after its last one (alignment
    included), and the number of its own elements, in the order of the planes.
    """
    described = OPTIMIZERS[optimizer]
    found: list[StateRange] = []
    place = 0
    for start, stop, numel in parameters:
        if start == stop:
            continue
        kind = _kind(numel, unit, described.format)
        for first, after in _in_whole_blocks(start, stop, kind):
            last = found[-1] if found else None
            # Ranges that follow each other are joined, so that a kernel runs on as few as possible.
            if last is not None and last.kind == kind and _may_grow(last):
                found[-1] = StateRange(last.start, after, kind, last.place)
            else:
                found.append(StateRange(first, after, kind, place))
            place = found[-1].place + found[-1].bytes
    return dict.fromkeys(described.planes, tuple(found))


def block_count(start: int, stop: int) -> int:
    """Returns the number of blocks of a parameter that lies between two elements of its unit."""
    return -(-stop // BLOCK) - start // BLOCK


def is_small(numel: int) -> bool:
    """Returns whether a parameter of `numel` elements keeps its states in fp32."""
    return numel < SMALL


def _kind(numel: int, unit: str, kind: StateFormat) -> StateFormat:
    """Returns how a parameter is kept where those that are large enough are kept as `kind` says."""
    if kind == StateFormat.FP32 or is_small(numel):
        return StateFormat.FP32
    return StateFormat.BF16 if unit == EMBED else kind


def _in_whole_blocks(start: int, stop: int, kind: StateFormat) -> list[tuple[int, int]]:
    """Returns the ranges of a parameter: one, or two where its first block is shorter."""
    cut = -(-start // BLOCK) * BLOCK
    if kind != StateFormat.CODES or not start < cut < stop:
        return [(start, stop)]
    return [(start, cut), (cut, stop)]


def _may_grow(range_: StateRange) -> bool:
    """Returns whether the next parameter can follow in the same range: all blocks of the range must
    be whole.
    """
    is_whole = range_.start % BLOCK == range_.stop % BLOCK == 0
    return range_.kind != StateFormat.CODES or is_whole

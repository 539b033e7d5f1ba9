"""The states of an optimizer, such as AdamW's two moments, are kept in fp32, in bf16 or in 8 bits
(`engine.config.optimizers`). This file says where those of each parameter are in their plane, and
how many bytes they take.

In 8 bits, the states of a parameter are cut into blocks of 256 elements, as in "8-bit Optimizers
via Block-wise Quantization" (arXiv 2110.02861). A block is kept as its largest magnitude, in fp32,
followed by one code of 8 bits for each element. It takes 260 bytes. Blocks never cross parameters,
nor multiples of 256 elements of their unit. So the first block of a parameter and its last one may
be shorter, and take 4 bytes more than their elements. The device can update a unit in chunks that
begin at such multiples: none of them cuts a block.

A plane of fp32 states alone has one number for each element of the unit. Another plane of states
is a row of bytes, in which ranges of elements of one kind follow each other without gaps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.config.optimizers import (
    BLOCK,
    OPTIMIZERS,
    SMALL,
    Optimizer,
    OptimizerState,
    StateFormat,
    UnitKind,
    is_matrix_of_block,
    orthogonalization_flops,
)
from engine.planning.layout.alignment import aligned

MAXIMUM_BYTES = 4
"""Bytes of the largest magnitude of a block, with which the block begins."""
BLOCK_BYTES = BLOCK + MAXIMUM_BYTES


def format_bytes(kind: StateFormat, numel: int) -> int:
    """Returns the bytes that a state of `numel` elements takes, from the start of a block on."""
    blocks = -(-numel // BLOCK) if kind == StateFormat.CODES else 0
    return numel * kind.item_bytes + MAXIMUM_BYTES * blocks


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


class ParameterRun(NamedTuple):
    """Parameters of one shape that follow each other in the planes of a unit."""

    shape: tuple[int, ...]
    number: int


class _Place(NamedTuple):
    """Where a parameter is in the planes of its unit."""

    start: int
    stop: int
    """Element after its last one, alignment included."""
    shape: tuple[int, ...]


class _Elements(NamedTuple):
    """Elements of a unit of which a state is kept in one way."""

    number: int
    blocks: int
    """Number of blocks into which their parameters are cut."""

    def most_bytes(self, format_: StateFormat, number: int) -> int:
        """Returns the most bytes of the state of so `number` of them."""
        if format_ != StateFormat.CODES:
            return format_bytes(format_, number)
        blocks = self.blocks
        if number < self.number:
            # Shorter blocks leave no more elements unfilled in the chunk than in the whole unit.
            blocks = (number + self.blocks * BLOCK - self.number) // BLOCK
        return number + MAXIMUM_BYTES * blocks


@dataclass(frozen=True)
class StateCounts:
    """What decides how many bytes the states of a unit take, for every optimizer."""

    unit: str
    numel: int
    """Number of elements of the unit, alignment included."""
    parameters: tuple[ParameterRun, ...]
    """Parameters in the order of the planes."""

    def bytes(self, optimizer: Optimizer) -> dict[str, int]:
        """Returns the bytes of each state of the unit, by its name."""
        return self.most_bytes(optimizer, self.numel)

    def most_bytes(self, optimizer: Optimizer, numel: int) -> dict[str, int]:
        """Returns the most bytes that each state of a chunk takes, by its name. The chunk has at
        most `numel` elements, in whole blocks if states are in 8 bits.
        """
        found = {}
        for state in OPTIMIZERS[optimizer].states:
            left, size = min(numel, self.numel), 0
            for format_, elements in self._by_format(state).items():
                number = min(left, elements.number)
                size += elements.most_bytes(format_, number)
                left -= number
            found[state.name] = size
        return found

    @functools.cached_property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices that some optimizers orthogonalize; a shape for each of them."""
        kind = unit_kind(self.unit)
        runs = (run for run in self.parameters if is_matrix_of_block(run.shape, kind))
        return tuple((run.shape[0], run.shape[1]) for run in runs for _ in range(run.number))

    def orthogonalization_flops(self, optimizer: Optimizer) -> float:
        """Returns the FLOPs of an update of the unit in products of matrices."""
        if not OPTIMIZERS[optimizer].orthogonalizes:
            return 0.0
        return sum(map(orthogonalization_flops, self.matrices))

    def _by_format(self, state: OptimizerState) -> dict[StateFormat, _Elements]:
        """Returns the elements of each format, those that take most bytes first."""
        if state not in self._counted:
            found = dict.fromkeys(StateFormat, _Elements(0, 0))
            counted = 0
            for start, stop, shape in _places(self.parameters):
                format_ = state.format_of(shape, unit_kind(self.unit))
                number, blocks = found[format_]
                found[format_] = _Elements(number + stop - start, blocks + block_count(start, stop))
                counted = stop
            # Units may be padded, and those of an estimate are not known parameter by parameter.
            format_ = state.format_of((SMALL,), unit_kind(self.unit))
            number, blocks = found[format_]
            found[format_] = _Elements(number + self.numel - counted, blocks)
            self._counted[state] = found
        return self._counted[state]

    @functools.cached_property
    def _counted(self) -> dict[OptimizerState, dict[StateFormat, _Elements]]:
        return {}


def state_ranges(
    parameters: Sequence[ParameterRun], unit: str, optimizer: Optimizer
) -> dict[str, tuple[StateRange, ...]]:
    """Returns the ranges of each of a unit's planes of states, in order, by the plane's name.
    parameters: those of the unit, in the order of the planes.
    """
    return {
        state.name: tuple(_ranges(parameters, unit, state))
        for state in OPTIMIZERS[optimizer].states
    }


def _ranges(
    parameters: Sequence[ParameterRun], unit: str, state: OptimizerState
) -> list[StateRange]:
    found: list[StateRange] = []
    place = 0
    for start, stop, shape in _places(parameters):
        kind = state.format_of(shape, unit_kind(unit))
        for first, after in _in_whole_blocks(start, stop, kind):
            last = found[-1] if found else None
            # Ranges that follow each other are joined, so that a kernel runs on as few as possible.
            if last is not None and last.kind == kind and _may_grow(last):
                found[-1] = StateRange(last.start, after, kind, last.place)
            else:
                found.append(StateRange(first, after, kind, place))
            place = found[-1].place + found[-1].bytes
    return found


def _places(parameters: Sequence[ParameterRun]) -> Iterator[_Place]:
    """Yields the place of each parameter that has elements."""
    start = 0
    for shape, count in parameters:
        size = aligned(math.prod(shape))
        for _ in range(count if size else 0):
            yield _Place(start, start + size, shape)
            start += size


def block_count(start: int, stop: int) -> int:
    """Returns the number of blocks of a parameter that lies between two elements of its unit."""
    return -(-stop // BLOCK) - start // BLOCK


def unit_kind(unit: str) -> UnitKind:
    """Returns the kind of a unit of this name."""
    match unit:
        case "embed" | "head":
            return unit
    return "block"


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

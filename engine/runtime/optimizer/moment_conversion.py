"""Moments of one optimizer are read as fp32, and written as another optimizer keeps them.

A moment is rounded once: to the nearest value in bf16, with ties to even, or to the nearest number
of its map in 8 bits. Reading is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.config.optimizers import BLOCK, MOMENTS, Optimizer, StateFormat
from engine.planning.layout.layout import UnitLayout
from engine.planning.layout.optimizer_states import StateRange
from engine.runtime.optimizer.moment_codes import moment_map
from engine.runtime.optimizer.moment_kernels import moment_kernel

Bytes = Callable[[int, int], np.ndarray]
"""Returns the bytes between two places of a plane of moments, uint8."""
Old = tuple[Bytes, Optimizer]
"""The plane that is read is told by its bytes, with the optimizer that it belongs to."""
New = tuple[np.ndarray, Optimizer]
"""Plane that is written, uint8 [bytes], with the optimizer that it belongs to."""
_AT_ONCE = 4096 * BLOCK
"""Number of elements that are converted at once, so that little memory is needed."""


def read_moments(plane: np.ndarray, part: StateRange, name: str) -> np.ndarray:
    """Returns the moments of a range, float32 [elements]. `plane` is the whole plane as uint8
    [bytes], and `name` says which of the two moments it holds.
    """
    return _decoded(plane[part.place : part.place + part.bytes], part, name)


def _decoded(memory: np.ndarray, part: StateRange, name: str) -> np.ndarray:
    """Returns the moments of a range, float32 [elements], from its bytes."""
    if part.kind == StateFormat.FP32:
        return memory.view(np.float32).copy()
    if part.kind == StateFormat.BF16:
        return torch.from_numpy(memory).view(torch.bfloat16).float().numpy()
    _refuse_none(part, name)
    values = np.empty(part.stop - part.start, np.float32)
    numbers = moment_map(signed=name == MOMENTS[0]).values
    moment_kernel("decode")(memory, memory.view(np.float32), numbers, values)
    return values


def write_moments(plane: np.ndarray, part: StateRange, name: str, values: np.ndarray) -> None:
    """Writes fp32 `values` [elements] as the moments of a range. The other arguments are those of
    `read_moments`.
    """
    memory = plane[part.place : part.place + part.bytes]
    if part.kind == StateFormat.FP32:
        memory.view(np.float32)[:] = values
    elif part.kind == StateFormat.BF16:
        torch.from_numpy(memory).view(torch.bfloat16).copy_(torch.from_numpy(values))
    else:
        _refuse_none(part, name)
        entries = moment_map(signed=name == MOMENTS[0]).entries
        moment_kernel("encode")(values, entries, memory.view(np.float32), memory)


def _refuse_none(part: StateRange, name: str) -> None:
    """Raises ValueError for elements that have no such moment."""
    if part.kind == StateFormat.NONE:
        raise ValueError(f"elements {part.start} to {part.stop} have no {name}")


def convert_moments(layout: UnitLayout, name: str, old: Old, new: New) -> None:
    """Fills the plane `new` with the moments of the plane `old`, of which few bytes are read at
    once. `name` says which of the two moments they hold.
    """
    theirs = layout.state_ranges(old[1])[name]
    ours = layout.state_ranges(new[1])[name]
    for mine in ours:
        for start in range(mine.start, mine.stop, _AT_ONCE):
            part = mine.within(start, min(start + _AT_ONCE, mine.stop))
            assert part is not None  # it is not empty
            write_moments(new[0], part, name, _values(old[0], theirs, part, name))


def _values(
    read: Bytes, ranges: tuple[StateRange, ...], wanted: StateRange, name: str
) -> np.ndarray:
    """Returns the moments of the elements of `wanted`, float32, from a plane with other ranges."""
    found = np.empty(wanted.stop - wanted.start, np.float32)
    for range_ in ranges:
        # A block is read as a whole, and what lies outside of `wanted` is left out.
        first, last = max(range_.start, wanted.start), min(range_.stop, wanted.stop)
        if first >= last:
            continue
        start = range_.start + (first - range_.start) // BLOCK * BLOCK
        stop = min(range_.start - (range_.start - last) // BLOCK * BLOCK, range_.stop)
        part = range_.within(start, stop)
        assert part is not None  # it contains the elements from `first` to `last`
        values = _decoded(read(part.place, part.place + part.bytes), part, name)
        found[first - wanted.start : last - wanted.start] = values[first - start : last - start]
    return found

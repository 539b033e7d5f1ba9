"""Moments in 8 bits are codes of a map: 256 numbers between -1 and 1, or between 0 and 1.

The maps are those of dynamic quantisation (arXiv 2110.02861, section 1.3), as in the library
bitsandbytes: seven decades up to 1, of which each has twice as many numbers as the one below, then
0 and 1. The numbers of a decade are the centres of equal intervals. The map of exp_avg has both
signs (but not -1), that of exp_avg_sq has none and so twice as many numbers.

Each number is rounded to fp32 once, so it is the same on every machine that reads a checkpoint.
bitsandbytes computes in fp32 with torch, whose last bits depend on the processor: its numbers
differ from ours by at most two units in the last place.

The code of a value x is that of the nearest number. Of two numbers that are equally near, it is the
smaller one. The boundaries between numbers are their means, rounded to fp32. One rule is our own: a
second moment never gets the code of 0, except in a block of zeros. Otherwise, a parameter whose
first moment is not 0 could be divided by eps alone, which would throw it far off.

A search in the map is slow, so kernels find codes in a table. The upper 16 bits of an fp32 value
are its index in the table: the values that share them lie so close together that at most one
boundary is between them. An entry holds the code of the smallest magnitude among them, and the
lower 16 bits that a value must exceed to have the next code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

DECADES = 7
LEAST_INDEX = 0x3380
"""These are the upper 16 bits of 2**-24. Smaller magnitudes lie below the first boundary."""
LARGEST_INDEX = 0x3F80
"""These are the upper 16 bits of 1."""
INDICES = LARGEST_INDEX - LEAST_INDEX + 1
"""The table has this many entries for each sign."""
NO_BOUNDARY = 0xFFFF
"""No lower 16 bits exceed this."""


@dataclass(frozen=True)
class MomentMap:
    """A `MomentMap` translates between values and codes."""

    values: np.ndarray
    """The numbers of the codes are float32 [256], in ascending order."""
    boundaries: np.ndarray
    """A value above entry k has a code above k, float32 [255]."""
    entries: np.ndarray
    """The table of kernels is uint32 [INDICES], or twice as many with negative values. The upper 16
    bits of an entry are a code, the lower ones the boundary.
    """

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns the codes of fp32 `values` between -1 and 1 by search, uint8 of their shape."""
        return np.searchsorted(self.boundaries, values, side="left").astype(np.uint8)


@functools.cache
def moment_map(signed: bool) -> MomentMap:
    """Returns the map of exp_avg, which is signed, or that of exp_avg_sq."""
    found: list[float] = []
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        # In the highest decade, the centres are 0.1 + 0.9 * (2k + 1) / (2 * count). A quotient of
        # integers is rounded once.
        scale = 20 * count * 10 ** (DECADES - 1 - decade)
        centres = [(2 * count + 9 * (2 * k + 1)) / scale for k in range(count)]
        found += centres
        if signed:
            found += [-centre for centre in centres]
    values = np.array(sorted([*found, 0.0, 1.0]), dtype=np.float32)
    boundaries = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    return MomentMap(values, boundaries, _entries(boundaries, signed))


def _entries(boundaries: np.ndarray, signed: bool) -> np.ndarray:
    """Returns the table of kernels for these boundaries."""
    upper = np.arange(LEAST_INDEX, LARGEST_INDEX + 1, dtype=np.uint32) << 16
    tables = []
    for sign in (1, -1) if signed else (1,):
        first = sign * upper.view(np.float32)
        last = sign * (upper | 0xFFFF).view(np.float32)
        codes = np.searchsorted(boundaries, first, side="left")
        after = np.searchsorted(boundaries, last, side="left")
        if np.any(np.abs(after - codes) > 1):
            raise ValueError("two boundaries of the map lie between neighbouring indices")
        crossed = boundaries[np.clip(np.minimum(codes, after), 0, boundaries.size - 1)]
        lower = np.abs(crossed).view(np.uint32) & 0xFFFF
        if sign < 0:
            # A value on the boundary has the lower code, which is that of the larger magnitude.
            lower -= 1
        lower = np.where(codes == after, NO_BOUNDARY, lower)
        tables.append(codes.astype(np.uint32) << 16 | lower.astype(np.uint32))
    return np.concatenate(tables)

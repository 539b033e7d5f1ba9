"""Moments in 8 bits are codes of a map: 256 numbers between -1 and 1, or between 0 and 1.

The maps are those of dynamic quantization (arXiv 2110.02861, section 1.3), as in the library
bitsandbytes: seven decades up to 1, of which each has twice as many numbers as the one below, then
0 and 1. The numbers of a decade are the centers of equal intervals. The map of exp_avg has both
signs (but not -1), that of exp_avg_sq has none and so twice as many numbers.

Each number is rounded to fp32 once, so it is the same on every machine that reads a checkpoint.
bitsandbytes computes in fp32 with torch, whose last bits depend on the processor: its numbers
differ from ours by at most two units in the last place.

The code of a value x is that of the nearest number. Of two numbers that are equally near, it is the
smaller one. The boundaries between numbers are their means, rounded to fp32. One rule is our own: a
second moment never gets the code of 0, except in a block of zeros. Otherwise, a parameter whose
first moment is not 0 could be divided by eps alone, which would throw it far off.

A search in the map is slow, so kernels find codes in a table. The upper bits of the magnitude of a
value are its index in the table: the magnitudes that share them lie so close together that at most
one boundary is between them. The sum of the entry and of the remaining bits of the magnitude has
the code in its upper bits: it carries into them when the value exceeds the boundary. The map of
exp_avg is symmetric, so its table is for positive values, and a negative value has the mirrored
code. On a boundary this is the code of the larger magnitude, so 1 is added to the sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

DECADES = 7
LEAST, LARGEST = 0x33800000, 0x3F800000
"""The table is for magnitudes from 2**-24 to 1, which have these bits. Smaller ones lie below the
first boundary.
"""
INDEX_SHIFT = {True: 17, False: 16}
"""An index is the bits of a magnitude, shifted right by this number of places. The key says whether
the map is signed: then its numbers are further apart.
"""
SIZE = {signed: (LARGEST >> shift) - (LEAST >> shift) + 1 for signed, shift in INDEX_SHIFT.items()}
"""Number of entries of the tables."""
CODE_SHIFT = 18
"""The code is above this many bits of an entry. The sum of the others and of the remaining bits of
a magnitude carries at most once.
"""
ZERO = 127
"""The code of 0 in the map of exp_avg. The table counts codes from it."""


@dataclass(frozen=True)
class MomentMap:
    """Translation between values and codes."""

    values: np.ndarray
    """Numbers of the codes, float32 [256], in ascending order."""
    boundaries: np.ndarray
    """A value above entry k has a code above k, float32 [255]."""
    entries: np.ndarray
    """Table of kernels, uint32 [SIZE[signed]]."""

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns the codes of fp32 `values` between -1 and 1 by search, uint8 of their shape."""
        return np.searchsorted(self.boundaries, values, side="left").astype(np.uint8)


@functools.cache
def moment_map(signed: bool) -> MomentMap:
    """Returns the map of exp_avg, which is signed, or that of exp_avg_sq."""
    found: list[float] = []
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        # In the highest decade, the centers are 0.1 + 0.9 * (2k + 1) / (2 * count). A quotient of
        # integers is rounded once.
        scale = 20 * count * 10 ** (DECADES - 1 - decade)
        centers = [(2 * count + 9 * (2 * k + 1)) / scale for k in range(count)]
        found += centers
        if signed:
            found += [-center for center in centers]
    values = np.array(sorted([*found, 0.0, 1.0]), dtype=np.float32)
    boundaries = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    return MomentMap(values, boundaries, _entries(boundaries, signed))


def _entries(boundaries: np.ndarray, signed: bool) -> np.ndarray:
    """Returns the table of kernels for these boundaries."""
    shift = INDEX_SHIFT[signed]
    first = np.arange(LEAST >> shift, (LARGEST >> shift) + 1, dtype=np.uint32) << shift
    last = first | ((1 << shift) - 1)
    codes, after = (
        np.searchsorted(boundaries, bits.view(np.float32), side="left") for bits in (first, last)
    )
    if np.any(after - codes > 1):
        raise ValueError("two boundaries of the map lie between neighboring indices")
    crossed = boundaries[np.minimum(codes, boundaries.size - 1)].view(np.uint32)
    to_next = (1 << CODE_SHIFT) - 1 - (crossed - first)
    to_next = np.where(codes == after, 0, to_next)
    return ((codes - (ZERO if signed else 0)) << CODE_SHIFT | to_next).astype(np.uint32)

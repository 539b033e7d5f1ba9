"""Each parameter starts at a multiple of `ALIGN_ELEMENTS` elements of its unit's planes."""

from __future__ import annotations

ALIGN_ELEMENTS = 64
"""Number of elements at whose multiples parameters start: 128 bytes in bf16, an alignment that is
fast for matrix kernels on GPUs.
"""


def aligned(numel: int) -> int:
    """Returns the elements that a parameter of `numel` elements takes, alignment included."""
    return (numel + ALIGN_ELEMENTS - 1) // ALIGN_ELEMENTS * ALIGN_ELEMENTS

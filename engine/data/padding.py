"""Rows for compiled kernels are padded to few different lengths."""

from __future__ import annotations

ROW_MULTIPLE = 128
"""Rows for compiled kernels are padded to a multiple of this many tokens. A kernel is compiled for
one length, so fewer lengths mean fewer kernels.
"""


def padded_length(length: int, at_most: int) -> int:
    """Returns the padded length of a row of `length` tokens for compiled kernels: `length` rounded
    up to a multiple of `ROW_MULTIPLE`, but at most `at_most`. No row is longer than `at_most`,
    unless that is 0, which means no padding.
    """
    multiples = -(-length // ROW_MULTIPLE)
    return max(length, min(multiples * ROW_MULTIPLE, at_most))

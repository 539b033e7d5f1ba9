"""Large planes are copied, updated and summed in pieces. No torch."""

from __future__ import annotations

from collections.abc import Iterable


def cut(numel: int, piece_numel: int) -> list[tuple[int, int]]:
    """Returns where each piece of a plane begins and ends, in elements. The last piece may be
    smaller than the others.
    """
    return cut_between(0, numel, piece_numel)


def cut_between(start: int, stop: int, piece_numel: int) -> list[tuple[int, int]]:
    """Returns the same for the part of a plane between two elements."""
    starts = range(start, stop, piece_numel)
    return [(begin, min(begin + piece_numel, stop)) for begin in starts]


def largest_updated(blocks: Iterable[int], outer: Iterable[int]) -> int:
    """Returns the elements of the largest block, by which pieces are measured. blocks, outer: the
    elements of each block's planes, and of those of embed and head, which count where no parameter
    of a block is trained.
    """
    return max(blocks, default=0) or max(outer, default=0)

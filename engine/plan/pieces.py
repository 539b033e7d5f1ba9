"""Large planes are copied, updated and summed in pieces. No torch."""

from __future__ import annotations


def cut(numel: int, piece_numel: int) -> list[tuple[int, int]]:
    """Returns where each piece of a plane begins and ends, in elements. The last piece may be
    smaller than the others.
    """
    return cut_between(0, numel, piece_numel)


def cut_between(start: int, stop: int, piece_numel: int) -> list[tuple[int, int]]:
    """Returns the same for the part of a plane between two elements."""
    starts = range(start, stop, piece_numel)
    return [(begin, min(begin + piece_numel, stop)) for begin in starts]

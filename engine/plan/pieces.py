"""Large planes are copied, updated and summed in pieces. No torch."""

from __future__ import annotations


def cut(numel: int, piece_numel: int) -> list[tuple[int, int]]:
    """Returns where each piece of a plane begins and ends, in elements. The last piece may be
    smaller than the others.
    """
    starts = range(0, numel, piece_numel)
    return [(start, min(start + piece_numel, numel)) for start in starts]

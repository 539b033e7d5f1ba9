"""With several ranks, each rank owns one shard of every unit: a contiguous range of its planes.
The ranks of a node have all shards, or those of all nodes together have. No torch.

- A rank keeps, sends and updates its own shard alone. The whole weights of a unit are gathered from
  the shards of all ranks into a slot, just before they are used.
- All shards of a unit have the same size, as collectives need it. It is a multiple of
  `SHARD_ELEMENTS`, whatever the number of ranks, so that no border cuts a block of 8-bit codes. The
  slot is as large as all shards together; the last of them may reach beyond the unit, and small
  units leave some ranks without elements.
- Frozen weights come after all others, in weight_high alone. They are divided in the same way, as a
  plane of their own: nobody updates them, and each rank fetches its part.

The method is that of ZeRO stage 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# ---------------------------------------------------------------------- chunks

# Large planes are copied, updated and accumulated in chunks. No torch.


def cut(numel: int, chunk_numel: int) -> list[tuple[int, int]]:
    """Returns where each chunk of a plane begins and ends, in elements. The last chunk may be
    smaller than the others.
    """
    return cut_between(0, numel, chunk_numel)


def cut_between(start: int, stop: int, chunk_numel: int) -> list[tuple[int, int]]:
    """Returns the same for the part of a plane between two elements."""
    starts = range(start, stop, chunk_numel)
    return [(begin, min(begin + chunk_numel, stop)) for begin in starts]


def largest_updated(blocks: Iterable[int], embed_and_head: Iterable[int]) -> int:
    """Returns the elements of the largest block, by which chunks are measured. blocks,
    embed_and_head: the elements of each block's planes, and of those of embed and head, which count
    where no parameter of a block is trained.
    """
    return max(blocks, default=0) or max(embed_and_head, default=0)


# ---------------------------------------------------------------------- shards


SHARD_ELEMENTS = 256
"""Number of which the elements of a shard are a multiple."""


class Shards(NamedTuple):
    """How planes are divided, and which rank this is."""

    ranks: int = 1
    rank: int = 0

    def numel(self, numel: int) -> int:
        """Returns the elements of one shard of a plane of `numel` elements."""
        if self.ranks == 1:
            return numel
        return -(-numel // (self.ranks * SHARD_ELEMENTS)) * SHARD_ELEMENTS

    def padded(self, numel: int) -> int:
        """Returns the elements of all shards together, those beyond the plane included."""
        return self.ranks * self.numel(numel)

    def received(self, numel: int) -> int:
        """Returns the elements that a rank gets from the others where all of them exchange a plane
        of `numel` elements, whole or as accumulators.
        """
        return self.padded(numel) - self.numel(numel)

    def bounds(self, numel: int) -> tuple[int, int]:
        """Returns where the shard of this rank begins and ends in a plane of `numel` elements.
        Elements beyond the plane are left out.
        """
        size = self.numel(numel)
        return min(numel, self.rank * size), min(numel, (self.rank + 1) * size)

    def frozen_bounds(self, numel: int, high_numel: int) -> tuple[int, int]:
        """Returns where the part of this rank begins and ends among the frozen weights of a unit,
        which are those from the element `numel` up to `high_numel`.
        """
        start, stop = self.bounds(high_numel - numel)
        return numel + start, numel + stop

    def slot_numel(self, numel: int, high_numel: int) -> int:
        """Returns the elements of a slot for a unit of `numel` elements, or `high_numel` with those
        that are frozen: they follow the others, and shards of either may reach beyond it.
        """
        return max(self.padded(numel), numel + self.padded(high_numel - numel))


WHOLE = Shards()
"""The only rank, which owns all planes whole."""

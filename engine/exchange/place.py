"""Every rank of a run has a `Place`. Ranks are counted host by host."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.shards import Shards


@dataclass(frozen=True)
class Place:
    """A `Place` says which of all ranks this is, and on which host."""

    rank: int
    """It has this number among all ranks."""
    ranks: int
    """Each host has this many."""
    hosts: int = 1

    @property
    def all_ranks(self) -> int:
        """Returns how many ranks all hosts have together."""
        return self.hosts * self.ranks

    @property
    def host(self) -> int:
        """Returns the number of its host. The process that leads is on host 0."""
        return self.rank // self.ranks

    @property
    def on_host(self) -> int:
        """Returns its number among the ranks of its host."""
        return self.rank % self.ranks

    @property
    def is_first_on_host(self) -> bool:
        return self.on_host == 0

    @property
    def share(self) -> Shards:
        """Returns how the rows of a step are divided among all ranks."""
        return Shards(self.all_ranks, self.rank)

    @property
    def as_one_host(self) -> Place:
        """Returns its place where the ranks of all hosts work as those of one do."""
        return Place(self.rank, self.all_ranks)

    def of(self, rank: int) -> Place:
        """Returns the place of another rank."""
        return Place(rank, self.ranks, self.hosts)


ALONE = Place(0, 1)
"""One rank computes everything."""

"""Every rank of a run has a `RankInfo`. Ranks are counted host by host."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.schedule.shards import Shards


@dataclass(frozen=True)
class RankInfo:
    """Which of all ranks this is, and on which node."""

    rank: int
    """It has this number among all ranks."""
    ranks: int
    """Each host has this many."""
    hosts: int = 1

    @property
    def world_size(self) -> int:
        """Returns how many ranks all hosts have together."""
        return self.hosts * self.ranks

    @property
    def host(self) -> int:
        """Returns the number of its host. The process that leads is on host 0."""
        return self.rank // self.ranks

    @property
    def local_rank(self) -> int:
        """Returns its number among the ranks of its host."""
        return self.rank % self.ranks

    @property
    def is_first_on_node(self) -> bool:
        return self.local_rank == 0

    @property
    def share(self) -> Shards:
        """Returns how the rows of a step are divided among all ranks."""
        return Shards(self.world_size, self.rank)

    @property
    def as_one_node(self) -> RankInfo:
        """Returns its place where the ranks of all hosts work as those of one do."""
        return RankInfo(self.rank, self.world_size)

    def of(self, rank: int) -> RankInfo:
        """Returns the place of another rank."""
        return RankInfo(rank, self.ranks, self.hosts)


ALONE = RankInfo(0, 1)
"""One rank computes everything."""

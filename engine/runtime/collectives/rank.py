"""The number of a rank among all ranks of a run, which are counted node by node."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.schedule.shards import Shards


@dataclass(frozen=True)
class RankInfo:
    """Which of all ranks this is, and on which node."""

    rank: int
    """Number among all ranks."""
    local_world_size: int
    """Number of ranks on each node."""
    nodes: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.local_world_size

    @property
    def node_rank(self) -> int:
        """Number of the rank's node. Rank 0 is on node 0."""
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        """Number among the ranks of the rank's node."""
        return self.rank % self.local_world_size

    @property
    def is_first_on_node(self) -> bool:
        return self.local_rank == 0

    @property
    def shards(self) -> Shards:
        """How the rows of a step are divided among all ranks."""
        return Shards(self.world_size, self.rank)

    @property
    def as_one_node(self) -> RankInfo:
        """The same rank where the ranks of all nodes work as those of one node."""
        return RankInfo(self.rank, self.world_size)

    def of(self, rank: int) -> RankInfo:
        """Returns the `RankInfo` of another rank."""
        return RankInfo(rank, self.local_world_size, self.nodes)


ALONE = RankInfo(0, 1)
"""The only rank of a run on one device."""

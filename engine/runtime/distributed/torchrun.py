"""`torchrun` starts the same command on every node, several times if asked to, and tells each
process in environment variables which of them it is. They are read here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from engine.errors import RankError, first_line
from engine.runtime.collectives.rank import RankInfo

FIND_SECONDS = 300
"""Seconds within which processes must find the store, and each other."""


@dataclass(frozen=True)
class Launched:
    """Which of the processes of `torchrun` this is."""

    place: RankInfo
    address: str
    """Rank 0 is on the node with this address."""
    port: int
    """A store listens there at this port."""
    has_store: bool
    """The store is torchrun's; else that of rank 0."""
    run: str
    """The run of torchrun has this name."""

    def store(self) -> distributed.TCPStore:
        """Returns the store that all processes reach. Raises RankError where it is not there."""
        is_master = self.place.rank == 0 and not self.has_store
        try:
            return distributed.TCPStore(
                self.address,
                self.port,
                is_master=is_master,
                timeout=timedelta(seconds=FIND_SECONDS),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise RankError(
                f"The store of torchrun at {self.address}, port {self.port}, cannot be reached "
                f"({first_line(error)}); check --rdzv-endpoint and the network between the nodes."
            ) from error


def read_launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Returns which of torchrun's processes this is. Raises RankError where nodes have unequal
    numbers of processes.
    """
    every, of_node, nodes = (
        int(environment[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    if every != of_node * nodes:
        raise RankError(
            f"torchrun has started {every} processes on {nodes} nodes, {of_node} of them here; "
            "give it the same --nproc-per-node on every node."
        )
    return Launched(
        RankInfo(int(environment["RANK"]), of_node, nodes),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment["TORCHELASTIC_RUN_ID"],
    )

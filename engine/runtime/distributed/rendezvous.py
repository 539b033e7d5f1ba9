"""The ranks of a run meet here: they make the process groups through which tensors pass."""

from __future__ import annotations

import fcntl
import os
import resource
from datetime import timedelta
from typing import TypeAlias

from msgspec import Struct
from torch import distributed

from engine.runtime.collectives.process_groups import ProcessGroupCollectives, reaching_others
from engine.runtime.collectives.rank import RankInfo

JOIN_SECONDS = 120
"""Seconds within which the processes must find each other."""
ON_ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one node use its loopback to meet, whatever networks it has."""
ANYWHERE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""When a rank is lost, torch would end rank 0's process too, which has to tell of it and to
save the run.
"""


class InMemory(Struct, frozen=True, tag=True):
    """Ranks of one node meet in a file in the memory of rank 0, which no folder
    lists and no other account can open: a store that listens would listen on all addresses, and
    ask nobody who he is.
    """

    process: int
    file: int
    """The file with this descriptor of the process."""
    ranks: int

    @classmethod
    def made(cls, ranks: int) -> InMemory:
        """Returns a rendezvous in a new file of this process."""
        made = os.memfd_create("ramstream-store")
        try:
            # No later file gets so high a number. A store writes once more when it is freed, which
            # an error that is still held may delay, and would do so to that file.
            high = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
            return cls(os.getpid(), fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, high), ranks)
        finally:
            os.close(made)

    def store(self) -> distributed.Store:
        """Returns the store, which stays for as long as the file is open."""
        return distributed.FileStore(f"/proc/{self.process}/fd/{self.file}", self.ranks)

    def close(self) -> None:
        """Ends the rendezvous. The process that has made it calls this once."""
        os.close(self.file)


class OverNetwork(Struct, frozen=True, tag=True):
    """Ranks of several nodes meet at a store of torchrun, or of rank 0. Whoever
    reaches its port can read and write there, so it holds no secret.
    """

    port: int
    address: str
    name: str
    """Ranks that meet at a store which others use, or have used, do so under this name."""

    def store(self) -> distributed.Store:
        """Returns the store, as a process that is a guest there uses it."""
        store = distributed.TCPStore(
            self.address, self.port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS)
        )
        return self.within(store)

    def within(self, store: distributed.Store) -> distributed.Store:
        """Returns the part of `store` in which the ranks meet."""
        return distributed.PrefixStore(self.name, store)


Rendezvous: TypeAlias = InMemory | OverNetwork


def prepare_rendezvous(nodes: int) -> None:
    """Makes the environment say what PyTorch reads there before ranks meet."""
    values = ANYWHERE if nodes > 1 else ANYWHERE | ON_ONE_NODE
    for name, value in values.items():
        os.environ.setdefault(name, value)


def join(device: str, store: distributed.Store, place: RankInfo) -> ProcessGroupCollectives:
    """Joins the process group of a run, and returns its exchange. Every rank calls this. Raises
    ExchangeError where a rank does not come.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    with reaching_others():
        distributed.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        return ProcessGroupCollectives(place)

"""The ranks of a run meet here: they make the process groups through which tensors pass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from engine.exchange.exchange import GroupExchange, reaching_others
from engine.exchange.place import Place

JOIN_SECONDS = 120
"""The processes must find each other within so many seconds."""
LOOPBACK = "127.0.0.1"
ON_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one host use its loopback to meet, whatever networks it has."""
ANYWHERE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""When a rank is lost, torch would end the leader's process too, which has to tell of it and to
save the run.
"""


@dataclass(frozen=True)
class Meeting:
    """A `Meeting` says where ranks meet: at the store of a process that listens there."""

    port: int
    address: str = LOOPBACK
    name: str = ""
    """Ranks that meet at a store which others use, or have used, do so under this name."""

    def store(self) -> distributed.Store:
        """Returns the store, as a process that is a guest there uses it."""
        store = distributed.TCPStore(
            self.address, self.port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS)
        )
        return self.within(store)

    def within(self, store: distributed.Store) -> distributed.Store:
        """Returns the part of `store` in which the ranks meet."""
        return distributed.PrefixStore(self.name, store) if self.name else store


def prepare_to_meet(hosts: int) -> None:
    """Makes the environment say what PyTorch reads there before ranks meet."""
    values = ANYWHERE if hosts > 1 else ANYWHERE | ON_ONE_HOST
    for name, value in values.items():
        os.environ.setdefault(name, value)


def join(device: str, store: distributed.Store, place: Place) -> GroupExchange:
    """Joins the process group of a run, and returns its exchange. Every rank calls this. Raises
    ExchangeError where a rank does not come.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    with reaching_others():
        distributed.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.all_ranks,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        return GroupExchange(place)

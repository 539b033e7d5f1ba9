"""An `Exchange` carries tensors between the ranks of a run. Every rank calls the same methods in
the same order.

`GroupExchange` uses a process group of `torch.distributed`: NCCL between GPUs, gloo between
processes on CPUs. All calls of a plan come from one lane, so there is one communicator, and no two
collectives can wait for each other.

Sums do not depend on how the system connects the ranks, where that is cheap: gloo sends every shard
to its owner, who adds the shards in the order of ranks. NCCL adds them on the way, in an order that
its own choice of algorithm fixes for a number of ranks and a machine.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import distributed

from engine.errors import first_line

PATIENT_DAYS = 365
"""A collective may take so many days. Whether the other ranks still live is watched elsewhere
(`engine.ranks`), since a rank may wait for hours while a run is paused.
"""


class ExchangeError(RuntimeError):
    """Ranks cannot reach each other. Another rank may be the cause, one that has ended."""


class Exchange(Protocol):
    """An `Exchange` connects `ranks` processes, of which this one is number `rank`."""

    ranks: int
    rank: int

    def all_gather(self, whole: torch.Tensor) -> None:
        """Completes `whole` [ranks x n], in which this rank has filled its own n elements."""

    def reduce_scatter(self, sums: torch.Tensor) -> None:
        """Adds the float32 `sums` [ranks x n] of all ranks. This rank's own n elements get the
        result; what the others hold afterwards has no meaning.
        """

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the `values` of all ranks, in their shape and dtype, added in the
        order of ranks.
        """


@contextlib.contextmanager
def reaching_others() -> Iterator[None]:
    """Makes what a process group raises an ExchangeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExchangeError(first_line(error)) from error


class GroupExchange:
    """A `GroupExchange` is an exchange by a process group; None stands for that of all ranks."""

    def __init__(self, group: distributed.ProcessGroup | None = None):
        self._group = group
        self.ranks = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        self._adds_on_the_way = distributed.get_backend(group) != "gloo"
        # Later versions of torch have other names for these functions, and warn of the old ones.
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)

    def abort(self) -> None:
        """Ends collectives that wait for a rank that will not come. Any thread may call this."""
        if self._adds_on_the_way and self._group is not None:
            self._group.abort()

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the elements of this rank."""
        size = whole.numel() // self.ranks
        return whole[self.rank * size : (self.rank + 1) * size]

    def all_gather(self, whole: torch.Tensor) -> None:
        with reaching_others():
            distributed.all_gather_into_tensor(whole, self._own(whole), self._group)

    def reduce_scatter(self, sums: torch.Tensor) -> None:
        own = self._own(sums)
        if self._adds_on_the_way:
            with reaching_others():
                distributed.reduce_scatter_tensor(own, sums, group=self._group)
            return
        shards = torch.empty_like(sums)
        with reaching_others():
            distributed.all_to_all_single(shards, sums, group=self._group)
        first, *others = shards.view(self.ranks, -1)
        own.copy_(first)
        for shard in others:
            own.add_(shard)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        everyone = values.new_empty(self.ranks, values.numel())
        flat = everyone.view(-1)
        self._own(flat).copy_(values.reshape(-1))
        self.all_gather(flat)
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        return total.view(values.shape)

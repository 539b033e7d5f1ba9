"""Several ranks in the threads of one process: each has an engine and planes of its own, and they
exchange tensors in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from engine.runtime.collectives.rank import RankInfo

T = TypeVar("T")
PATIENCE = 60
"""Seconds after which a rank gives up waiting for the others."""


class Rendezvous:
    """The ranks meet here with what they have. Each of them gets what all of them have brought."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._brought: list[torch.Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)

    def collectives(self, rank: int, brought: torch.Tensor, take: Callable[[list], None]) -> None:
        self._brought[rank] = brought.clone()
        self._barrier.wait()
        take(self._brought)
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()


class ThreadExchange:
    """A `Collectives` between threads, which sums in the order of ranks, and then of nodes."""

    def __init__(self, rendezvous: Rendezvous, rank: int, nodes: int = 1):
        self._rendezvous = rendezvous
        self.place = RankInfo(rank, rendezvous.ranks // nodes, nodes)
        self.rank = rank
        """It is the number among all ranks."""

    def _of_node(self, brought: list[torch.Tensor]) -> list[torch.Tensor]:
        first = self.place.node_rank * self.place.local_world_size
        return brought[first : first + self.place.local_world_size]

    def all_gather(self, whole: torch.Tensor) -> None:
        parts = whole.view(self.place.local_world_size, -1)

        def take(brought: list[torch.Tensor]) -> None:
            for part, other in zip(parts, self._of_node(brought)):
                part.copy_(other)

        self._rendezvous.collectives(self.rank, parts[self.place.local_rank], take)

    def reduce_scatter(self, gradients: torch.Tensor) -> None:
        own = gradients.view(self.place.local_world_size, -1)[self.place.local_rank]

        def take(brought: list[torch.Tensor]) -> None:
            parts = [
                other.view(self.place.local_world_size, -1)[self.place.local_rank]
                for other in brought
            ]
            own.copy_(added(added(node) for node in self._by_node(parts)))

        self._rendezvous.collectives(self.rank, gradients, take)

    def add_gradients(self, gradients: torch.Tensor, room: torch.Tensor, own: torch.Tensor) -> None:
        assert gradients.dtype == torch.bfloat16 and room.shape == gradients.shape
        in_fp32 = gradients.float()
        self.reduce_scatter(in_fp32)
        room.fill_(float("nan"))
        own.copy_(in_fp32.view(self.place.local_world_size, -1)[self.place.local_rank])

    def _by_node(self, brought: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        size = self.place.local_world_size
        return [brought[first : first + size] for first in range(0, len(brought), size)]

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(values)
        self._rendezvous.collectives(
            self.rank, values, lambda brought: total.copy_(added(self._of_node(brought)))
        )
        return total

    def all_reduce_nodes(self, values: torch.Tensor) -> torch.Tensor:
        total, own = (
            torch.zeros_like(values),
            slice(self.place.local_rank, None, self.place.local_world_size),
        )
        self._rendezvous.collectives(
            self.rank, values, lambda brought: total.copy_(added(brought[own]))
        )
        return total

    def broadcast(self, chunk: torch.Tensor) -> None:
        self._rendezvous.collectives(self.rank, chunk, lambda brought: chunk.copy_(brought[0]))

    def abort(self) -> None:
        """Ends the waits of all ranks, those in their lanes too: this one has failed."""
        self._rendezvous.abort()


def added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of tensors of one shape, added in order."""
    first, *others = parts
    total = first.clone()
    for other in others:
        total += other
    return total


def on_ranks(ranks: int, work: Callable[[ThreadExchange], T], nodes: int = 1) -> list[T]:
    """Does `work` on every rank at once, and returns what each returned. Raises the first error.
    ranks: those of all nodes together.
    """
    rendezvous = Rendezvous(ranks)
    results: list = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadExchange(rendezvous, rank, nodes))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            rendezvous.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

"""Several ranks in the threads of one process: each has an engine and planes of its own, and they
exchange tensors in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
PATIENCE = 60
"""Seconds after which a rank gives up waiting for the others."""


class Meeting:
    """The ranks meet here with what they have. Each of them gets what all of them have brought."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._brought: list[torch.Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)

    def exchange(self, rank: int, brought: torch.Tensor, take: Callable[[list], None]) -> None:
        self._brought[rank] = brought.clone()
        self._barrier.wait()
        take(self._brought)
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()


class ThreadExchange:
    """An `Exchange` between threads, which sums in the order of ranks."""

    def __init__(self, meeting: Meeting, rank: int):
        self._meeting = meeting
        self.ranks, self.rank = meeting.ranks, rank

    def all_gather(self, whole: torch.Tensor) -> None:
        parts = whole.view(self.ranks, -1)

        def take(brought: list[torch.Tensor]) -> None:
            for part, other in zip(parts, brought):
                part.copy_(other)

        self._meeting.exchange(self.rank, parts[self.rank], take)

    def reduce_scatter(self, sums: torch.Tensor) -> None:
        own = sums.view(self.ranks, -1)[self.rank]

        def take(brought: list[torch.Tensor]) -> None:
            first, *others = [other.view(self.ranks, -1)[self.rank] for other in brought]
            own.copy_(first)
            for other in others:
                own.add_(other)

        self._meeting.exchange(self.rank, sums, take)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(values)

        def take(brought: list[torch.Tensor]) -> None:
            for other in brought:
                total.add_(other)

        self._meeting.exchange(self.rank, values, take)
        return total

    def abort(self) -> None:
        """Ends the waits of all ranks, those in their lanes too: this one has failed."""
        self._meeting.abort()


def on_ranks(ranks: int, work: Callable[[ThreadExchange], T]) -> list[T]:
    """Does `work` on every rank at once, and returns what each returned. Raises the first error."""
    meeting = Meeting(ranks)
    results: list = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadExchange(meeting, rank))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

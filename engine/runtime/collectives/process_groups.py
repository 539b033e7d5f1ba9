"""A `Collectives` carries tensors between the ranks of a run. Every rank calls the same methods in
the same order.

`ProcessGroupCollectives` uses process groups of `torch.distributed`: NCCL between GPUs, gloo
between processes on CPUs. All calls of a plan come from one lane, so no two collectives can wait
for each other.

With several nodes there are three groups: that of all ranks, that of the ranks of this node, and
that of the ranks with the same number on every node. Weights are gathered within a node. Sums are
added within a node first, and then between the nodes, which get the same bits. Where planes are
divided among nodes, the group of all ranks does what that of a node does elsewhere (`spanning`).

Sums do not depend on how the system connects the ranks, where that is cheap: gloo sends every shard
to its owner, who adds the shards in the order of ranks. NCCL adds them on the way, in an order that
its own choice of algorithm fixes for a number of ranks and a machine. Gradients in bf16 are half as
many bytes as sums in fp32: every rank sends each shard to its owner, which adds them in fp32.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from engine.errors import first_line
from engine.runtime.collectives.gloo_sockets import Streams
from engine.runtime.collectives.rank import RankInfo

PATIENT_DAYS = 365
"""Days that a collective may take. Whether the other ranks still live is watched elsewhere
(`engine.runtime.distributed`), since a rank may wait for hours while a run is paused.
"""
LOOK_SECONDS = 2.0
"""Seconds after which a collective of gloo that waits looks whether it was aborted: the end of a
connection may escape gloo, which would wait for as long as a collective may take.
"""
CHUNK_NUMEL = 1 << 22
"""Number of elements of the chunks in which gradients of several nodes are added, which bounds the
memory that it takes.
"""


class CollectiveError(RuntimeError):
    """Ranks cannot reach each other. Another rank may be the cause, one that has ended."""


class Collectives(Protocol):
    """Collective operations among all ranks, of which this one has `place`."""

    place: RankInfo

    def all_gather(self, whole: torch.Tensor) -> None:
        """Completes `whole` [ranks of a node x n], in which this rank has filled its own n
        elements.
        """

    def reduce_scatter(self, gradients: torch.Tensor) -> None:
        """Adds the float32 `gradients` [ranks of a node x n] of all ranks on all nodes. This rank's
        own n elements get the result; what the others hold afterwards has no meaning.
        """

    def add_gradients(self, gradients: torch.Tensor, room: torch.Tensor, own: torch.Tensor) -> None:
        """Adds the bfloat16 `gradients` [ranks of a node x n] of all ranks on all nodes. `own` [n],
        float32, gets this rank's elements of the sum. `room` is as large as `gradients`, and what
        it holds afterwards has no meaning. `own` may be in the memory of `gradients`.
        """

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the `values` of all ranks of this node, in their shape and dtype,
        added in the order of ranks.
        """

    def all_reduce_nodes(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the `values` of the nodes, in their shape and dtype, added in the
        order of nodes.
        """

    def broadcast(self, chunk: torch.Tensor) -> None:
        """Makes `chunk` [n] on every rank what it is on rank 0."""


@contextlib.contextmanager
def reaching_others() -> Iterator[None]:
    """Makes what a process group raises an ExchangeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(first_line(error)) from error


class ProcessGroupCollectives:
    """An exchange by process groups. That of `torch.distributed` must have all ranks, each of which
    makes its exchange. everyone: the group that has all ranks already, which work as those of one
    node do.
    """

    def __init__(self, place: RankInfo, everyone: distributed.ProcessGroup | None = None):
        self.place = place
        self._own_node: distributed.ProcessGroup | None
        self._other_nodes: distributed.ProcessGroup | None
        self._streams = Streams()
        self._is_aborted = False
        self._is_given_up = False
        """Whether a collective was left to wait in gloo."""
        if everyone is not None:
            self._all = self._own_node = everyone
            self._other_nodes = None
        else:
            with self._streams.noting() if place.nodes > 1 else contextlib.nullcontext():
                self._make_process_groups()
        self._adds_on_the_way = distributed.get_backend(self._all) != "gloo"
        # Later versions of torch have other names for these functions, and warn of the old ones.
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)

    def spanning(self, nodes: int) -> ProcessGroupCollectives:
        """Returns the exchange of a plan whose planes are divided among `nodes` nodes: one, or all.
        This one ends it.
        """
        return self if nodes == 1 else ProcessGroupCollectives(self.place.as_one_node, self._all)

    def _make_process_groups(self) -> None:
        """Makes the groups. Every rank makes all of them, in the same order, and keeps those that
        it is in.
        """
        place, everyone = self.place, range(self.place.world_size)
        self._all = _group(everyone)
        self._own_node, self._other_nodes = self._all, None
        if place.nodes > 1:
            by_node = [
                _group(everyone[at : at + place.local_world_size])
                for at in everyone[:: place.local_world_size]
            ]
            by_number = [
                _group(everyone[at :: place.local_world_size])
                for at in range(place.local_world_size)
            ]
            self._own_node = by_node[place.node_rank]
            self._other_nodes = by_number[place.local_rank]

    def abort(self) -> None:
        """Ends collectives that wait for a rank that will not come. Any thread may call this. The
        processes of one node are ended by rank 0, and so are their connections.
        """
        self._is_aborted = True
        if not self._adds_on_the_way:
            self._streams.cut()
            return
        for group in {self._all, self._own_node, self._other_nodes}:
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Lets go of the groups, without waiting for the other ranks."""
        if self._adds_on_the_way and not self._is_aborted:
            # NCCL would wait until they leave too, which a process that torchrun has started does
            # when it ends: after this one has let go.
            self.abort()
        if self._is_given_up:
            # The group would wait for its collective when it is freed, so it never is.
            for group in {self._all, self._own_node, self._other_nodes}:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._streams.close()

    def _reach(
        self,
        collective: Callable[..., Any],
        *given: Any,
        group: distributed.ProcessGroup | None,
    ) -> None:
        """Calls a function of `torch.distributed`. Raises CollectiveError, also soon after `abort`
        if gloo would go on waiting.
        """
        with reaching_others():
            if self._adds_on_the_way:
                collective(*given, group=group)
                return
            work = collective(*given, group=group, async_op=True)
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK_SECONDS))
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # it has ended just after the look, and may not have failed
                        return
                    if self._is_aborted:
                        self._is_given_up = True
                        raise

    def all_gather(self, whole: torch.Tensor) -> None:
        self._reach(
            distributed.all_gather_into_tensor, whole, self._own(whole), group=self._own_node
        )

    def reduce_scatter(self, gradients: torch.Tensor) -> None:
        own = self._own(gradients)
        if self.place.local_world_size > 1:
            self._add_on_node(gradients, own)
        self._add_of_nodes(own)

    def add_gradients(self, gradients: torch.Tensor, room: torch.Tensor, own: torch.Tensor) -> None:
        self._reach(distributed.all_to_all_single, room, gradients, group=self._own_node)
        shards = room.view(self.place.local_world_size, -1)
        if self._adds_on_the_way:
            torch.sum(shards, dim=0, dtype=own.dtype, out=own)  # one kernel on a GPU
        else:
            _add_in_order(shards, own)
        self._add_of_nodes(own)

    def _add_of_nodes(self, own: torch.Tensor) -> None:
        """Adds what the ranks with this one's number have on every node."""
        if self._other_nodes is None:
            return
        if self._adds_on_the_way:
            self._reach(distributed.all_reduce, own, group=self._other_nodes)
            return
        for chunk in own.split(CHUNK_NUMEL):
            chunk.copy_(self.all_reduce_nodes(chunk))

    def _add_on_node(self, gradients: torch.Tensor, own: torch.Tensor) -> None:
        if self._adds_on_the_way:
            self._reach(distributed.reduce_scatter_tensor, own, gradients, group=self._own_node)
            return
        shards = torch.empty_like(gradients)
        self._reach(distributed.all_to_all_single, shards, gradients, group=self._own_node)
        _add_in_order(shards.view(self.place.local_world_size, -1), own)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self._sum(values, self.place.local_world_size, self._own_node)

    def all_reduce_nodes(self, values: torch.Tensor) -> torch.Tensor:
        return self._sum(values, self.place.nodes, self._other_nodes)

    def broadcast(self, chunk: torch.Tensor) -> None:
        self._reach(distributed.broadcast, chunk, 0, group=self._all)

    def _sum(
        self, values: torch.Tensor, ranks: int, group: distributed.ProcessGroup | None
    ) -> torch.Tensor:
        """Returns the sum of the `values` of the ranks of a group, added in their order."""
        if ranks == 1:
            return values.clone()
        everyone = values.new_empty(ranks, values.numel())
        self._reach(
            distributed.all_gather_into_tensor, everyone.view(-1), values.reshape(-1), group=group
        )
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        return total.view(values.shape)

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the elements of this rank."""
        size, at = whole.numel() // self.place.local_world_size, self.place.local_rank
        return whole[at * size : (at + 1) * size]


def _group(ranks: range) -> distributed.ProcessGroup:
    """Makes a group of some ranks. Once they have met, ranks wait for each other as long as a run
    is paused.
    """
    return distributed.new_group(list(ranks), timeout=timedelta(days=PATIENT_DAYS))


def _add_in_order(shards: torch.Tensor, total: torch.Tensor) -> None:
    """Makes `total` [n] the sum of `shards` [ranks, n], added in the order of ranks."""
    first, *others = shards
    total.copy_(first)
    for shard in others:
        total.add_(shard)

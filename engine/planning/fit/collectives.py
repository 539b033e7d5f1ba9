"""What ranks receive from each other in the ops of a plan, and how long that takes, is said here.
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from engine.machine.link_rates import collective_seconds, seconds_between_nodes
from engine.machine.rates import Rates
from engine.planning.schedule.ops import AllGather, Op, ReduceScatter
from engine.planning.schedule.schedule import StepPlan

Numels: TypeAlias = Mapping[str, tuple[int, int]]
MAIN_GRAD_BYTES = 4
"""Bytes that an element of an accumulator takes."""


class CollectiveTimes:
    """How long the exchanges of one rank's plan take, by estimate. numels: each unit has so many
    elements, and so many in weight_high, where frozen ones are too. item: a weight takes this many
    bytes.
    """

    def __init__(self, plan: StepPlan, numels: Numels, item: int, rates: Rates):
        self._rates = rates
        self._item = item
        self._replicas, self._nodes_per_replica = plan.replicas, plan.nodes_per_replica
        shards = plan.shards
        self._received = {unit: shards.received(numel) for unit, (numel, _) in numels.items()}
        frozen = {unit: shards.received(high - numel) for unit, (numel, high) in numels.items()}
        self._fetched = {unit: self._received[unit] + frozen[unit] for unit in numels}
        self._added = {
            unit: MAIN_GRAD_BYTES * shards.padded(numel) for unit, (numel, _) in numels.items()
        }
        self._main_grad_bytes = dict.fromkeys(numels, MAIN_GRAD_BYTES) | dict.fromkeys(
            plan.without_main_grad, item
        )
        self._gpu_resident = {unit for unit, _ in plan.gpu_resident}

    def received(self, op: Op) -> int:
        """Returns the bytes that a rank receives in the op from those that have other shards of the
        same planes. Norms count as nothing.
        """
        if isinstance(op, AllGather):
            lives_there = op.unit in self._gpu_resident  # what is frozen is there already
            numels = self._received if lives_there else self._fetched
            return numels[op.unit] * self._item
        if isinstance(op, ReduceScatter):
            return self._main_grad_bytes[op.unit] * self._received[op.unit]
        return 0

    def seconds(self, op: Op) -> float:
        """Returns the seconds of an op of the lane COLLECTIVE."""
        found = collective_seconds(self._rates, self.received(op), self._nodes_per_replica)
        if isinstance(op, ReduceScatter):
            found += seconds_between_nodes(self._rates, self._replicas, self._added[op.unit])
        return found

    def between_nodes(self, op: Op) -> float:
        """Returns the bytes that each node with a copy of all planes receives from the others in
        the op, for all of its ranks.
        """
        if not isinstance(op, ReduceScatter):
            return 0.0
        return 2 * (1 - 1 / self._replicas) * self._added[op.unit]

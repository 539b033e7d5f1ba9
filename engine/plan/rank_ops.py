"""These ops exchange weights and sums between ranks, on the lane EXCHANGE. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan.buffers import Buffer
from engine.plan.ops import Lane, Op, OpKind


@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """An `AllGather` completes the weights in a slot: every rank of a host has brought its own
    shard there, and gets those of the others.
    """

    kind, lane = OpKind.ALL_GATHER, Lane.EXCHANGE
    slot: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Meet(Op):
    """A `Meet` is over once every rank of a host has updated its shard of a unit. Each rank may
    then read the unit whole from memory that all of them share.
    """

    kind, lane = OpKind.MEET, Lane.EXCHANGE


@dataclass(frozen=True, slots=True)
class ReduceScatter(Op):
    """A `ReduceScatter` adds the fp32 sums of all ranks on all hosts, or the gradients in bf16 that
    take their place (`StepPlan.unsummed`), in fp32. On each host, every rank gets
    its own shard of the result, rounds it into a staging buffer and computes its norm.

    Where a step adds up sums after each round, a rank adds its shard to that of the earlier rounds,
    `total`, and rounds the result of the last one alone.
    """

    kind, lane = OpKind.REDUCE_SCATTER, Lane.EXCHANGE
    grad: Buffer = field(kw_only=True)
    staging: Buffer | None = field(kw_only=True, default=None)
    """It is None in rounds before the last."""
    total: Buffer | None = field(kw_only=True, default=None)
    first: bool | None = field(kw_only=True, default=None)
    """There is no earlier round; None without `total`."""


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """An `AllReduce` adds the losses of all ranks, and the squared norms of those of a host, which
    have all shards.
    """

    kind, lane = OpKind.ALL_REDUCE, Lane.EXCHANGE

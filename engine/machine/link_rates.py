"""Several ranks exchange weights and gradients over the links between their GPUs, and share the
cores and the memory of their host. How fast each of them then works is estimated here. No torch is
needed.
"""

from __future__ import annotations

from dataclasses import replace

from engine.config.optimizers import ADAMW, OPTIMIZERS
from engine.machine.rates import Rates

START_SECONDS = 2e-5
"""Seconds that a collective takes at least, however small it is."""
ASSUMED_LINK = 8e9
"""Bytes per second that a rank is assumed to receive where no rate of the link is known: GPUs
without access to each other's memory exchange tensors through that of the host.
"""
ASSUMED_NETWORK = 12.5e9
"""Bytes per second that a node is assumed to send and to receive at once where it was not measured,
as over 100 Gbit/s. All of its ranks share that.
"""
COMPUTE_SECONDS = {1: 0.0, 2: 2e-12}
"""Seconds by number of ranks that COMPUTE loses for each byte that its rank receives, since both
share the multiprocessors and the memory of the GPU. On two H200, six large products took 38.0 ms
instead of 36.6 while 233 MB of weights and 466 MB of accumulators arrived.
"""
COMPUTE_SECONDS_OF_MORE = 1.4e-12
"""The same for more ranks, which lose less. On each of four H200, COMPUTE of a step of 32.8 billion
parameters took 2.17 s longer while 1.57 TB arrived, and 1.67 s longer while 1.18 TB did.
"""


def seconds_lost(ranks: int, received: float) -> float:
    """Returns the seconds by which COMPUTE is slowed down whose rank, one of `ranks`, receives this
    number of bytes.
    """
    return COMPUTE_SECONDS.get(ranks, COMPUTE_SECONDS_OF_MORE) * received


def seconds_to_receive(rates: Rates, size: float) -> float:
    """Returns the seconds in which every rank receives `size` bytes from the others."""
    return size / (rates.link or ASSUMED_LINK)


def collective_seconds(rates: Rates, size: float, nodes: int = 1) -> float:
    """Returns the seconds of one exchange in which every rank receives `size` bytes. The ranks are
    on `nodes` nodes.
    """
    return START_SECONDS + seconds_to_receive_across(rates, nodes, size)


def seconds_between_nodes(rates: Rates, nodes: int, size: float) -> float:
    """Returns the seconds in which each of several nodes gets the sum of the `size` bytes that each
    of them has. In a ring, every host sends and receives nearly twice as much.
    """
    return 2 * (1 - 1 / nodes) * size / (rates.network or ASSUMED_NETWORK)


def seconds_to_receive_across(rates: Rates, nodes: int, size: float) -> float:
    """Returns the seconds in which every rank on `nodes` nodes receives `size` bytes from the
    others. In a ring, what one rank of a host receives comes over the network, at the same time as
    the others receive theirs from it.
    """
    within = seconds_to_receive(rates, size)
    return within if nodes == 1 else max(within, size / (rates.network or ASSUMED_NETWORK))


def reads_unsharded(rates: Rates | None, ranks: int) -> bool:
    """Returns whether it is faster that each of several ranks copies whole units from RAM than that
    it copies a shard and receives the others. It is where GPUs have no access to each other's
    memory: what they exchange then passes through RAM, too. rates: those of the machine; None on
    the CPU, where a copy within RAM is fastest.
    """
    if ranks == 1:
        return False
    if rates is None:
        return True
    copied = 1 / of_rank(rates, ranks).h2d
    return (1 - 1 / ranks) * seconds_to_receive(rates, 1.0) > copied


def of_rank(rates: Rates, ranks: int) -> Rates:
    """Returns the rates of one of several ranks, all of which work at once.

    - Each has its share of the cores.
    - Each GPU has a bus of its own, but all copies and AdamW share the memory of the host. Its rate
      is the most that AdamW, with and without copies, has been seen to use. Where all of them
      together ask for more, each gets so much less.
    """
    if ranks == 1:
        return rates
    item = OPTIMIZERS[ADAMW].update_bytes
    busy = item * rates.adamw_busy + rates.h2d_busy + rates.d2h_busy
    memory = max(item * rates.adamw, busy)
    h2d = min(rates.h2d, memory / ranks)
    d2h = min(rates.d2h, memory / ranks)
    share = min(1.0, memory / (item * rates.adamw + ranks * (h2d + d2h)))
    return replace(
        rates,
        h2d=h2d,
        d2h=d2h,
        h2d_busy=min(rates.h2d_busy, share * h2d),
        d2h_busy=min(rates.d2h_busy, share * d2h),
        adamw=rates.adamw / ranks,
        adamw_busy=min(rates.adamw_busy, share * rates.adamw) / ranks,
        others=tuple((optimizer, rate / ranks) for optimizer, rate in rates.others),
    )

"""How fast nodes receive from each other is measured through the group of all ranks of a run."""

from __future__ import annotations

import time

import torch

from engine.runtime.collectives.process_groups import ProcessGroupCollectives

FIRST_BYTES = 1 << 20
MOST_BYTES = 1 << 28
"""Bytes that a measurement gathers at first, and at most."""
ENOUGH_SECONDS = 0.05
"""Seconds of a gather that is long enough to count."""
TIMES = 2
"""Number of times that each size is gathered; the fastest counts."""


def gather_seconds(collectives: ProcessGroupCollectives, device: torch.device, size: int) -> float:
    """Returns the seconds in which all ranks gather `size` bytes, to which each adds its shard.
    Every rank calls this. Raises ExchangeError.
    """
    everyone = collectives.spanning(collectives.place.nodes)
    ranks = everyone.place.local_world_size
    whole = torch.zeros(size // ranks * ranks, dtype=torch.uint8, device=device)
    everyone.all_reduce(whole[:1])  # all of them begin together
    whole[-1].item()  # on a GPU this waits until everything before it is done
    began = time.perf_counter()
    everyone.all_gather(whole)
    whole[-1].item()
    return time.perf_counter() - began


def received_by_node(collectives: ProcessGroupCollectives, size: int) -> float:
    """Returns how many of the `size` bytes come to each node over the network: in a ring, those
    that one of its ranks gets from the others.
    """
    return (1 - 1 / collectives.place.world_size) * size

"""Every node has all planes. They are filled on the node of rank 0; before the
first step the other nodes get them from there, chunk by chunk, through the process group. From then
on they stay alike, since every node makes the same updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engine.runtime.collectives.process_groups import Collectives
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.ram_planes import Key

CHUNK_BYTES = 32 << 20
"""Bytes of a chunk in which planes are sent."""


def send_planes(states: HostStates, collectives: Collectives, device: torch.device) -> None:
    """Sends all planes to the other nodes. Raises ExchangeError."""
    for (unit, plane), begin, end in _chunks(states):
        content = states.content(unit, plane, begin, end)
        collectives.broadcast(torch.from_numpy(content).to(device))


def receive_planes(
    states: HostStates,
    collectives: Collectives,
    device: torch.device,
    keeps: Callable[[str], bool],
) -> None:
    """Receives all planes, and writes those of units for which `keeps` is True. Raises
    ExchangeError.
    """
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
    for (unit, plane), begin, end in _chunks(states):
        chunk = buffer[: end - begin]
        collectives.broadcast(chunk)
        if keeps(unit):
            states.put(unit, plane, begin, chunk.cpu().numpy())


def _chunks(states: HostStates) -> Iterator[tuple[Key, int, int]]:
    """Yields the chunks of all planes: the bytes between two places. Gradients are made anew in
    every step.
    """
    for unit in states.layouts:
        for plane in states.planes:
            size = 0 if plane == "grad" else states.nbytes(unit, plane)
            for begin in range(0, size, CHUNK_BYTES):
                yield (unit, plane), begin, min(begin + CHUNK_BYTES, size)

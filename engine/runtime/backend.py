"""The lanes behind one small interface.

An executor submits ops in plan order; a backend runs each on its lane once the ops it waits for
have finished. `engine.runtime.cpu_backend` runs them one by one; `engine.runtime.cuda_backend` runs
the lanes at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.plan.ops import Lane


class Ticket(Protocol):
    """Handle of a submitted op."""

    def span(self) -> tuple[float, float]:
        """Start and end in seconds on the backend's clock; only once the op has finished."""


class Backend(Protocol):
    device: torch.device
    device_name: str

    def submit(self, lane: Lane, waits: Sequence[Ticket], work: Callable[[], None]) -> Ticket:
        """Run `work` on `lane` after `waits`. Raises what an earlier op raised, once it is known."""

    def finish_step(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the HOST lane after all its ops submitted so far."""

    def drain(self) -> None:
        """Wait until every submitted op has finished; raises the first error of any lane."""

    def copy_in_parts(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between host and device, within an op, that lets those of other lanes pass between
        its parts.
        """

    def upload(self, array) -> torch.Tensor:
        """A small host array on the device, ordered before COMPUTE ops submitted later."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A small zeroed host tensor that COMPUTE may copy to without stalling."""

    def register(self, pointer: int, nbytes: int) -> None:
        """Make host memory known to the DMA engines."""

    def unregister(self, pointer: int) -> None: ...

    def limit_memory(self, nbytes: int) -> None:
        """Refuse device allocations beyond `nbytes`."""

    def seed(self, value: int) -> None:
        """Seed the generator that COMPUTE ops draw from (dropout), without a device
        synchronization.
        """

    def free_memory(self) -> int:
        """Bytes that new tensors on the device may take, within its free memory and any limit."""

    def memory(self) -> dict[str, int]:
        """Bytes: allocated, reserved, the peaks of both, total, free; and `retries`, how often
        cached memory had to be given back, which stalls the device (zeros on the CPU).
        """

    def reset_peak(self) -> None:
        """Give cached device memory back and count the peak anew."""

    def close(self) -> None: ...

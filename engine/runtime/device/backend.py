"""A backend runs the lanes of a plan on one device. This file defines its interface.

An executor submits ops in plan order. A backend runs each op on its lane once the ops that it waits
for have finished. `engine.runtime.device.cpu_backend` runs the ops one by one, and
`engine.runtime.device.cuda_backend` runs the lanes at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.planning.schedule.ops import Lane
from engine.runtime.device.graph_recorder import Recorder


class Ticket(Protocol):
    """A ticket identifies one submitted op, so that later ops can wait for it."""

    def span(self) -> tuple[float, float]:
        """Returns start and end of the op in seconds on the backend's clock. The op must have
        finished.
        """

    def require(self) -> None:
        """Waits until the op is issued on its stream or, if the host runs it, until it has
        finished. Raises its error if it failed.
        """

    def finish(self) -> None:
        """Waits until the op has finished, whatever was submitted after it. Raises its error if it
        failed.
        """


class Backend(Protocol):
    """A backend runs ops on the lanes of one device and manages the memory of that device."""

    device: torch.device

    @property
    def device_name(self) -> str:
        """The name of the device, under which its rates are stored."""

    def submit(self, lane: Lane, waits: Sequence[Ticket], work: Callable[[], None]) -> Ticket:
        """Runs `work` on `lane` after the ops of `waits`, which are tickets of this backend. Raises
        the error of an earlier op once it is known.
        """

    def finish_step(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the HOST lane once all ops submitted to HOST so far have finished."""

    def drain(self) -> None:
        """Waits until every submitted op has finished. Raises the first error of any lane."""

    def recorder(self) -> Recorder:
        """Returns what records work of COMPUTE. Raises NotImplementedError on the CPU."""

    def copy_in_chunks(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Writes `source` [numel] to `target` [numel] between host and device, as part of an op.
        Copies of other lanes can run between two parts.
        """

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Returns a small host array as a tensor of the same shape on the device. The copy is
        ordered before the COMPUTE ops that are submitted later.
        """

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the device on the host, in the same shape. It does not wait
        for the lanes: no op may be changing the tensor. Any thread may call it.
        """

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a small zeroed host tensor [numel] that COMPUTE may copy to without stalling."""

    def register(self, pointer: int, nbytes: int) -> bool:
        """Makes host memory known to the device's DMA engines. Returns False where the system
        refuses: copies then pass through a buffer of the driver, which is slower.
        """

    def unregister(self, pointer: int) -> None:
        """Takes back the registration of the host memory at `pointer`."""

    def unregistered_rate(self) -> float:
        """Returns how many bytes a second pass between the device and host memory that is not
        registered. It is measured in some hundredths of a second. On the CPU it is 0.
        """

    def limit_memory(self, nbytes: int) -> None:
        """Refuses device allocations beyond `nbytes` from now on."""

    def seed(self, value: int) -> None:
        """Seeds the generator that COMPUTE ops draw from (for dropout), without a synchronization
        with the device.
        """

    def free_memory(self) -> int:
        """Returns the bytes that new tensors on the device may take, within its free memory and any
        limit.
        """

    def memory(self) -> dict[str, int]:
        """Returns bytes: `allocated`, `reserved`, their peaks `peak` and `peak_reserved`, `total`
        and `free`. `retries` counts how often cached memory had to be released, which stalls the
        device. The CPU reports zeros.
        """

    def reset_peak(self) -> None:
        """Releases cached device memory and resets the peaks."""

    def close(self) -> None:
        """Ends the backend's threads and releases its memory."""

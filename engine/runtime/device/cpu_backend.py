"""The backend for the CPU runs every op when it is submitted. Plan order satisfies every wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.machine.cgroups import sample_host_memory
from engine.machine.primitive_cache import bound_kept_kernels
from engine.machine.rates import SMALL_PRODUCT
from engine.planning.schedule.ops import Lane
from engine.runtime.device.backend import Ticket
from engine.runtime.device.graph_recorder import Recorder


@dataclass(frozen=True)
class DoneTicket:
    """Ticket of an op that has already run; its times are in seconds."""

    start: float
    end: float

    def span(self) -> tuple[float, float]:
        return self.start, self.end

    def require(self) -> None:
        """Returns at once: the op has run."""

    def finish(self) -> None:
        """Returns at once: the op has run."""


class CpuBackend:
    """Runs all lanes in the caller's thread, in plan order."""

    device_name = "CPU"

    def __init__(self) -> None:
        bound_kept_kernels()
        self.device = torch.device("cpu")
        self._threads = torch.get_num_threads()

    def share_work(self, product: float, ranks: int = 1) -> None:
        """Chooses the number of threads for blocks whose largest matrix product has `product`
        FLOPs: one thread where that is faster. ranks: number of ranks that share the cores. The
        choice depends on the plan alone, since results are rounded differently with another number
        of threads.
        """
        threads = max(1, self._threads // ranks)
        torch.set_num_threads(1 if product < SMALL_PRODUCT else threads)

    def submit(
        self,
        lane: Lane,  # noqa: ARG002 every lane runs on the calling thread
        waits: Sequence[Ticket],  # noqa: ARG002  what was submitted before has run
        work: Callable[[], None],
    ) -> DoneTicket:
        start = time.perf_counter()
        work()
        return DoneTicket(start, time.perf_counter())

    def finish_step(self, callback: Callable[[], None]) -> None:
        callback()

    def drain(self) -> None:
        """Returns at once: no op is ever under way."""

    def recorder(self) -> Recorder:
        raise NotImplementedError("kernels are recorded on a GPU only")

    def copy_in_chunks(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `source` [numel] to `target` [numel] at once: no other lane is waiting."""
        target.copy_(source)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Returns a tensor of the same shape that shares the memory of `array`."""
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a zeroed tensor [numel]."""
        return torch.zeros(numel, dtype=dtype)

    def register(self, pointer: int, nbytes: int) -> bool:  # noqa: ARG002  as on a GPU
        """Does nothing: the CPU needs no registration."""
        return True

    def unregister(self, pointer: int) -> None:
        """Does nothing: the CPU needs no registration."""

    def unregistered_rate(self) -> float:
        """Returns 0: nothing passes between two kinds of memory."""
        return 0.0

    def limit_memory(self, nbytes: int) -> None:
        """Does nothing: the host's own limits apply."""

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def free_memory(self) -> int:
        return sample_host_memory()[1]

    def memory(self) -> dict[str, int]:
        return {
            "allocated": 0,
            "reserved": 0,
            "peak": 0,
            "total": 0,
            "free": 0,
            "peak_reserved": 0,
            "retries": 0,
        }

    def reset_peak(self) -> None:
        """Does nothing: no memory is counted."""

    def close(self) -> None:
        """Restores the number of threads that torch used before."""
        torch.set_num_threads(self._threads)

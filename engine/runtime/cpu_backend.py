"""The backend for the CPU. Every op simply runs when it is submitted, which is one legal order of
the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.machine.cgroups import sample_host_memory
from engine.machine.rates import SMALL_PRODUCT
from engine.plan.ops import Lane
from engine.runtime.backend import Ticket


@dataclass(frozen=True)
class DoneTicket:
    start: float
    end: float

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class CpuBackend:
    """All lanes inline, in plan order."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.device_name = "CPU"
        self._threads = torch.get_num_threads()

    def share_work(self, product: float) -> None:
        """Blocks whose largest matrix product has `product` FLOPs are to be computed, by this
        thread: alone where that is faster. A function of the plan, since more threads round
        otherwise.
        """
        torch.set_num_threads(1 if product < SMALL_PRODUCT else self._threads)

    def submit(self, lane: Lane, waits: Sequence[Ticket], work: Callable[[], None]) -> DoneTicket:
        start = time.perf_counter()
        work()
        return DoneTicket(start, time.perf_counter())

    def finish_step(self, callback: Callable[[], None]) -> None:
        callback()

    def drain(self) -> None:
        """Nothing is ever under way."""

    def copy_in_parts(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def upload(self, array) -> torch.Tensor:
        return torch.from_numpy(array)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def register(self, pointer: int, nbytes: int) -> None:
        """The CPU needs no registration."""

    def unregister(self, pointer: int) -> None:
        """The CPU needs no registration."""

    def limit_memory(self, nbytes: int) -> None:
        """The host's limits hold."""

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
        """Nothing is counted."""

    def close(self) -> None:
        torch.set_num_threads(self._threads)

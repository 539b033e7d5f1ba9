"""The lanes behind one small interface, and its inline implementation for the CPU.

An executor submits ops in plan order; a backend runs each on its lane once the ops it waits for have finished. On the
CPU every op simply runs when it is submitted, which is one legal order of the plan; `engine.cuda_backend` runs the
lanes at the same time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cost import SMALL_PRODUCT
from engine.machine import sample_host_memory
from engine.plan import Op


class Ticket(Protocol):
    """Handle of a submitted op."""

    def span(self) -> tuple[float, float]:
        """Start and end in seconds on the backend's clock; only once the op has finished."""


class Backend(Protocol):
    device: torch.device
    device_name: str

    def submit(self, op: Op, waits: Sequence[Ticket], work: Callable[[], None]) -> Ticket:
        """Run `work` on the lane of `op` after `waits`. Raises what an earlier op raised, once it is known."""

    def finish_step(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the HOST lane after all its ops submitted so far."""

    def drain(self) -> None:
        """Wait until every submitted op has finished; raises the first error of any lane."""

    def copy_in_parts(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between host and device, within an op, that lets those of other lanes pass between its parts."""

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
        """Seed the generator that COMPUTE ops draw from (dropout), without a device synchronization."""

    def room(self) -> int:
        """Bytes that new tensors on the device may take, within its free memory and any limit."""

    def memory(self) -> dict[str, int]:
        """Bytes: allocated, reserved, the peaks of both, total, free; and `retries`, how often cached memory had to be given
        back, which stalls the device (zeros on the CPU)."""

    def reset_peak(self) -> None:
        """Give cached device memory back and count the peak anew."""

    def close(self) -> None: ...


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
        """Blocks whose largest matrix product has `product` FLOPs are to be computed, by this thread: alone where that is
        faster. A function of the plan, since more threads round otherwise."""
        torch.set_num_threads(1 if product < SMALL_PRODUCT else self._threads)

    def submit(self, op: Op, waits: Sequence[Ticket], work: Callable[[], None]) -> DoneTicket:
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

    def room(self) -> int:
        return sample_host_memory()[1]

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0, "peak": 0, "total": 0, "free": 0, "peak_reserved": 0,
                "retries": 0}

    def reset_peak(self) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        torch.set_num_threads(self._threads)


def give_memory_back() -> None:
    """What a run leaves: tensors in cycles, with its error for one, and device memory that the allocator keeps for more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def open_backend(device: str) -> Backend:
    """`auto`, `cuda` or `cpu`. Raises RamstreamError when cuda is asked for and there is none."""
    from engine.cuda_backend import CudaBackend, cuda_available
    from engine.errors import ConfigError

    if device == "cpu" or (device == "auto" and not cuda_available()):
        return CpuBackend()
    if not cuda_available():
        raise ConfigError("engine.device", "cuda is asked for but no CUDA GPU is usable; choose auto or cpu.")
    return CudaBackend()

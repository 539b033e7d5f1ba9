"""Lanes that run at once, some of them late or careless: on a CUDA GPU or, where there is none, on
the same backend over streams that do their work as it is launched. Its lane threads, tickets and
waits are the real ones then, and the device is the CPU.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.ops import DISK_LANES, Lane
from engine.runtime.device import cuda_backend


class Lanes(cuda_backend.CudaBackend):
    """Ops of `slow` lanes are late by about a millisecond, ops of `careless` lanes wait for nothing
    but their lane, and the nth op of the lane `broken` raises.
    """

    def __init__(
        self,
        slow: tuple[str, ...] = (),
        careless: tuple[str, ...] = (),
        broken: str = "",
        nth: int = 1,
    ):
        super().__init__()
        self._slow, self._careless, self._breaking, self._left = slow, careless, broken, nth

    def submit(self, lane, waits, work):
        def late():
            if lane in (Lane.HOST, *DISK_LANES):
                time.sleep(0.001)
            else:
                cuda_backend.torch.cuda._sleep(2_000_000)
            work()

        def fail():
            raise RuntimeError(f"{lane} broke")

        chosen = late if lane in self._slow else work
        if lane == self._breaking:
            self._left -= 1
            if self._left == 0:
                chosen = fail
        return super().submit(lane, () if lane in self._careless else waits, chosen)


class Event:
    lost = False
    """Every call of a lost device fails, also one about work that was over before."""

    def __init__(self, **_):
        self.at = math.nan

    def record(self, stream):
        self.at = time.perf_counter()

    def query(self):
        return True

    def synchronize(self):
        if Event.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        assert not math.isnan(self.at), "waited for an event that nothing recorded"

    def elapsed_time(self, end):
        if Event.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return (end.at - self.at) * 1e3


class ImmediateStreams:
    """Stands for torch in the backend's file: as torch, but for what the backend asks of CUDA."""

    def __init__(self):
        stream = SimpleNamespace(wait_event=Event.synchronize)
        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=lambda _: stream,
            default_stream=lambda _: stream,
            set_device=lambda _: None,
            current_stream=lambda _: stream,
            stream=lambda _: contextlib.nullcontext(),
            synchronize=lambda _: None,
            empty_cache=lambda: None,
            get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 40),
            _sleep=lambda cycles: time.sleep(cycles / 2e9),
        )

    def __getattr__(self, name):
        return getattr(torch, name)


def lanes_without_a_gpu(*args, **kwargs) -> Lanes:
    """`Lanes` over streams that do their work as it is launched. Until they are closed, the torch
    of the backend's file must be `ImmediateStreams`.
    """
    backend = Lanes(*args, **kwargs)
    backend.device = torch.device("cpu")
    backend.upload = torch.from_numpy
    backend.host_buffer = lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    backend.seed = torch.default_generator.manual_seed
    backend.register = backend.unregister = lambda *_: True
    return backend


CARELESS_TRIES = 4


def find_missing_waits(train_and_compare: Callable[[], None]) -> None:
    """The delays have teeth: training whose lanes miss the waits of one of them breaks, or its bits
    differ. Where other programs delay the careless lane too, it is tried again.

    train_and_compare: trains with a careless lane, and asserts that no bit has changed.
    """
    assert any(_goes_wrong(train_and_compare) for _ in range(CARELESS_TRIES))


def _goes_wrong(train_and_compare: Callable[[], None]) -> bool:
    try:
        train_and_compare()
    except (NonFiniteError, AssertionError):
        return True
    except RuntimeError as error:
        # Autograd itself noticed that saved weights were written over.
        assert "modified by an inplace operation" in str(error)
        return True
    return False

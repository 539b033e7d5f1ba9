"""The lanes on a CUDA GPU: streams and a host thread, ordered by events and by nothing else.

COMPUTE ops are launched from the caller's thread on the default stream. The lanes of copies and of
the optimizer on the device have a stream and a thread each, because a prefetch must wait for a host
update without holding up the launches of COMPUTE. HOST ops run on a thread of their own. This is
the only file that speaks of CUDA.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from engine.errors import FitError, GpuMemoryError, RamstreamError
from engine.plan.ops import UPDATE_LANES, Lane
from engine.words import GIB

SWITCH_SECONDS = 0.0005
PART_BYTES = 128 << 20
"""Of copies in parts: two milliseconds each."""


def _set_up_cuda() -> None:
    """Settings that are read when CUDA starts; a user's own stay."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" not in settings:
        # Growing segments leave no gaps when micro-batch shapes vary, and states find space where
        # activations were.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(
            filter(None, (settings, "expandable_segments:True"))
        )
    # A queue of the hardware for each of our streams; the default is 8.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def cuda_available() -> bool:
    """Whether torch sees a GPU that it can use."""
    _set_up_cuda()  # to ask already starts CUDA
    return torch.cuda.is_available()


class _Ticket:
    """An op on its way: `issued` is set once its end event is recorded (or the op failed)."""

    def __init__(self, backend: CudaBackend):
        self._backend = backend
        self.issued = threading.Event()
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Whoever waits for this op is told."""
        self.error = error

    def require(self) -> None:
        self.issued.wait()
        if self.error is not None:
            raise self.error


class _DeviceTicket(_Ticket):
    """An op of a stream."""

    def __init__(self, backend: CudaBackend):
        super().__init__(backend)
        self.start = torch.cuda.Event(enable_timing=True)
        # Blocking: a host thread that waits for it sleeps instead of spinning on a core.
        self.end = torch.cuda.Event(enable_timing=True, blocking=True)

    def span(self) -> tuple[float, float]:
        anchor, seconds = self._backend.anchor
        return seconds + anchor.elapsed_time(self.start) / 1e3, seconds + anchor.elapsed_time(
            self.end
        ) / 1e3


class _HostTicket(_Ticket):
    """An op of the host thread; issued means finished."""

    start = end = 0.0

    def run(self, work: Callable[[], None]) -> None:
        self.start = time.perf_counter()
        work()
        self.end = time.perf_counter()

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class CudaBackend:
    """Runs each lane as soon as its waits allow. See `engine.runtime.backend.Backend` for the
    contract.
    """

    def __init__(self, index: int = 0):
        _set_up_cuda()
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._streams = {
            lane: torch.cuda.Stream(self.device)
            for lane in Lane
            if lane not in (Lane.COMPUTE, Lane.HOST)
        }
        self._streams[Lane.COMPUTE] = torch.cuda.default_stream(self.device)
        self._queues: dict[Lane, queue.SimpleQueue] = {
            lane: queue.SimpleQueue() for lane in Lane if lane != Lane.COMPUTE
        }
        self._error: BaseException | None = None
        self._limit = torch.cuda.get_device_properties(self.device).total_memory
        # Threads that launch take turns with those of the optimizer: five milliseconds, Python's
        # own, are too long a turn.
        sys.setswitchinterval(SWITCH_SECONDS)
        self._broken: dict[Lane, BaseException] = {}
        self._set_anchor()
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"lane-{lane}", daemon=True)
            for lane in self._queues
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ lanes

    def submit(self, lane: Lane, waits: Sequence[_Ticket], work: Callable[[], None]) -> _Ticket:
        if self._error is not None:
            raise self._error
        ticket = _HostTicket(self) if lane == Lane.HOST else _DeviceTicket(self)
        if lane == Lane.COMPUTE:
            self._launch(lane, ticket, waits, work)
            if ticket.error is not None:
                raise ticket.error
        else:
            self._queues[lane].put((ticket, waits, work))
        return ticket

    def _require(self, lane: Lane, waits: Sequence[_Ticket]) -> None:
        """Raise what broke an op that this one needs. Lane order is a wait too, so that no update
        follows a failed clip; lanes that need nothing of the failure go on, so that the step before
        is still applied.
        """
        if lane in self._broken:
            raise self._broken[lane]
        for wait in waits:
            wait.require()

    def _launch(
        self, lane: Lane, ticket: _DeviceTicket, waits: Sequence[_Ticket], work: Callable[[], None]
    ) -> None:
        stream = self._streams[lane]
        try:
            self._require(lane, waits)
            for wait in waits:
                if isinstance(wait, _DeviceTicket):
                    if lane in UPDATE_LANES:  # nothing is issued before it can run
                        wait.end.synchronize()
                    stream.wait_event(wait.end)
            with torch.cuda.stream(stream):
                ticket.start.record(stream)
                work()
                ticket.end.record(stream)
        except BaseException as error:
            self._fail(lane, ticket, error)
        ticket.issued.set()

    def _run_on_host(
        self, ticket: _HostTicket, waits: Sequence[_Ticket], work: Callable[[], None]
    ) -> None:
        try:
            self._require(Lane.HOST, waits)
            for wait in waits:
                if isinstance(wait, _DeviceTicket):
                    self._synchronize(wait)
            ticket.run(work)
        except BaseException as error:
            self._fail(Lane.HOST, ticket, error)
        ticket.issued.set()

    def _fail(self, lane: Lane, ticket: _Ticket, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            memory = self.memory()
            error = GpuMemoryError(
                f"{memory['allocated'] / GIB:.1f} GiB in use of {memory['total'] / GIB:.1f}"
            )
        ticket.fail(error)
        self._broken.setdefault(lane, error)
        if self._error is None:
            self._error = error

    def _serve(self, lane: Lane) -> None:
        torch.cuda.set_device(self.device)
        while True:
            item = self._queues[lane].get()
            if item is None:
                return
            ticket, waits, work = item
            if lane == Lane.HOST:
                self._run_on_host(ticket, waits, work)
            else:
                self._launch(lane, ticket, waits, work)
            # The closure holds a step's tensors: let go of it before waiting for the next item.
            del item, ticket, waits, work

    def copy_in_parts(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A copy engine goes on with one stream until that has nothing more to copy. A weight that
        # is needed now would wait for all the gigabytes of states that are issued, so the engine
        # must run dry between two parts.
        size = PART_BYTES // target.element_size()
        for start in range(0, target.numel(), size):
            target[start : start + size].copy_(source[start : start + size], non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(self.device))
            done.synchronize()

    def finish_step(self, callback: Callable[[], None]) -> None:
        def finish() -> None:
            callback()
            self.anchor = self._next_anchor

        self._queues[Lane.HOST].put((_HostTicket(self), (), finish))

    def drain(self) -> None:
        marks = []
        for lane in self._queues:
            mark = _HostTicket(self) if lane == Lane.HOST else _DeviceTicket(self)
            self._queues[lane].put((mark, (), lambda: None))
            marks.append(mark)
        for mark in marks:
            mark.issued.wait()
        torch.cuda.synchronize(self.device)
        error, self._error = self._error, None
        self._broken.clear()
        if error is not None:
            raise error

    # ------------------------------------------------------------------ clocks

    def _set_anchor(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[Lane.COMPUTE])
        event.synchronize()
        self.anchor = self._next_anchor = (event, time.perf_counter())

    def _synchronize(self, ticket: _DeviceTicket) -> None:
        """Wait, on the host thread, for an op of a stream. An end that was waited for ties the
        device's clock to the host's anew, since the two drift; and elapsed times are
        single-precision milliseconds, so an anchor near the measured step keeps microseconds.
        """
        waited = not ticket.end.query()
        ticket.end.synchronize()
        self._next_anchor = (ticket.end, time.perf_counter() if waited else ticket.span()[1])

    # ------------------------------------------------------------------ memory

    def upload(self, array) -> torch.Tensor:
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def register(self, pointer: int, nbytes: int) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
        if code != 0:
            self._clear_error()
            raise FitError(
                f"{nbytes} bytes of host memory could not be registered for transfers (CUDA error "
                f"{code}); free host memory, raise the locked-memory limit (ulimit -l), or choose "
                "a smaller model."
            )

    def unregister(self, pointer: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(pointer)

    def _clear_error(self) -> None:
        """CUDA keeps the error of a refused call for whoever looks next: let that be a launch of no
        importance.
        """
        try:
            torch.zeros(1, device=self.device).add_(1)
        except RuntimeError:
            pass

    def limit_memory(self, nbytes: int) -> None:
        """Refuse allocations beyond `nbytes` in this process."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)
        self._limit = nbytes

    def free_memory(self) -> int:
        memory = self.memory()
        unused = memory["reserved"] - memory["allocated"]
        return unused + max(0, min(memory["free"], self._limit - memory["reserved"]))

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self.device.index].manual_seed(value)

    def memory(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "peak": torch.cuda.max_memory_allocated(self.device),
            "total": total,
            "free": free,
            "peak_reserved": torch.cuda.max_memory_reserved(self.device),
            "retries": torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0),
        }

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def close(self) -> None:
        """End the lane threads and give cached device memory back."""
        for lane in self._queues:
            self._queues[lane].put(None)
        for thread in self._threads:
            thread.join(timeout=60)
            if thread.is_alive():
                raise RamstreamError("A transfer did not end within a minute; the GPU may be gone.")
        torch.cuda.empty_cache()

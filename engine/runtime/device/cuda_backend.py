"""The backend for a CUDA GPU runs the lanes at the same time, on streams and a host thread. Lanes
are ordered by events only. No other file calls CUDA, but for
`engine.runtime.device.graph_recorder`.

Which lane runs where:

- COMPUTE ops are launched from the caller's thread on the default stream.
- The copy lanes (H2D, D2H) and the three lanes of optimizers on the device (STATES IN, UPDATE,
  STATES OUT) have a stream and a thread each. A prefetch must wait for a host update. Since the
  lane has its own thread, this wait does not delay the launches of COMPUTE.
- HOST ops run on a separate thread, and so do those of READ and WRITE, which move moments between
  host and disk. Below, an op of any of these three counts as a HOST op.

What waits for what:

- Ops of one lane run in the order in which they were submitted: a lane has one stream or one
  thread.
- Every op has a ticket. `issued` is set once the op's end event is recorded in its stream; for a
  HOST op, once the op has finished. A thread that waits for an op first waits for `issued`, since a
  wait for an event that is not recorded yet would return at once.
- An op of a stream that waits for an op of another stream makes its own stream wait for the end
  event. No host thread blocks on it.
- Ops of the optimizer lanes are the exception: their thread sleeps until the end event has passed,
  and only then issues the op.
- A HOST op that waits for an op of a stream sleeps until that end event has passed.
- An op of a stream that waits for a HOST op waits for `issued` only, because the HOST op has
  finished by then.

How memory stays alive: a queued op is a closure that holds the tensors of its step. Torch's caching
allocator reuses the memory of a freed tensor in the order of the stream that allocated it, and
activations are allocated and freed on the stream of COMPUTE only. Buffers that several streams use
live as long as the engine, and the waits of the plan protect their contents.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch

from engine.errors import GpuMemoryError, RamstreamError, first_line
from engine.planning.schedule.ops import DISK_LANES, UPDATE_LANES, Lane
from engine.runtime.device.backend import Ticket
from engine.runtime.device.graph_recorder import CudaRecorder
from engine.text import GIB

SWITCH_SECONDS = 0.0005
"""Seconds after which a thread that waits for the interpreter's lock requests it."""
_RATE_BYTES = 64 << 20
"""Bytes of the copy each way with which the rate of unregistered memory is measured."""
PART_BYTES = 128 << 20
"""Bytes that a copy in chunks moves at a time, which takes about two milliseconds."""


def _set_up_cuda() -> None:
    """Sets the environment variables that are read when CUDA starts. Values that the user has set
    are kept.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" not in settings:
        # Expandable segments leave no gaps when the shapes of micro-batches vary.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(
            filter(None, (settings, "expandable_segments:True"))
        )
    # Each of our streams gets its own hardware queue; by default all streams share 8.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def cuda_available() -> bool:
    """Says whether torch sees a usable GPU."""
    _set_up_cuda()  # the query itself starts CUDA
    return torch.cuda.is_available()


def cuda_problem() -> str:
    """Returns why torch can use no GPU, in its own words; empty where it can use one."""
    if cuda_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it finds none"


class _Ticket:
    """A ticket identifies a submitted op. `issued` is set once the end event of the op is recorded,
    or once the op has failed.
    """

    def __init__(self, backend: CudaBackend):
        self._backend = backend
        self.issued = threading.Event()
        self.error: BaseException | None = None

    def span(self) -> tuple[float, float]:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Keeps the error of the op for the ops that wait for it."""
        self.error = error

    def require(self) -> None:
        """Waits until the op is issued. Raises its error if it failed."""
        self.issued.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self.require()


class _DeviceTicket(_Ticket):
    """A device ticket identifies an op of a stream, with one event at its start and one at its
    end.
    """

    def __init__(self, backend: CudaBackend):
        super().__init__(backend)
        self.start = torch.cuda.Event(enable_timing=True)
        # Blocking: a host thread that waits for this event sleeps instead of spinning on a core.
        self.end = torch.cuda.Event(enable_timing=True, blocking=True)

    def span(self) -> tuple[float, float]:
        anchor, seconds = self._backend.anchor
        start = seconds + anchor.elapsed_time(self.start) / 1e3
        end = seconds + anchor.elapsed_time(self.end) / 1e3
        return start, end

    def finish(self) -> None:
        self.require()
        self.end.synchronize()


class _HostTicket(_Ticket):
    """A host ticket identifies an op of HOST, READ or WRITE. It counts as issued once the op has
    finished.
    """

    start = end = 0.0

    def run(self, work: Callable[[], None]) -> None:
        self.start = time.perf_counter()
        work()
        self.end = time.perf_counter()

    def span(self) -> tuple[float, float]:
        return self.start, self.end


_Item = tuple[_Ticket, Sequence[_Ticket], Callable[[], None]]
"""An item in the queue of a lane is an op: its ticket, the tickets that it waits for, and its
work.
"""


class CudaBackend:
    """Runs each lane as soon as its waits allow.
    `engine.runtime.device.backend.Backend` documents the methods.
    """

    def __init__(self, index: int = 0):
        _set_up_cuda()
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        # Each lane of the device has a stream, since work on different streams can overlap. COMPUTE
        # has the default stream, on which models and autograd launch anyway.
        self._streams: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(self.device)
            for lane in Lane
            if lane not in (Lane.COMPUTE, Lane.HOST, *DISK_LANES)
        }
        self._downloads = torch.cuda.Stream(self.device)
        self._streams[Lane.COMPUTE] = torch.cuda.default_stream(self.device)
        # Every lane except COMPUTE has a queue and a thread that serves it. None in the queue ends
        # the thread.
        self._queues: dict[Lane, queue.SimpleQueue[_Item | None]] = {
            lane: queue.SimpleQueue() for lane in Lane if lane != Lane.COMPUTE
        }
        self._error: BaseException | None = None
        self._limit = torch.cuda.get_device_properties(self.device).total_memory
        # Threads that launch ops share the interpreter with those of the optimizer. Python's
        # default switch interval of five milliseconds is too long.
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

    def submit(self, lane: Lane, waits: Sequence[Ticket], work: Callable[[], None]) -> _Ticket:
        if self._error is not None:
            raise self._error
        own_waits = cast("Sequence[_Ticket]", waits)  # every ticket here comes from this method
        if lane == Lane.COMPUTE:
            # The caller launches COMPUTE itself, so that an error is raised at the op that failed.
            launched = _DeviceTicket(self)
            self._launch(lane, launched, own_waits, work)
            if launched.error is not None:
                raise launched.error
            return launched
        ticket = self._new_ticket(lane)
        self._queues[lane].put((ticket, own_waits, work))
        return ticket

    def _new_ticket(self, lane: Lane) -> _Ticket:
        if lane in (Lane.HOST, *DISK_LANES):
            return _HostTicket(self)
        return _DeviceTicket(self)

    def _require(self, lane: Lane, waits: Sequence[_Ticket]) -> None:
        """Waits until the ops of `waits` are issued. Raises the error of any of them, or of an
        earlier op of this lane.

        An op also fails after an earlier op of its lane has failed, so that no update follows a
        failed clip. Lanes that do not depend on the failed op continue, so that the step before is
        still applied.
        """
        if lane in self._broken:
            raise self._broken[lane]
        for wait in waits:
            wait.require()

    def _launch(
        self, lane: Lane, ticket: _DeviceTicket, waits: Sequence[_Ticket], work: Callable[[], None]
    ) -> None:
        """Issues an op on the stream of its lane, behind the end events of its waits."""
        stream = self._streams[lane]
        try:
            self._require(lane, waits)
            for wait in waits:
                if isinstance(wait, _DeviceTicket):
                    if lane in UPDATE_LANES:
                        # An op of these lanes is issued only once it can run. Otherwise copies of
                        # states would be queued in a copy engine ahead of a prefetch.
                        wait.end.synchronize()
                    stream.wait_event(wait.end)
            with torch.cuda.stream(stream):
                ticket.start.record(stream)
                work()
                ticket.end.record(stream)
        except BaseException as error:  # noqa: BLE001  kept for whoever waits for this op
            self._fail(lane, ticket, error)
        # Only now may other ops wait for the end event: it is recorded, or the error is set.
        ticket.issued.set()

    def _run_on_host(
        self, lane: Lane, ticket: _HostTicket, waits: Sequence[_Ticket], work: Callable[[], None]
    ) -> None:
        """Runs an op on its lane's thread, once the ops that it waits for have finished."""
        try:
            self._require(lane, waits)
            for wait in waits:
                if isinstance(wait, _DeviceTicket):
                    # The planes must have arrived before the host reads them.
                    self._synchronize(wait)
            ticket.run(work)
        except BaseException as error:  # noqa: BLE001  kept for whoever waits for this op
            self._fail(lane, ticket, error)
        ticket.issued.set()

    def _fail(self, lane: Lane, ticket: _Ticket, error: BaseException) -> None:
        """Stores the error for the ops that wait for this one, for the lane, and for the next
        `submit`.
        """
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
        """Runs the ops of a lane in the lane's own thread, until the backend is closed."""
        torch.cuda.set_device(self.device)  # CUDA's current device is set per thread
        while True:
            item = self._queues[lane].get()
            if item is None:
                return
            ticket, waits, work = item
            if isinstance(ticket, _HostTicket):
                self._run_on_host(lane, ticket, waits, work)
            else:
                self._launch(lane, cast("_DeviceTicket", ticket), waits, work)
            # The closure holds the tensors of a step. Release them now, because the wait for the
            # next item may be long.
            del item, ticket, waits, work

    def copy_in_chunks(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Writes `source` [numel] to `target` [numel] on the current stream, a part at a time.

        A copy engine serves one stream until that stream has no more copies queued. A weight that
        is needed now would wait for all the gigabytes of states that are issued, so the queue of
        the stream must run empty between two parts.
        """
        size = PART_BYTES // target.element_size()
        for start in range(0, target.numel(), size):
            target[start : start + size].copy_(source[start : start + size], non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(self.device))
            done.synchronize()

    def recorder(self) -> CudaRecorder:
        return CudaRecorder(self.device)

    def finish_step(self, callback: Callable[[], None]) -> None:
        def finish() -> None:
            callback()
            # The spans of this step use the old anchor; those of the next step use the new one.
            self.anchor = self._next_anchor

        self._queues[Lane.HOST].put((_HostTicket(self), (), finish))

    def drain(self) -> None:
        marks = []
        for lane in self._queues:
            mark = self._new_ticket(lane)
            self._queues[lane].put((mark, (), lambda: None))
            marks.append(mark)
        # First wait until the threads have issued every op, then until the device has finished.
        for mark in marks:
            mark.issued.wait()
        torch.cuda.synchronize(self.device)
        error = self._error
        self._error = None
        self._broken.clear()
        if error is not None:
            raise error

    # ------------------------------------------------------------------ clocks

    def _set_anchor(self) -> None:
        """Sets the anchor that relates the device's clock to the host's: an event, and the host's
        time when it passed.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[Lane.COMPUTE])
        event.synchronize()
        self.anchor = self._next_anchor = (event, time.perf_counter())

    def _synchronize(self, ticket: _DeviceTicket) -> None:
        """Blocks the host thread until an op of a stream has finished, and makes its end the next
        anchor.

        The two clocks drift, so each such end is used to relate them again. Elapsed times are
        single-precision milliseconds, so only an anchor close to the measured step gives a
        resolution of microseconds.
        """
        waited = not ticket.end.query()
        ticket.end.synchronize()
        # If the end had already passed, its host time was not observed, and its span gives the best
        # estimate.
        self._next_anchor = (ticket.end, time.perf_counter() if waited else ticket.span()[1])

    # ------------------------------------------------------------------ memory

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Returns the array as a tensor of the same shape. The pinned source may be freed at once,
        because torch does not reuse its memory before the copy has finished.
        """
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_device(self.device)  # it is set per thread
        # On the default stream, the copy would wait for all that COMPUTE has launched.
        with torch.cuda.stream(self._downloads):
            return tensor.cpu()

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a zeroed pinned tensor [numel]."""
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def register(self, pointer: int, nbytes: int) -> bool:
        # WSL2 and containers refuse it beyond a limit. A copy with other memory is as correct: the
        # call returns only once the driver has taken the source, or has written the target.
        if int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0)) == 0:
            return True
        self._clear_error()
        return False

    def unregistered_rate(self) -> float:
        host = torch.zeros(_RATE_BYTES, dtype=torch.uint8)
        device = torch.zeros(_RATE_BYTES, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        device.copy_(host)
        host.copy_(device)
        torch.cuda.synchronize(self.device)
        return 2 * _RATE_BYTES / (time.perf_counter() - began)

    def unregister(self, pointer: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(pointer)

    def _clear_error(self) -> None:
        """Clears the error that a refused call has left. CUDA reports it again on the next call,
        whatever that is, so a dummy launch is made to receive it.
        """
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device).add_(1)

    def limit_memory(self, nbytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)
        self._limit = nbytes

    def free_memory(self) -> int:
        memory = self.memory()
        unused = memory["reserved"] - memory["allocated"]
        # The program around the engine may have lowered the limit, too.
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        limit = min(self._limit, round(share * memory["total"]))
        return max(0, unused + min(memory["free"], limit - memory["reserved"]))

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
        """Ends the threads of the lanes and releases cached device memory. Raises RamstreamError
        when a thread does not end within a minute.
        """
        for lane in self._queues:
            self._queues[lane].put(None)
        for thread in self._threads:
            thread.join(timeout=60)
            if thread.is_alive():
                raise RamstreamError("A transfer did not end within a minute; the GPU may be gone.")
        torch.cuda.empty_cache()

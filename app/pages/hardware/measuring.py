"""A job measures this machine in about ten seconds on request; plans use the stored rates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from app.session.jobs import Job
from engine.errors import FitError
from engine.machine.rates import ONE_THREAD, store_rates
from engine.text import counted

PROBE_SECONDS = 0.25
"""Seconds for which each rate is measured. On a CPU there are about two dozen measurements, with
all threads and with one; together they take about ten seconds.
"""
PARTS = ("the bus", "the device", "RAM and AdamW")
"""Parts that `engine.runtime.measure.machine_rates.measure` reports as it goes."""


class _Asking:
    """A backend that calls `go_on` before each measurement.

    An exception from `go_on` ends the measurement at once.
    """

    def __init__(self, backend: Any, go_on: Callable[[], None]):
        self._backend, self._go_on = backend, go_on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, op: Any, waits: Sequence[Any], work: Callable[[], None]) -> Any:
        self._go_on()
        return self._backend.submit(op, waits, work)


def probe(job: Job, go_on: Callable[[], None]) -> str:
    """Measures and stores the rates of this machine, and returns a sentence on the result.

    `job` gets the current part and its progress. `go_on` is called often, and raises an exception
    to end the measurement. Raises RamstreamError if there is not enough memory.
    """
    job.report("Opening the device")
    job.progress(0, len(PARTS) + 1)
    # This is imported here, since torch takes seconds to load and the page must not wait for it.
    from torch import OutOfMemoryError

    from engine.runtime.device.open_backend import open_backend
    from engine.runtime.measure.machine_rates import measure, one_thread_rates

    def report(part: str) -> None:
        go_on()
        job.report(f"Measuring {part}")
        job.progress(PARTS.index(part) + 1, len(PARTS) + 1)

    backend = open_backend("auto")
    try:
        asking = _Asking(backend, go_on)
        found = measure(asking, PROBE_SECONDS, report, for_plans=True)
        store_rates(backend.device_name, found.rates())
        if backend.device.type == "cpu":
            job.report("Measuring one thread")
            store_rates(ONE_THREAD, one_thread_rates(asking, PROBE_SECONDS))
    except OutOfMemoryError:
        raise FitError(
            "The GPU has no room for the measurement: other programs hold its memory. End them and "
            "measure again."
        ) from None
    finally:
        gc.collect()  # a reference cycle of an error may still hold buffers
        backend.reset_peak()
        backend.close()
    threads, copy = max(found.host_copy.items())
    return (
        f"Measured: RAM moves {copy / 1e9:,.3g} GB/s with {counted(threads, 'thread')}. Times are "
        "predicted from the speeds above."
    )

"""The ceilings of this machine are the highest rates that it reaches. The bus, the device, host
memory and AdamW are each measured alone and together with the work that runs at the same time in a
step. All work is submitted to the lanes of a backend, as in a step, and is timed there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.config.optimizers import (
    ADAMW,
    MEASURED_SIDE,
    OPTIMIZERS,
    Optimizer,
    OptimizerSettings,
)
from engine.machine.rates import OTHERS, PACKED_BYTES, PACKED_WIDTH, Rates
from engine.model.build.attention import attention
from engine.model.build.attention_documents import Documents, Pattern
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.planning.schedule.ops import Lane
from engine.runtime.device.backend import Backend, Ticket
from engine.runtime.host.host_optimizer import HostOptimizer, HostStep
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.measure.launch_overhead import eager_rates
from engine.runtime.measure.links import link_rate
from engine.runtime.optimizer.host_kernels import kernel
from engine.runtime.optimizer.host_threads import Workers, default_threads, ranges

PARAMETERS = {"cuda": 1 << 27, "cpu": 1 << 22}
"""Number of parameters of the planes that are copied and updated: far more than fit in any
cache.
"""
PRODUCT = {"cuda": (16384, 4096, 16384), "cpu": (256, 1024, 1024)}
"""The matrix product has these rows, inner width and columns."""
ATTENTION = {"cuda": (8, 32, 4096, 128), "cpu": (1, 4, 256, 64)}
"""The attention has these rows, heads, tokens and width of a head."""
UNIT, WIDTH = "bench", 1024
CALLS = 64
"""The time of a small operation is the mean over this many in a row."""
COPIED_BYTES = 2
"""Bytes that a parameter that is copied takes: it is bf16."""


_NOT_EVERYWHERE = ("overhead", "call", "link")
"""Rates that are 0 where there is nothing to measure: on the CPU, or with a single GPU."""


@dataclass(frozen=True)
class PeakRates:
    """The fields are the highest rates of a machine in bytes, FLOPs or parameters a second. Copies
    on the host and in the device's memory count both bytes read and bytes written.
    """

    h2d: float
    d2h: float
    h2d_with_d2h: float
    d2h_with_h2d: float
    matmul: float
    device_memory: float
    attention_forward: float
    attention_backward: float
    host_copy: dict[int, float]
    """The key is the number of threads, the value is the bytes that they copy a second."""
    adamw: dict[int, float]
    """The key is the number of threads, the value is the parameters that they update a second."""
    adamw_with_copies: float
    """Parameters a second that AdamW updates, with as many threads as in a run, while copies run in
    both directions.
    """
    h2d_with_all: float
    """Bytes a second of copies to the device while copies back and AdamW also run."""
    d2h_with_all: float
    """Bytes a second of copies to the host while copies to the device and AdamW also run."""
    other_optimizers: dict[Optimizer, float]
    """The key is another optimizer, the value is the parameters that it updates a second, with as
    many threads as in a run.
    """
    sweep: float | None
    """A pass with the memory traffic of AdamW and almost no arithmetic, on the same threads, covers
    this many parameters a second. It is None if it was not requested.
    """
    passes: float
    """The operations between matrix products move this many bytes a second. On a GPU this is the
    bandwidth of its memory.
    """
    overhead: float
    """The time has the meaning of `engine.machine.rates.Rates.overhead`, in seconds."""
    call: float
    """The time has the meaning of `engine.machine.rates.Rates.call`, in seconds."""
    packed_attention: float
    """The rate has the meaning of `engine.machine.rates.Rates.packed_attention`, in FLOPs a
    second.
    """
    link: float
    """The rate has the meaning of `engine.machine.rates.Rates.link`, in bytes a second."""

    def rates(self) -> Rates:
        """Returns the rates that the engine can rely on while copies, compute and AdamW run at
        once.
        """
        return Rates(
            h2d=self.h2d_with_d2h,
            d2h=self.d2h_with_h2d,
            matmul=self.matmul,
            attention=_both(self.attention_forward, self.attention_backward),
            device_memory=self.passes,
            adamw=max(self.adamw.values()),
            adamw_busy=self.adamw_with_copies,
            h2d_busy=self.h2d_with_all,
            d2h_busy=self.d2h_with_all,
            packed_attention=self.packed_attention,
            overhead=self.overhead,
            call=self.call,
            others=tuple(self.other_optimizers.items()),
            link=self.link,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the rates as plain data, with None for those that were not measured."""
        return asdict(self) | {name: getattr(self, name) or None for name in _NOT_EVERYWHERE}


def measure(
    backend: Backend, seconds: float, say: Callable[[str], None], for_plans: bool = False
) -> PeakRates:
    """Returns the ceilings. Each figure is measured for about `seconds`, and the matrix product
    three times as long, since clock rates fall under sustained load.

    With `for_plans` it measures only the rates that planning uses: neither the host's figures with
    fewer threads, nor the sweep, nor the link between GPUs. Raises FitError where there is not
    enough memory.
    """
    device = backend.device
    numel = PARAMETERS[device.type]
    meter = _Meter(backend, seconds)
    with _planes(backend, numel) as states, torch.no_grad():
        weight, grad = states.tensor(UNIT, "weight_high"), states.tensor(UNIT, "grad")
        slot, staging = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
        to_device = _Work(lambda: slot.copy_(weight, non_blocking=True), COPIED_BYTES * numel)
        to_host = _Work(lambda: grad.copy_(staging, non_blocking=True), COPIED_BYTES * numel)
        say("the bus")
        h2d = meter.rate(Lane.H2D, to_device)
        d2h = meter.rate(Lane.D2H, to_host)
        both = meter.rates({Lane.H2D: to_device, Lane.D2H: to_host})
        say("the device")
        within = _Work(lambda: staging.copy_(slot), 2 * COPIED_BYTES * numel)
        moved = meter.rate(Lane.COMPUTE, within)
        product = _matmul(_Meter(backend, 3 * seconds))
        forward, backward = _attention(meter)
        overhead, passes, packed = 0.0, moved, _both(forward, backward)
        if device.type == "cpu":
            overhead, passes = eager_rates(seconds, product, packed)
        else:
            packed = _packed_attention(meter, moved)
        say("RAM and AdamW")
        most = default_threads()
        fewer = {n for n in (1, 2, 4, 8, 16, 32) if not for_plans and n < most}
        threads = sorted(fewer | {most})
        host_copies = {n: _host_copy(meter, states, n) for n in threads}
        adamw = {n: _updates(meter, states, n) for n in threads}
        copies = {Lane.H2D: to_device, Lane.D2H: to_host}
        busy = _all_at_once(meter, states, adamw[most], copies, both)
        call = 0.0 if device.type == "cpu" else _call_seconds(meter, states, adamw[most])
        sweep = None if for_plans else _sweep(meter, states, most)
    others: dict[Optimizer, float] = {}
    for optimizer in OTHERS:
        with _planes(backend, numel, optimizer) as states:
            others[optimizer] = _updates(meter, states, most)
    return PeakRates(
        h2d=h2d,
        d2h=d2h,
        h2d_with_d2h=both[Lane.H2D],
        d2h_with_h2d=both[Lane.D2H],
        matmul=product,
        device_memory=moved,
        attention_forward=forward,
        attention_backward=backward,
        host_copy=host_copies,
        adamw=adamw,
        adamw_with_copies=busy[Lane.HOST],
        other_optimizers=others,
        h2d_with_all=busy[Lane.H2D],
        d2h_with_all=busy[Lane.D2H],
        sweep=sweep,
        passes=passes,
        overhead=overhead,
        call=call,
        packed_attention=packed,
        link=0.0 if for_plans or device.type == "cpu" else link_rate(),
    )


def _both(forward: float, backward: float) -> float:
    """Returns the FLOPs a second of attention over a forward and a backward together. A backward
    has two and a half times the FLOPs of a forward.
    """
    return 3.5 / (1 / forward + 2.5 / backward)


@contextmanager
def _planes(backend: Backend, numel: int, optimizer: Optimizer = ADAMW) -> Iterator[HostStates]:
    """Opens host states with one unit of `numel` parameters, a matrix like those of blocks."""
    shape = (numel // WIDTH, WIDTH)
    if OPTIMIZERS[optimizer].orthogonalizes:
        shape = (MEASURED_SIDE, MEASURED_SIDE)
    layout = lay_out(UNIT, [ParameterSpec("weight", "weight", shape, True)])
    on_device = backend.device.type != "cpu"
    states = HostStates(
        [layout],
        "bfloat16",
        backend.register if on_device else None,
        backend.unregister if on_device else None,
    )
    states.allocate_weights()
    states.allocate_states(optimizer=optimizer)
    try:
        yield states
    finally:
        backend.drain()  # the planes must not be freed during a copy
        states.close()


# ---------------------------------------------------------------- timing


@dataclass(frozen=True)
class _Work:
    """A function to time. Each call of `run` does `amount` units of work: bytes, FLOPs
    or parameters.
    """

    run: Callable[[], Any]
    amount: float


@dataclass(frozen=True)
class _Calls:
    """A function, `run`, and the number of times to call it."""

    run: Callable[[], Any]
    count: int


@dataclass(frozen=True)
class _Meter:
    """A meter times work on the lanes of a backend. Each measurement takes about `seconds`."""

    backend: Backend
    seconds: float

    def rate(self, lane: Lane, work: _Work) -> float:
        """Returns the units of work a second on one lane alone."""
        return self.rates({lane: work})[lane]

    def rates(self, lanes: Mapping[Lane, _Work]) -> dict[Lane, float]:
        """Returns the units of work a second on each lane while all lanes run at once."""
        single = {lane: _Calls(work.run, 1) for lane, work in lanes.items()}
        self.timed(single)  # warms up
        once = self.timed(single)
        calls: dict[Lane, _Calls] = {}
        for lane, work in lanes.items():
            wanted = round(self.seconds / max(1e-6, once[lane]))
            calls[lane] = _Calls(work.run, max(2, min(10_000, wanted)))
        took = self.timed(calls)
        return {lane: calls[lane].count * work.amount / took[lane] for lane, work in lanes.items()}

    def timed(self, lanes: Mapping[Lane, _Calls]) -> dict[Lane, float]:
        """Returns the seconds of work on each lane. Calls of the lanes are submitted in turn."""
        tickets: dict[Lane, list[Ticket]] = {lane: [] for lane in lanes}
        for turn in range(max(calls.count for calls in lanes.values())):
            for lane, calls in lanes.items():
                if turn < calls.count:
                    tickets[lane].append(self.backend.submit(lane, (), calls.run))
        self.backend.drain()
        took: dict[Lane, float] = {}
        for lane, own in tickets.items():
            spans = [ticket.span() for ticket in own]
            took[lane] = sum(end - start for start, end in spans)
        return took


# ---------------------------------------------------------------- the device


def _matmul(meter: _Meter) -> float:
    device = meter.backend.device
    rows, inner, columns = PRODUCT[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    flops = 2.0 * rows * inner * columns
    return meter.rate(Lane.COMPUTE, _Work(lambda: torch.matmul(left, right, out=out), flops))


_plain_attention = functools.partial(scaled_dot_product_attention, is_causal=True)


def _attention(
    meter: _Meter, attend: Callable[..., torch.Tensor] = _plain_attention
) -> tuple[float, float]:
    """Returns FLOPs a second of causal attention, forward and backward. A pair of tokens has 4 and
    10 FLOPs for each feature, and causal attention has half of the pairs.
    """
    device = meter.backend.device
    rows, heads, tokens, width = ATTENTION[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(rows, heads, tokens, width, device=device).to(dtype).requires_grad_()
        for _ in range(3)
    )
    pairs = rows * heads * tokens * tokens * width / 2
    with torch.no_grad():
        forward = meter.rate(Lane.COMPUTE, _Work(lambda: attend(query, key, value), 4 * pairs))
    with torch.enable_grad():
        out = attend(query, key, value)
    ones = torch.ones_like(out)

    def run_backward() -> None:
        torch.autograd.grad(out, (query, key, value), ones, retain_graph=True)

    return forward, meter.rate(Lane.COMPUTE, _Work(run_backward, 10 * pairs))


def _packed_attention(meter: _Meter, memory: float) -> float:
    """Returns the FLOPs a second of the products in the variable-length kernel alone. The extra
    time that `engine.planning.fit.cost_model` adds to the products is subtracted from the measured
    time. `memory` is the bandwidth of the device's memory in bytes a second.
    """
    rows, heads, tokens, width = ATTENTION[meter.backend.device.type]
    pattern = Pattern(Documents.whole_rows(rows, tokens, meter.backend.upload))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(torch.nn.Identity(), query, key, value, pattern)[0].transpose(1, 2)

    flops = 7.0 * rows * heads * tokens * tokens * width
    took = flops / _both(*_attention(meter, attend))
    besides = PACKED_BYTES * rows * tokens * heads * (width + PACKED_WIDTH) / memory
    return flops / max(took - besides, 0.2 * took)


# ---------------------------------------------------------------- the host


def _host_copy(meter: _Meter, states: HostStates, threads: int) -> float:
    """Returns bytes a second, read and written, of copies between two fp32 planes."""
    source, target = states.array(UNIT, "exp_avg"), states.array(UNIT, "exp_avg_sq")

    def copy(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    with closing(Workers(threads, "copy")) as workers:
        work = _Work(lambda: workers.run(copy, ranges(0, source.size)), 8.0 * source.size)
        return meter.rate(Lane.HOST, work)


def _updates(meter: _Meter, states: HostStates, threads: int) -> float:
    """Returns the parameters a second that the optimizer of the states updates on the host."""
    with closing(host_optimizer(states, OptimizerSettings(), threads)) as optimizer:
        return meter.rate(Lane.HOST, _Work(_update_with(optimizer), states.layouts[UNIT].numel))


def _update_with(optimizer: HostOptimizer) -> Callable[[], None]:
    return lambda: optimizer.update(UNIT, HostStep(1, 1e-5))


def _sweep(meter: _Meter, states: HostStates, threads: int) -> float:
    """Returns the parameters a second of a pass over the planes that AdamW reads and writes. The
    planes are divided among the threads as for AdamW.
    """
    names = ("grad", "weight_high", "weight_low", "exp_avg", "exp_avg_sq")
    planes = tuple(states.array(UNIT, name) for name in names)
    touch, numel = kernel("touch"), states.layouts[UNIT].numel
    with closing(Workers(threads, "sweep")) as workers:
        return meter.rate(Lane.HOST, _Work(lambda: workers.share(touch, numel, planes), numel))


# ---------------------------------------------------------------- both at once


def _updates_for(meter: _Meter, states: HostStates, alone: float) -> int:
    """Returns the number of updates that take as long as one measurement of the meter, if AdamW
    updates `alone` parameters a second.
    """
    return max(2, round(meter.seconds * alone / states.layouts[UNIT].numel))


def _call_seconds(meter: _Meter, states: HostStates, alone: float) -> float:
    """Returns the seconds that launching one small operation takes while AdamW runs on its threads.
    When nothing else runs, AdamW updates `alone` parameters a second.
    """
    small = torch.zeros(1024, device=meter.backend.device)

    def launch() -> None:
        for _ in range(CALLS):
            small.add_(1.0)

    with closing(host_optimizer(states, OptimizerSettings())) as optimizer:
        launch()
        once = meter.timed({Lane.COMPUTE: _Calls(launch, 8)})[Lane.COMPUTE] / 8
        count = max(8, round(meter.seconds / 4 / once))
        # The updates must last longer than the launches, however much they slow the launches down.
        updates = _Calls(_update_with(optimizer), _updates_for(meter, states, alone))
        took = meter.timed({Lane.HOST: updates, Lane.COMPUTE: _Calls(launch, count)})
    return took[Lane.COMPUTE] / (count * CALLS)


def _all_at_once(
    meter: _Meter,
    states: HostStates,
    alone: float,
    copies: Mapping[Lane, _Work],
    without: Mapping[Lane, float],
) -> dict[Lane, float]:
    """Returns the rates of AdamW and of the copies in both directions while all three run. When
    nothing else runs, AdamW updates `alone` parameters a second. Without AdamW, the copies reach
    `without` bytes a second.
    """
    calls = {}
    for lane, work in copies.items():
        # These copies must last longer than the updates. Copies and updates each keep somewhat more
        # than half of their speed.
        calls[lane] = _Calls(
            work.run, max(2, round(2 * meter.seconds * without[lane] / work.amount))
        )
    count = _updates_for(meter, states, alone)
    with closing(host_optimizer(states, OptimizerSettings())) as optimizer:
        took = meter.timed({Lane.HOST: _Calls(_update_with(optimizer), count)} | calls)
    updating = took[Lane.HOST]
    found = {Lane.HOST: count * states.layouts[UNIT].numel / updating}
    for lane, work in copies.items():
        copied = calls[lane].count * work.amount
        # Once the updates had ended, the copies continued at the rate without AdamW.
        after = max(0.0, took[lane] - updating)
        beside = copied - without[lane] * after
        if after and 0 < beside < without[lane] * updating:
            found[lane] = beside / updating
        else:
            # The copies ended first, or the timers are too coarse to show it: use the whole time.
            found[lane] = copied / took[lane]
    return found


# ---------------------------------------------------------------------- one thread

# The CPU is measured here with one thread, which small models compute with.


def one_thread_rates(backend: Backend, seconds: float) -> Rates:
    """Returns the measured rates of the CPU with torch limited to one thread. Copies and AdamW keep
    their own threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(backend, seconds, lambda _what: None, for_plans=True).rates()
    finally:
        torch.set_num_threads(threads)

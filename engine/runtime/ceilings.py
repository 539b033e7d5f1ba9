"""The ceilings of this machine are what it does at most. The bus, the device, host memory and AdamW
are each measured alone and with what runs beside them in a step. All work goes through the lanes of
a backend, as that of a step does, and is timed there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.machine.rates import PACKED_BYTES, PACKED_WIDTH, Rates
from engine.model.attention import attention
from engine.model.attention_documents import Documents, Pattern
from engine.model.layout import ParameterSpec, lay_out
from engine.plan.ops import Lane
from engine.runtime.backend import Backend, Ticket
from engine.runtime.eager_overhead import eager_rates
from engine.runtime.host_adamw import AdamWSettings, HostAdamW
from engine.runtime.host_kernels import kernel
from engine.runtime.host_store import HostStore
from engine.runtime.host_threads import Workers, default_threads, ranges

PARAMETERS = {"cuda": 1 << 27, "cpu": 1 << 22}
"""The planes that are copied and updated have this many: far more than any cache holds."""
PRODUCT = {"cuda": (16384, 4096, 16384), "cpu": (256, 1024, 1024)}
"""The matrix product has these rows, inner width and columns."""
ATTENTION = {"cuda": (8, 32, 4096, 128), "cpu": (1, 4, 256, 64)}
"""The attention has these rows, heads, tokens and width of a head."""
UNIT = "bench"
CALLS = 64
"""This many small operations are timed together."""
COPIED_BYTES = 2
"""A parameter that is copied takes this many bytes: it is bf16."""


@dataclass(frozen=True)
class Ceilings:
    """A machine does at most this many bytes, FLOPs or parameters a second. Copies on the host and
    in the device's memory count bytes read and written.
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
    """The key is the number of threads."""
    adamw: dict[int, float]
    """The key is the number of threads."""
    adamw_with_copies: float
    """AdamW has as many threads as in a run, while the bus is busy both ways."""
    h2d_with_all: float
    """The bus is busy both ways while AdamW runs."""
    d2h_with_all: float
    """The bus is busy both ways while AdamW runs."""
    sweep: float | None
    """The traffic of AdamW in place, with next to no arithmetic and as many threads, comes to this
    many parameters a second; None if it was not asked for.
    """
    passes: float
    """What is computed between matrix products comes to this many bytes a second. On a GPU these
    are the bytes of its memory.
    """
    overhead: float
    """`engine.machine.rates.Rates.overhead` tells what this is."""
    call: float
    """`engine.machine.rates.Rates.call` tells what this is."""
    packed_attention: float
    """`engine.machine.rates.Rates.packed_attention` tells what this is."""

    def rates(self) -> Rates:
        """Returns the rates that the engine can count on while everything runs at once."""
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
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    backend: Backend, seconds: float, say: Callable[[str], None], for_plans: bool = False
) -> Ceilings:
    """Returns the ceilings. Each figure is measured for about `seconds`, and the matrix product
    three times as long, since clocks fall under a lasting load.

    With `for_plans` it measures only what plans are made with: neither the host's figures with
    fewer threads nor the sweep. Raises FitError where the memory is not there.
    """
    device = backend.device
    numel = PARAMETERS[device.type]
    meter = _Meter(backend, seconds)
    with _planes(backend, numel) as store, torch.no_grad():
        weight, grad = store.tensor(UNIT, "weight_high"), store.tensor(UNIT, "grad")
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
        say("host memory and AdamW")
        most = default_threads()
        fewer = {n for n in (1, 2, 4, 8, 16, 32) if not for_plans and n < most}
        threads = sorted(fewer | {most})
        host_copies = {n: _host_copy(meter, store, n) for n in threads}
        adamw = {n: _adamw(meter, store, n) for n in threads}
        copies = {Lane.H2D: to_device, Lane.D2H: to_host}
        busy = _all_at_once(meter, store, adamw[most], copies, both)
        call = 0.0 if device.type == "cpu" else _call_seconds(meter, store, adamw[most])
        sweep = None if for_plans else _sweep(meter, store, most)
    return Ceilings(
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
        h2d_with_all=busy[Lane.H2D],
        d2h_with_all=busy[Lane.D2H],
        sweep=sweep,
        passes=passes,
        overhead=overhead,
        call=call,
        packed_attention=packed,
    )


def one_thread_rates(backend: Backend, seconds: float) -> Rates:
    """Measures the CPU with one thread for tensors. Copies and AdamW have threads of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(backend, seconds, lambda _what: None, for_plans=True).rates()
    finally:
        torch.set_num_threads(threads)


def _both(forward: float, backward: float) -> float:
    """Returns the FLOPs a second of attention in a forward and a backward together. A backward has
    two and a half times the FLOPs of a forward.
    """
    return 3.5 / (1 / forward + 2.5 / backward)


@contextmanager
def _planes(backend: Backend, numel: int) -> Iterator[HostStore]:
    """Opens a store with one unit of `numel` parameters."""
    layout = lay_out(UNIT, [ParameterSpec("weight", "weight", (numel,), True)])
    on_device = backend.device.type != "cpu"
    store = HostStore(
        [layout],
        "bfloat16",
        backend.register if on_device else None,
        backend.unregister if on_device else None,
    )
    store.allocate_weights()
    store.allocate_states()
    try:
        yield store
    finally:
        backend.drain()  # the planes must not go while a copy is under way
        store.close()


# ---------------------------------------------------------------- timing


@dataclass(frozen=True)
class _Work:
    """Each call of `run` does `amount` units of work: bytes, FLOPs or parameters."""

    run: Callable[[], Any]
    amount: float


@dataclass(frozen=True)
class _Calls:
    """`run` is called `count` times."""

    run: Callable[[], Any]
    count: int


@dataclass(frozen=True)
class _Meter:
    """A meter times work on the lanes of a backend, for about `seconds` each."""

    backend: Backend
    seconds: float

    def rate(self, lane: Lane, work: _Work) -> float:
        """Returns the units of work a second on one lane alone."""
        return self.rates({lane: work})[lane]

    def rates(self, lanes: Mapping[Lane, _Work]) -> dict[Lane, float]:
        """Returns the units of work a second on each lane, all lanes at once."""
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
    """Returns the FLOPs a second of the products alone. What comes on top of them by
    `engine.fit.cost` is taken off; `memory` is the bytes a second of the device's memory.
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


def _host_copy(meter: _Meter, store: HostStore, threads: int) -> float:
    """Returns bytes a second, read and written, of copies between two fp32 planes."""
    source, target = store.array(UNIT, "exp_avg"), store.array(UNIT, "exp_avg_sq")

    def copy(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    with closing(Workers(threads, "copy")) as workers:
        work = _Work(lambda: workers.run(copy, ranges(0, source.size)), 8.0 * source.size)
        return meter.rate(Lane.HOST, work)


def _adamw(meter: _Meter, store: HostStore, threads: int) -> float:
    """Returns the parameters a second that AdamW updates on the host."""
    with closing(HostAdamW(store, AdamWSettings(), threads)) as adamw:
        return meter.rate(Lane.HOST, _Work(_update_with(adamw), store.layouts[UNIT].numel))


def _update_with(adamw: HostAdamW) -> Callable[[], None]:
    return lambda: adamw.update(UNIT, 1, 1e-5, 1.0)


def _sweep(meter: _Meter, store: HostStore, threads: int) -> float:
    """Returns the parameters a second of a pass over the planes that AdamW reads and writes. Its
    threads share the planes as those of AdamW do.
    """
    names = ("grad", "weight_high", "weight_low", "exp_avg", "exp_avg_sq")
    planes = tuple(store.array(UNIT, name) for name in names)
    touch, numel = kernel("touch"), store.layouts[UNIT].numel
    with closing(Workers(threads, "sweep")) as workers:
        return meter.rate(Lane.HOST, _Work(lambda: workers.share(touch, numel, planes), numel))


# ---------------------------------------------------------------- both at once


def _updates_for(meter: _Meter, store: HostStore, alone: float) -> int:
    """Returns how many updates last as long as the meter measures, where AdamW updates `alone`
    parameters a second.
    """
    return max(2, round(meter.seconds * alone / store.layouts[UNIT].numel))


def _call_seconds(meter: _Meter, store: HostStore, alone: float) -> float:
    """Returns the seconds of launching one small operation while AdamW has its cores. AdamW updates
    `alone` parameters a second by itself.
    """
    small = torch.zeros(1024, device=meter.backend.device)

    def launch() -> None:
        for _ in range(CALLS):
            small.add_(1.0)

    with closing(HostAdamW(store, AdamWSettings())) as adamw:
        launch()
        once = meter.timed({Lane.COMPUTE: _Calls(launch, 8)})[Lane.COMPUTE] / 8
        count = max(8, round(meter.seconds / 4 / once))
        # The updates go on longer than the launches, however much these are held up.
        updates = _Calls(_update_with(adamw), _updates_for(meter, store, alone))
        took = meter.timed({Lane.HOST: updates, Lane.COMPUTE: _Calls(launch, count)})
    return took[Lane.COMPUTE] / (count * CALLS)


def _all_at_once(
    meter: _Meter,
    store: HostStore,
    alone: float,
    copies: Mapping[Lane, _Work],
    without: Mapping[Lane, float],
) -> dict[Lane, float]:
    """Returns the rates of AdamW and of copies both ways while all three run. AdamW updates `alone`
    parameters a second by itself; the copies come to `without` bytes a second without it.
    """
    calls = {}
    for lane, work in copies.items():
        # Copies that last longer than the updates: some more than half of their speed is left to
        # both.
        calls[lane] = _Calls(
            work.run, max(2, round(2 * meter.seconds * without[lane] / work.amount))
        )
    count = _updates_for(meter, store, alone)
    with closing(HostAdamW(store, AdamWSettings())) as adamw:
        took = meter.timed({Lane.HOST: _Calls(_update_with(adamw), count)} | calls)
    updating = took[Lane.HOST]
    found = {Lane.HOST: count * store.layouts[UNIT].numel / updating}
    for lane, work in copies.items():
        copied = calls[lane].count * work.amount
        # After the updates, the copies went on at their speed without them.
        after = max(0.0, took[lane] - updating)
        beside = copied - without[lane] * after
        if after and 0 < beside < without[lane] * updating:
            found[lane] = beside / updating
        else:
            # Copies were over first, or timers are too coarse to tell: the whole time counts.
            found[lane] = copied / took[lane]
    return found

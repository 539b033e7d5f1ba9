"""What this machine does at most: the bus, the device, host memory and AdamW, each measured alone
and with what runs beside it in a step. All work goes through the lanes of a backend, as that of a
step does, and is timed there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.machine.rates import PACKED_BYTES, PACKED_WIDTH, Rates
from engine.model.attention import Documents, Pattern, attention
from engine.model.layout import ParameterSpec, lay_out
from engine.plan.ops import Lane
from engine.runtime.backend import Backend
from engine.runtime.eager_overhead import eager_rates
from engine.runtime.host_adamw import AdamWSettings, HostAdamW
from engine.runtime.host_kernels import kernel
from engine.runtime.host_store import HostStore
from engine.runtime.host_threads import Workers, default_threads, ranges

PARAMETERS = {"cuda": 1 << 27, "cpu": 1 << 22}
"""Of the planes that are copied and updated: far more than any cache holds."""
PRODUCT = {"cuda": (16384, 4096, 16384), "cpu": (256, 1024, 1024)}
"""Rows, inner width and columns of the matrix product."""
ATTENTION = {"cuda": (8, 32, 4096, 128), "cpu": (1, 4, 256, 64)}
"""Rows, heads, tokens and width of a head."""
UNIT = "bench"
CALLS = 64
"""Small operations that are timed together."""


@dataclass(frozen=True)
class Ceilings:
    """Bytes, FLOPs or parameters a second. Copies on the host and in the device's memory count
    bytes read and written.
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
    """By number of threads."""
    adamw: dict[int, float]
    adamw_with_copies: float
    """With as many threads as a run has, while the bus is busy both ways."""
    h2d_with_all: float
    d2h_with_all: float
    """The bus both ways while that AdamW runs."""
    sweep: float | None
    """Parameters a second of the same traffic in place with next to no arithmetic, with as many
    threads; None if not asked for.
    """
    passes: float
    """Bytes a second of what is computed between matrix products: on a GPU those of its memory."""
    overhead: float
    call: float
    packed_attention: float
    """These three as in `Rates`."""

    def rates(self) -> Rates:
        """What the engine can count on while everything runs at once."""
        attention = _both(self.attention_forward, self.attention_backward)
        return Rates(
            self.h2d_with_d2h,
            self.d2h_with_h2d,
            self.matmul,
            attention,
            self.passes,
            max(self.adamw.values()),
            self.adamw_with_copies,
            self.h2d_with_all,
            self.d2h_with_all,
            self.packed_attention,
            self.overhead,
            self.call,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    backend: Backend, seconds: float, say: Callable[[str], None], for_plans: bool = False
) -> Ceilings:
    """Each figure takes about `seconds`, the matrix product three times as long: clocks fall under
    a lasting load. for_plans: only what plans are made with, neither the host's figures with fewer
    threads nor the sweep. Raises FitError where the memory is not there.
    """
    device = backend.device
    numel = PARAMETERS[device.type]
    with _planes(backend, numel) as store, torch.no_grad():
        weight, grad = store.tensor(UNIT, "weight_high"), store.tensor(UNIT, "grad")
        slot, staging = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))

        def h2d() -> None:
            slot.copy_(weight, non_blocking=True)

        def d2h() -> None:
            grad.copy_(staging, non_blocking=True)

        say("the bus")
        one_way = [
            _rates(backend, {lane: (work, 2 * numel)}, seconds)[lane]
            for lane, work in ((Lane.H2D, h2d), (Lane.D2H, d2h))
        ]
        both = _rates(backend, {Lane.H2D: (h2d, 2 * numel), Lane.D2H: (d2h, 2 * numel)}, seconds)
        say("the device")
        moved = _rates(backend, {Lane.COMPUTE: (lambda: staging.copy_(slot), 4 * numel)}, seconds)[
            Lane.COMPUTE
        ]
        product = _matmul(backend, 3 * seconds)
        forward, backward = _attention(backend, seconds)
        overhead, call, passes, packed = 0.0, 0.0, moved, _both(forward, backward)
        if device.type == "cpu":
            overhead, passes = eager_rates(seconds, product, packed)
        else:
            packed = _packed_attention(backend, seconds, moved)
        say("host memory and AdamW")
        fewer = {n for n in (1, 2, 4, 8, 16, 32) if not for_plans and n < default_threads()}
        threads = sorted(fewer | {default_threads()})
        copies = {n: _host_copy(backend, store, n, seconds) for n in threads}
        adamw = {n: _adamw(backend, store, n, seconds) for n in threads}
        busy = _all_at_once(
            backend,
            store,
            adamw[threads[-1]],
            seconds,
            {Lane.H2D: (h2d, both[Lane.H2D]), Lane.D2H: (d2h, both[Lane.D2H])},
        )
        if device.type != "cpu":
            call = _call_seconds(backend, store, adamw[threads[-1]], seconds)
        sweep = None if for_plans else _sweep(backend, store, threads[-1], seconds)
    return Ceilings(
        *one_way,
        both[Lane.H2D],
        both[Lane.D2H],
        product,
        moved,
        forward,
        backward,
        copies,
        adamw,
        busy[Lane.HOST],
        busy[Lane.H2D],
        busy[Lane.D2H],
        sweep,
        passes,
        overhead,
        call,
        packed,
    )


def one_thread_rates(backend: Backend, seconds: float) -> Rates:
    """Those of the CPU with one thread for tensors; copies and AdamW have their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(backend, seconds, lambda what: None, for_plans=True).rates()
    finally:
        torch.set_num_threads(threads)


def _both(forward: float, backward: float) -> float:
    """FLOPs a second of attention in one forward and one backward, of two and a half times as many."""
    return 3.5 / (1 / forward + 2.5 / backward)


@contextmanager
def _planes(backend: Backend, numel: int) -> Iterator[HostStore]:
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
        backend.drain()
        store.close()


def _rates(
    backend: Backend, lanes: dict[Lane, tuple[Callable[[], Any], float]], seconds: float
) -> dict[Lane, float]:
    """Units of work a second on each lane, all lanes at once; each has (work, units of work of one
    call).
    """
    once = _timed(backend, {lane: (work, 1) for lane, (work, _) in lanes.items()})  # also warms up
    once = _timed(backend, {lane: (work, 1) for lane, (work, _) in lanes.items()})
    calls = {lane: max(2, min(10_000, round(seconds / max(1e-6, once[lane])))) for lane in lanes}
    took = _timed(backend, {lane: (work, calls[lane]) for lane, (work, _) in lanes.items()})
    return {lane: calls[lane] * amount / took[lane] for lane, (_, amount) in lanes.items()}


def _timed(backend: Backend, lanes: dict[Lane, tuple[Callable[[], Any], int]]) -> dict[Lane, float]:
    """Seconds of work on each lane, for (work, calls). Calls of the lanes are submitted in turn."""
    tickets: dict[Lane, list] = {lane: [] for lane in lanes}
    for turn in range(max(calls for _, calls in lanes.values())):
        for lane, (work, calls) in lanes.items():
            if turn < calls:
                tickets[lane].append(backend.submit(lane, (), work))
    backend.drain()
    return {
        lane: sum(end - start for start, end in (ticket.span() for ticket in own))
        for lane, own in tickets.items()
    }


def _matmul(backend: Backend, seconds: float) -> float:
    rows, inner, columns = PRODUCT[backend.device.type]
    dtype = torch.bfloat16 if backend.device.type == "cuda" else torch.float32
    left = torch.randn(rows, inner, device=backend.device).to(dtype)
    right = torch.randn(inner, columns, device=backend.device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=backend.device)
    return _rates(
        backend,
        {Lane.COMPUTE: (lambda: torch.matmul(left, right, out=out), 2.0 * rows * inner * columns)},
        seconds,
    )[Lane.COMPUTE]


_plain_attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def _attention(
    backend: Backend, seconds: float, attend: Callable[..., torch.Tensor] = _plain_attention
) -> tuple[float, float]:
    """FLOPs a second of causal attention, forward and backward: 4 and 10 for each pair of tokens
    and feature, halved.
    """
    rows, heads, tokens, width = ATTENTION[backend.device.type]
    dtype = torch.bfloat16 if backend.device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(rows, heads, tokens, width, device=backend.device).to(dtype).requires_grad_()
        for _ in range(3)
    )
    pairs = rows * heads * tokens * tokens * width / 2
    with torch.no_grad():
        forward = _rates(
            backend, {Lane.COMPUTE: (lambda: attend(query, key, value), 4 * pairs)}, seconds
        )[Lane.COMPUTE]
    with torch.enable_grad():
        out = attend(query, key, value)
    ones = torch.ones_like(out)
    backward = _rates(
        backend,
        {
            Lane.COMPUTE: (
                lambda: torch.autograd.grad(out, (query, key, value), ones, retain_graph=True),
                10 * pairs,
            )
        },
        seconds,
    )[Lane.COMPUTE]
    return forward, backward


def _packed_attention(backend: Backend, seconds: float, memory: float) -> float:
    """FLOPs a second of the products alone: what comes on top by `engine.fit.cost` is taken off."""
    rows, heads, tokens, width = ATTENTION[backend.device.type]
    pattern = Pattern(Documents.whole_rows(rows, tokens, backend.upload))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(torch.nn.Identity(), query, key, value, pattern)[0].transpose(1, 2)

    flops = 7.0 * rows * heads * tokens * tokens * width
    took = flops / _both(*_attention(backend, seconds, attend))
    besides = PACKED_BYTES * rows * tokens * heads * (width + PACKED_WIDTH) / memory
    return flops / max(took - besides, 0.2 * took)


def _call_seconds(backend: Backend, store: HostStore, alone: float, seconds: float) -> float:
    """Of launching one small operation while AdamW, `alone` parameters a second, has its cores."""
    small = torch.zeros(1024, device=backend.device)
    numel = store.layouts[UNIT].numel

    def launch() -> None:
        for _ in range(CALLS):
            small.add_(1.0)

    adamw = HostAdamW(store, AdamWSettings())
    try:
        launch()
        once = _timed(backend, {Lane.COMPUTE: (launch, 8)})[Lane.COMPUTE] / 8
        count = max(8, round(seconds / 4 / once))
        # The updates go on longer than the launches, however much these are held up.
        took = _timed(
            backend,
            {
                Lane.HOST: (
                    lambda: adamw.update(UNIT, 1, 1e-5, 1.0),
                    max(2, round(seconds * alone / numel)),
                ),
                Lane.COMPUTE: (launch, count),
            },
        )
    finally:
        adamw.close()
    return took[Lane.COMPUTE] / (count * CALLS)


def _host_copy(backend: Backend, store: HostStore, threads: int, seconds: float) -> float:
    source, target = store.array(UNIT, "exp_avg"), store.array(UNIT, "exp_avg_sq")
    workers = Workers(threads, "copy")

    def copy(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    try:
        return _rates(
            backend,
            {Lane.HOST: (lambda: workers.run(copy, ranges(0, source.size)), 8.0 * source.size)},
            seconds,
        )[Lane.HOST]
    finally:
        workers.close()


def _adamw(backend: Backend, store: HostStore, threads: int, seconds: float) -> float:
    """Parameters a second."""
    adamw, numel = HostAdamW(store, AdamWSettings(), threads), store.layouts[UNIT].numel
    try:
        return _rates(
            backend, {Lane.HOST: (lambda: adamw.update(UNIT, 1, 1e-5, 1.0), numel)}, seconds
        )[Lane.HOST]
    finally:
        adamw.close()


def _all_at_once(
    backend: Backend,
    store: HostStore,
    alone: float,
    seconds: float,
    copies: dict[Lane, tuple[Callable[[], Any], float]],
) -> dict[str, float]:
    """AdamW, `alone` parameters a second by itself, beside copies of a plane both ways, of
    `copies[lane][1]` bytes a second without it: the rate of each while all three run.
    """
    adamw, numel = HostAdamW(store, AdamWSettings()), store.layouts[UNIT].numel
    calls = max(2, round(seconds * alone / numel))
    # Copies that last longer than the updates: some more than half of their speed is left to both.
    counts = {
        lane: max(2, round(2 * seconds * rate / (2 * numel))) for lane, (_, rate) in copies.items()
    }
    try:
        took = _timed(
            backend,
            {Lane.HOST: (lambda: adamw.update(UNIT, 1, 1e-5, 1.0), calls)}
            | {lane: (work, counts[lane]) for lane, (work, _) in copies.items()},
        )
    finally:
        adamw.close()
    found = {Lane.HOST: calls * numel / took[Lane.HOST]}
    for lane, (_, rate) in copies.items():
        after = max(0.0, took[lane] - took[Lane.HOST])
        beside = counts[lane] * 2 * numel - rate * after
        # Where copies were over first, or timers are too coarse to tell, the whole time counts.
        found[lane] = (
            beside / took[Lane.HOST]
            if after and 0 < beside < rate * took[Lane.HOST]
            else counts[lane] * 2 * numel / took[lane]
        )
    return found


def _sweep(backend: Backend, store: HostStore, threads: int, seconds: float) -> float:
    """Parameters a second of a pass over the planes that AdamW reads and writes, shared by threads
    as its own is.
    """
    names = ("grad", "weight_high", "weight_low", "exp_avg", "exp_avg_sq")
    planes = tuple(store.array(UNIT, name) for name in names)
    touch, workers, numel = kernel("touch"), Workers(threads, "sweep"), store.layouts[UNIT].numel
    try:
        return _rates(
            backend, {Lane.HOST: (lambda: workers.share(touch, numel, planes), numel)}, seconds
        )[Lane.HOST]
    finally:
        workers.close()

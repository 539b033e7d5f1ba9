"""The rates of this machine, which are measured once and stored next to the token cache. Plans and
predictions use them. No torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.machine.cgroups import usable_cores
from engine.machine.update_threads import threads_of
from engine.paths import cache_folder

CPU, ONE_THREAD = "CPU", "CPU, one thread"
"""Names under which the CPU's rates are stored; those of a GPU are under the name of the card."""


def rates_file() -> Path:
    """Returns the path of the file in which rates are stored."""
    return cache_folder() / "rates.json"


def stored_rates(device_name: str) -> Rates | None:
    """Returns the rates that were measured with this device and as many cores as there are now;
    None where there are none.
    """
    found = _read().get(_key(device_name))
    if found is None:
        return None
    try:
        rates = Rates.from_dict(found)
    except (TypeError, KeyError, ValueError):
        return None
    for name, value in rates.to_dict().items():
        may_be_zero = name in ("overhead", "call", "link", "network") or name in OPTIMIZERS
        if not math.isfinite(value) or (value <= 0 and not may_be_zero):
            return None
    return rates


def stored_cpu_rates(product: float) -> Rates | None:
    """Returns the rates of the CPU for blocks whose largest matrix product has `product` FLOPs,
    measured with the number of threads that compute such blocks.
    """
    return stored_rates(ONE_THREAD if product < SMALL_PRODUCT else CPU)


def measured_at(device_name: str) -> float | None:
    """Returns the time of the measurement in Unix seconds; None where it is not known."""
    found = _read().get(_key(device_name))
    when = found.get("measured") if isinstance(found, dict) else None
    return when if isinstance(when, (int, float)) else None


def store_rates(device_name: str, rates: Rates) -> None:
    """Writes `rates` to the file. Where the folder is not writable, nothing is stored, and the
    rates are measured again next time.
    """
    store_entry(_key(device_name), rates.to_dict())


def kept_entry(name: str) -> dict[str, Any] | None:
    """Returns what is kept under a name in the file; None where there is nothing."""
    found = _read().get(name)
    return found if isinstance(found, dict) else None


def store_entry(name: str, values: dict[str, Any]) -> None:
    """Keeps `values` under a name in the file, with the time. Where the folder is not writable,
    nothing is kept.
    """
    path = rates_file()
    everything = _read()
    everything[name] = values | {"measured": time.time()}
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not durable: after a crash the rates are measured again.
        content = json.dumps(everything, indent=1)
        safe_files.write_whole(path, content, path.parent, durable=False)


def _read() -> dict[str, Any]:
    """Returns the contents of the file, or an empty dict where the file is missing or broken."""
    try:
        path = rates_file()
        return safe_files.read_json(path, path.parent, dict[str, Any])
    except OSError:
        return {}


def _key(device_name: str) -> str:
    return f"{device_name}, {usable_cores()} cores"


@dataclass(frozen=True)
class Rates:
    """Rates of a machine per second: bytes in each direction of the bus, FLOPs of large matrix
    products and of causal attention (for which half of the FLOPs count), bytes read and written in
    the device's memory, and parameters that AdamW updates on the host.
    """

    h2d: float
    d2h: float
    matmul: float
    attention: float
    device_memory: float
    adamw: float
    adamw_busy: float
    """Parameters a second that AdamW updates while copies run in both directions."""
    h2d_busy: float
    """Bytes a second of copies to the device while copies back and AdamW also run."""
    d2h_busy: float
    """Bytes a second of copies to the host while copies to the device and AdamW also run."""
    packed_attention: float
    """FLOPs a second of the variable-length kernel in long rows, not counting the time for
    `PACKED_BYTES`.
    """
    overhead: float = 0.0
    """Seconds of launch overhead of one block in forward on the CPU, in which nothing else is
    computed.
    """
    call: float = 0.0
    """Seconds to launch one small operation on a GPU while AdamW runs on the host."""
    others: tuple[tuple[Optimizer, float], ...] = ()
    """Parameters a second that each other optimizer updates on the host, as far as that was
    measured.
    """
    disk_read: float = 0.0
    """Bytes per second at which moments are read from their disk while others are written. The disk
    is another in every run (`engine.machine.disk_rates`), so this is not kept with the rest; it is
    0 where no moments are on a disk.
    """
    disk_write: float = 0.0
    """The same for writing."""
    disk_read_alone: float = 0.0
    """Bytes per second at which saved block inputs are read from the disk while nothing is
    written.
    """
    disk_write_alone: float = 0.0
    """Bytes per second at which they are written while nothing is read."""
    link: float = 0.0
    """Bytes a second that each of several GPUs receives from the others, while it sends as many; 0
    where that is not known.
    """
    network: float = 0.0
    """Bytes a second that a node receives from the others, while it sends as many; 0 where that was
    not measured.
    """

    def updates(self, optimizer: Optimizer, busy: bool = False) -> float:
        """Returns the parameters a second that the host updates with `optimizer`. busy: while
        copies run in both directions.
        """
        if optimizer == ADAMW:
            return self.adamw_busy if busy else self.adamw
        alone = next((rate for name, rate in self.others if name == optimizer), 0.0)
        if not alone:  # it was not measured
            alone = self.adamw
            if OPTIMIZERS[optimizer].orthogonalizes:  # cores limit it, and not memory
                alone = OPTIMIZERS[optimizer].thread_rate * threads_of(usable_cores())
        if not busy:
            return alone
        # The copies slow down what waits for host memory, in proportion to its bytes.
        slower = 1 / self.adamw_busy - 1 / self.adamw
        slower *= OPTIMIZERS[optimizer].update_bytes
        return 1 / (1 / alone + slower / OPTIMIZERS[ADAMW].update_bytes)

    def to_dict(self) -> dict[str, float]:
        """Returns the rates that are kept, by their names."""
        kept = {name: getattr(self, name) for name in _KEPT}
        return {**kept, **dict(self.others)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Rates:
        """Reads rates from a dict by their names. Raises TypeError, KeyError or ValueError."""
        # Rates that were stored before have none of these.
        known = {"link": 0.0, "network": 0.0} | values
        others = tuple((name, float(known[name])) for name in OTHERS if name in known)
        return cls(**{name: float(known[name]) for name in _KEPT}, others=others)


OTHERS: tuple[Optimizer, ...] = tuple(optimizer for optimizer in OPTIMIZERS if optimizer != ADAMW)
"""Optimizers whose rate on the host is measured beside that of the usual one."""
_NOT_KEPT = ("disk_read", "disk_write", "disk_read_alone", "disk_write_alone", "others")
_KEPT = tuple(each.name for each in fields(Rates) if each.name not in _NOT_KEPT)
PACKED_BYTES, PACKED_WIDTH = 49, 76
"""The variable-length kernel takes, in addition to its products, the time to move this number of
bytes of device memory in forward and backward for each token and feature of a query, and the time
of this number of additional features per head (measured: docs/performance.md).
"""
SMALL_PRODUCT = 5e8
"""FLOPs of a matrix product that one core finishes in about the time that other cores need to wake
up.
"""
TYPICAL = {
    "cuda": Rates(25e9, 25e9, 2e14, 1.5e14, 1e12, 2e9, 1.5e9, 2e10, 2e10, 1.5e14, call=1e-5),
    "cpu": Rates(1e10, 1e10, 1e11, 5e10, 2e10, 5e8, 5e8, 1e10, 1e10, 5e10),
}
"""Rates for planning where none were measured: those of a card with 24 GiB on a bus of 16 lanes,
and of two cores.
"""

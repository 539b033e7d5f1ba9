"""The rates of this machine are measured once and kept beside the token cache. Plans and
predictions are made with them. No torch is needed.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.files import write_whole
from engine.machine.cgroups import usable_cores
from engine.paths import cache_folder

CPU, ONE_THREAD = "CPU", "CPU, one thread"
"""The CPU's rates have these names; others are named by their card."""


def rates_file() -> Path:
    """Returns the file that rates are kept in."""
    return cache_folder() / "rates.json"


def stored_rates(device_name: str) -> Rates | None:
    """Returns the rates that were measured with this device and as many cores as there are now;
    None where none were.
    """
    found = _read().get(_key(device_name))
    if found is None:
        return None
    try:
        rates = Rates.from_dict(found)
    except (TypeError, KeyError, ValueError):
        return None
    for name, value in rates.to_dict().items():
        may_be_zero = name in ("overhead", "call")
        if not math.isfinite(value) or (value <= 0 and not may_be_zero):
            return None
    return rates


def stored_cpu_rates(product: float) -> Rates | None:
    """Returns the CPU's rates with as many threads as blocks are computed with whose largest matrix
    product has `product` FLOPs.
    """
    return stored_rates(ONE_THREAD if product < SMALL_PRODUCT else CPU)


def measured_at(device_name: str) -> float | None:
    """Returns the time of the measurement in Unix seconds; None where it is not known."""
    found = _read().get(_key(device_name))
    when = found.get("measured") if isinstance(found, dict) else None
    return when if isinstance(when, (int, float)) else None


def store_rates(device_name: str, rates: Rates) -> None:
    """Keeps `rates`. A folder that cannot be written to keeps none, and they are measured again."""
    path = rates_file()
    everything = _read()
    everything[_key(device_name)] = rates.to_dict() | {"measured": time.time()}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not durable: after a crash the rates are measured again.
        write_whole(path, json.dumps(everything, indent=1), durable=False)


def _read() -> dict[str, Any]:
    """Returns everything that is kept; nothing where the file is missing or broken."""
    try:
        found = json.loads(rates_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(device_name: str) -> str:
    return f"{device_name}, {usable_cores()} cores"


@dataclass(frozen=True)
class Rates:
    """A machine does this much in a second, measured: bytes of the two directions of the bus, FLOPs
    of large matrix products and of causal attention (which halves them), bytes that the device's
    memory moves (read and written), parameters that AdamW updates on the host.
    """

    h2d: float
    d2h: float
    matmul: float
    attention: float
    device_memory: float
    adamw: float
    adamw_busy: float
    """AdamW comes to this rate while the bus is busy both ways."""
    h2d_busy: float
    """The bus is busy both ways, and AdamW runs on the host."""
    d2h_busy: float
    """The bus is busy both ways, and AdamW runs on the host."""
    packed_attention: float
    """The variable-length kernel comes to this many FLOPs a second in long rows; `PACKED_BYTES`
    come on top.
    """
    overhead: float = 0.0
    """On the CPU the calls of one block take these seconds in forward; nothing else goes on there
    meanwhile.
    """
    call: float = 0.0
    """A program takes these seconds to launch one small operation on a GPU, beside AdamW on the
    host.
    """

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Rates:
        """Reads rates from a dict by their names. Raises TypeError, KeyError or ValueError."""
        return cls(**{name: float(values[name]) for name in cls.__dataclass_fields__})


PACKED_BYTES, PACKED_WIDTH = 49, 76
"""The variable-length kernel takes time besides its products, as if it moved this many bytes of the
device's memory in forward and backward for each token and feature of a query, and as if each head
had this many features more (measured: docs/performance.md).
"""
SMALL_PRODUCT = 5e8
"""One core has done a matrix product of this many FLOPs about when others have woken up for it."""
TYPICAL = {
    "cuda": Rates(25e9, 25e9, 2e14, 1.5e14, 1e12, 2e9, 1.5e9, 2e10, 2e10, 1.5e14, call=1e-5),
    "cpu": Rates(1e10, 1e10, 1e11, 5e10, 2e10, 5e8, 5e8, 1e10, 1e10, 5e10),
}
"""Plans are made with these rates where nothing was measured: those of a card with 24 GiB on a bus
of 16 lanes, and of two cores.
"""

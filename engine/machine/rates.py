"""Rates of this machine, measured once and kept beside the token cache: plans and predictions are
made with them. No torch.
"""

from __future__ import annotations

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
"""Names of the CPU's rates; others are of the cards that they name."""


def rates_file() -> Path:
    return cache_folder() / "rates.json"


def stored_rates(device_name: str) -> Rates | None:
    """What was measured with this device and as many cores as there are now; None where nothing
    was.
    """
    found = _read().get(_key(device_name))
    try:
        rates = Rates.from_dict(found)
    except (TypeError, KeyError, ValueError):
        return None
    good = all(
        math.isfinite(value) and (value > 0 or name in ("overhead", "call"))
        for name, value in rates.to_dict().items()
    )
    return rates if good else None


def stored_cpu_rates(product: float) -> Rates | None:
    """Those of as many threads as blocks are computed with whose largest matrix product has
    `product` FLOPs.
    """
    return stored_rates(ONE_THREAD if product < SMALL_PRODUCT else CPU)


def measured_at(device_name: str) -> float | None:
    """When that was, in Unix seconds; None where it is not known."""
    found = _read().get(_key(device_name))
    when = found.get("measured") if isinstance(found, dict) else None
    return when if isinstance(when, (int, float)) else None


def store_rates(device_name: str, rates: Rates) -> None:
    """Keep `rates`; a folder that cannot be written to keeps none, and they are measured again."""
    path, everything = (
        rates_file(),
        _read() | {_key(device_name): rates.to_dict() | {"measured": time.time()}},
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(everything, indent=1), durable=False)
    except OSError:
        pass


def _read() -> dict[str, dict]:
    try:
        found = json.loads(rates_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(device_name: str) -> str:
    return f"{device_name}, {usable_cores()} cores"


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, measured: bytes of the two directions of the bus, FLOPs of
    large matrix products and of causal attention (which halves them), bytes that the device's
    memory moves (read and written), parameters that AdamW updates on the host.
    """

    h2d: float
    d2h: float
    matmul: float
    attention: float
    device_memory: float
    adamw: float
    adamw_busy: float
    """While the bus is busy both ways."""
    h2d_busy: float
    d2h_busy: float
    """The bus both ways while AdamW runs on the host."""
    packed_attention: float
    """FLOPs a second that the variable-length kernel comes to in long rows; `PACKED_BYTES` come on
    top.
    """
    overhead: float = 0.0
    """Seconds that the calls of one block take in forward where nothing else goes on meanwhile: on
    the CPU.
    """
    call: float = 0.0
    """Seconds in which a program launches one small operation on a GPU, beside AdamW on the host.
    """

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Rates:
        return cls(**{name: float(values[name]) for name in cls.__dataclass_fields__})


PACKED_BYTES, PACKED_WIDTH = 49, 76
"""Of the device's memory, in the time that the variable-length kernel takes in forward and backward
for each token and feature of a query besides its products, and features that each head has more in
it (measured: docs/performance.md).
"""
SMALL_PRODUCT = 5e8
"""FLOPs of a matrix product that one core has done about when others have woken up for it."""
TYPICAL = {
    "cuda": Rates(25e9, 25e9, 2e14, 1.5e14, 1e12, 2e9, 1.5e9, 2e10, 2e10, 1.5e14, call=1e-5),
    "cpu": Rates(1e10, 1e10, 1e11, 5e10, 2e10, 5e8, 5e8, 1e10, 1e10, 5e10),
}
"""What plans are made with where nothing was measured: a card with 24 GiB on a bus of 16 lanes, and
two cores.
"""

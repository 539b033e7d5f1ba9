"""Rates of this machine, measured once and kept beside the token cache: plans and predictions are made with them. No torch."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path

from engine.cost import SMALL_PRODUCT, Rates
from engine.machine import usable_cores
from engine.paths import cache_folder


CPU, ONE_THREAD = "CPU", "CPU, one thread"
"""Names of the CPU's rates; others are of the cards that they name."""


def rates_file() -> Path:
    return cache_folder() / "rates.json"


def stored_rates(device_name: str) -> Rates | None:
    """What was measured with this device and as many cores as there are now; None where nothing was."""
    found = _read().get(_key(device_name))
    try:
        rates = Rates.from_dict(found)
    except (TypeError, KeyError, ValueError):
        return None
    good = all(math.isfinite(value) and (value > 0 or name in ("overhead", "call")) for name, value in rates.to_dict().items())
    return rates if good else None


def stored_cpu_rates(product: float) -> Rates | None:
    """Those of as many threads as blocks are computed with whose largest matrix product has `product` FLOPs."""
    return stored_rates(ONE_THREAD if product < SMALL_PRODUCT else CPU)


def measured_at(device_name: str) -> float | None:
    """When that was, in Unix seconds; None where it is not known."""
    found = _read().get(_key(device_name))
    when = found.get("measured") if isinstance(found, dict) else None
    return when if isinstance(when, (int, float)) else None


def store_rates(device_name: str, rates: Rates) -> None:
    """Keep `rates`; a folder that cannot be written to keeps none, and they are measured again."""
    path, everything = rates_file(), _read() | {_key(device_name): rates.to_dict() | {"measured": time.time()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".rates")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1)
        os.replace(temporary, path)
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

"""Rates of the disk that moments are on (`engine.disk`). They are measured by `bench --disk` and
stored with those of the machine. No torch.

The cache of a drive takes the first gigabytes at a rate that the drive does not keep. So a rate
counts as drained only if more was written than a cache holds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.settings import TrainConfig
from engine.machine.offload_folder import disk_name
from engine.machine.rates import Rates, kept_entry, store_entry

DRAINED_BYTES = 60 * 10**9
"""Number of bytes that consumer drives cache less than."""
ASSUMED_RATE = 1.0e9
"""Bytes per second that a drained drive is assumed to read and write at once. Good consumer drives
write 1.5e9 to 2.5e9 when their cache is full.
"""
RATED_BYTES = 600 * 10**12
"""Written bytes that a consumer drive of a terabyte is rated for."""


@dataclass(frozen=True)
class DiskRates:
    """Rates of a disk in bytes per second in each direction, measured in both at once."""

    read: float = ASSUMED_RATE
    write: float = ASSUMED_RATE
    written: int = 0
    """Bytes that the measurement wrote; 0 where the rates are assumed."""
    read_alone: float = 0.0
    """Bytes per second that the disk reads while nothing is written; 0 where that was not
    measured.
    """
    write_alone: float = 0.0

    @property
    def is_drained(self) -> bool:
        """Whether the rates are those that the drive keeps."""
        return self.written >= DRAINED_BYTES

    @property
    def origin(self) -> str:
        """Where the rates are from, as text."""
        if not self.written:
            return "assumed; launch.py bench --disk FOLDER measures it"
        return "measured" if self.is_drained else "measured briefly, before any cache was full"

    def to_dict(self) -> dict[str, Any]:
        """Returns the rates as plain data."""
        return asdict(self)


def stored_disk_rates(folder: Path) -> DiskRates | None:
    """Returns the rates that were measured on the disk of a folder; None where there are none."""
    try:
        found = kept_entry(disk_name(folder))
        if found is None:
            return None
        # Rates that were stored before have none of one direction alone.
        alone = [float(found.get(name, 0.0)) for name in ("read_alone", "write_alone")]
        both = float(found["read"]), float(found["write"])
        rates = DiskRates(*both, int(found["written"]), *alone)
    except (OSError, TypeError, KeyError, ValueError):
        return None
    sound = all(math.isfinite(rate) and rate > 0 for rate in (rates.read, rates.write))
    return rates if sound else None


def store_disk_rates(folder: Path, rates: DiskRates) -> None:
    """Keeps the rates of the disk of a folder."""
    store_entry(disk_name(folder), rates.to_dict())


def disk_rates_of(config: TrainConfig) -> DiskRates:
    """Returns the rates of the disk of `engine.disk`: those that were measured, or assumed ones."""
    if config.engine.disk is None:
        return DiskRates()
    return stored_disk_rates(Path(config.engine.disk).expanduser()) or DiskRates()


def with_disk(rates: Rates, config: TrainConfig) -> Rates:
    """Returns the rates of a machine with those of the disk of `engine.disk`."""
    disk = disk_rates_of(config)
    return replace(
        rates,
        disk_read=disk.read,
        disk_write=disk.write,
        disk_read_alone=disk.read_alone or disk.read,
        disk_write_alone=disk.write_alone or disk.write,
    )

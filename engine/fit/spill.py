"""A `Spill` says what a plan keeps on the disk (`engine.disk`), how fast that is, and how it wears
the drive. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.files import disk_free
from engine.fit.buffer_sizes import spilled_bytes, spilled_in_words
from engine.machine.disk_rates import RATED_BYTES, DiskRates, disk_rates_of
from engine.machine.read_machine import Machine
from engine.machine.spill_folder import check_spill_folder
from engine.model.shape import ModelShape
from engine.plan.choices import PlanChoices
from engine.words import counted, in_gib

_ENOUGH = 1 << 60
"""A machine that is only estimated is taken to have so many bytes of disk for moments."""


@dataclass(frozen=True)
class Spill:
    """A `Spill` describes the moments that one plan keeps on the disk."""

    folder: str
    units: str
    """The moments are those of these units, in words."""
    bytes: int
    """They take this many bytes. Each step reads them once and writes them once."""
    steps: int | None
    """The whole run has this many steps; None where the data are not known."""
    rates: DiskRates

    @property
    def run_bytes(self) -> int | None:
        """Returns the bytes that the whole run writes."""
        return None if self.steps is None else self.steps * self.bytes

    @property
    def rated_share(self) -> float | None:
        """Returns the share that the run takes of what a drive is rated for."""
        return None if self.run_bytes is None else self.run_bytes / RATED_BYTES

    def sentences(self) -> tuple[str, ...]:
        """Returns what a person should know before such a run starts."""
        rate = self.rates.write / 1e9
        found = [
            f"Moments of {self.units} are on the disk, in {self.folder}: {in_gib(self.bytes)}, "
            "which each step reads and writes once.",
            f"{self._wear()} of what a drive rated for {RATED_BYTES / 1e12:.0f} TB lasts.",
            f"The disk writes {rate:.1f} GB/s while it reads ({self.rates.origin}).",
        ]
        return tuple(found)

    def _wear(self) -> str:
        if self.run_bytes is None or self.rated_share is None:
            percent = 100 * 1000 * self.bytes / RATED_BYTES
            return f"A thousand steps write {in_tb(1000 * self.bytes)}: {percent:.2g} %"
        share = f"{100 * self.rated_share:.2g} %"
        steps = counted(self.steps or 0, "step")
        return f"The run of {steps} writes {in_tb(self.run_bytes)}: {share}"

    @property
    def in_words(self) -> str:
        """Returns how much is on the disk and how that wears the drive, in a few words."""
        written = f"{in_gib(self.bytes)} of moments on the disk, written in each step"
        percent = 100 * 1000 * self.bytes / RATED_BYTES
        if self.rated_share is None:
            return f"{written} ({percent:.2g} % of a drive's rated life in 1,000 steps)"
        return f"{written} ({100 * self.rated_share:.2g} % of a drive's rated life in this run)"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that the record and the screen use."""
        return {
            "folder": self.folder,
            "units": self.units,
            "step_bytes": self.bytes,
            "run_bytes": self.run_bytes,
            "rated_share": self.rated_share,
            "rates": self.rates.to_dict(),
            "sentences": list(self.sentences()),
        }


def spill_of(
    config: TrainConfig, shape: ModelShape, choices: PlanChoices, steps: int | None
) -> Spill | None:
    """Returns what the choices keep on the disk; None where that is nothing."""
    if not choices.spilled_units or config.engine.disk is None:
        return None
    size = spilled_bytes(shape, choices)
    units = spilled_in_words(shape, choices)
    return Spill(config.engine.disk, units, size, steps, disk_rates_of(config))


def spill_room(config: TrainConfig, machine: Machine) -> int:
    """Returns how many bytes of the disk moments may take; 0 where `engine.disk` is not set."""
    if config.engine.disk is None:
        return 0
    return disk_free(config.engine.disk) if machine.here else _ENOUGH


def offered_folder(machine: Machine) -> str | None:
    """Returns the folder that a report offers for moments: that of runs, if it can take them. A
    machine that is only estimated has no folders, so a word stands for one.
    """
    if not machine.here:
        return "FOLDER"
    if not machine.disk_path:
        return None
    folder = _existing(Path(machine.disk_path))
    try:
        check_spill_folder(str(folder))
    except ConfigError:
        return None
    return str(folder)


def shares_disk_of_runs(config: TrainConfig, machine: Machine) -> bool:
    """Tells whether moments on the disk take the space of the disk that runs are written to."""
    if config.engine.disk is None or not (machine.here and machine.disk_path):
        return False
    folders = (_existing(Path(config.engine.disk)), _existing(Path(machine.disk_path)))
    first, second = (folder.stat().st_dev for folder in folders)
    return first == second


def in_tb(size: int) -> str:
    """Returns written bytes as the makers of drives count them."""
    return f"{size / 1e12:,.1f} TB" if size >= 1e11 else f"{size / 1e9:,.1f} GB"


def _existing(path: Path) -> Path:
    """Returns a path or, if it does not exist, its nearest parent that does."""
    place = path.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place

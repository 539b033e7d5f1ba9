"""A `DiskOffload` says what a plan keeps on the disk (`engine.disk`), how fast that is, and how it
wears the drive. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.files import disk_free, existing_part, on_one_disk
from engine.machine.disk_rates import RATED_BYTES, DiskRates, disk_rates_of
from engine.machine.offload_folder import check_offload_folder
from engine.machine.read_machine import Machine
from engine.planning.fit.buffer_sizes import (
    disk_offloaded_bytes,
    disk_offloaded_input_bytes,
    disk_offloaded_text,
    saved_input_count,
)
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.shape.model_shape import ModelShape
from engine.text import counted, in_gib

_ENOUGH = 1 << 60
"""Bytes of disk that a machine which is only estimated is taken to have for what goes to the
disk.
"""


@dataclass(frozen=True)
class OffloadedKind:
    """One kind of what a plan keeps on the disk: moments or block inputs."""

    kind: MemoryItem
    words: str
    """Which they are: those of some units, or so many."""
    bytes: int
    """Bytes that they take of the disk."""
    step_bytes: int
    """Bytes of them that each step writes; it reads as many."""

    @property
    def what(self) -> str:
        """The kind in a word."""
        return "block inputs" if self.kind == MemoryItem.DISK_OFFLOADED_BLOCK_INPUTS else "moments"


@dataclass(frozen=True)
class DiskOffload:
    """Describes the moments and block inputs that one plan keeps on the disk."""

    folder: str
    kinds: tuple[OffloadedKind, ...]
    """There is at least one."""
    steps: int | None
    """Number of steps of the whole run; None where the data are not known."""
    rates: DiskRates

    @property
    def step_bytes(self) -> int:
        """Bytes that each step writes."""
        return sum(kind.step_bytes for kind in self.kinds)

    @property
    def run_bytes(self) -> int | None:
        """Bytes that the whole run writes."""
        return None if self.steps is None else self.steps * self.step_bytes

    @property
    def rated_share(self) -> float | None:
        """The share that the run takes of what a drive is rated for."""
        return None if self.run_bytes is None else self.run_bytes / RATED_BYTES

    def sentences(self) -> tuple[str, ...]:
        """Returns what a person should know before such a run starts."""
        rate = self.rates.write / 1e9
        found = [
            f"{kind.words[0].upper()}{kind.words[1:]} are on the disk, in {self.folder}: "
            f"{in_gib(kind.step_bytes)}, which each step reads and writes once."
            for kind in self.kinds
        ]
        found += [
            f"{self._wear()} of what a drive rated for {RATED_BYTES / 1e12:.0f} TB lasts.",
            f"The disk writes {rate:.1f} GB/s while it reads ({self.rates.origin}).",
        ]
        return tuple(found)

    def _wear(self) -> str:
        if self.run_bytes is None or self.rated_share is None:
            percent = 100 * 1000 * self.step_bytes / RATED_BYTES
            return f"A thousand steps write {in_tb(1000 * self.step_bytes)}: {percent:.2g} %"
        share = f"{100 * self.rated_share:.2g} %"
        steps = counted(self.steps or 0, "step")
        return f"The run of {steps} writes {in_tb(self.run_bytes)}: {share}"

    @property
    def in_words(self) -> str:
        """How much is on the disk and how that wears the drive, in a few words."""
        each = [f"{in_gib(kind.step_bytes)} of {kind.what}" for kind in self.kinds]
        written = f"{' and '.join(each)} on the disk, written in each step"
        percent = 100 * 1000 * self.step_bytes / RATED_BYTES
        if self.rated_share is None:
            return f"{written} ({percent:.2g} % of a drive's rated life in 1,000 steps)"
        return f"{written} ({100 * self.rated_share:.2g} % of a drive's rated life in this run)"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that the record and the screen use."""
        return {
            "folder": self.folder,
            "kinds": [
                {"what": kind.what, "words": kind.words, "bytes": kind.bytes} for kind in self.kinds
            ],
            "step_bytes": self.step_bytes,
            "run_bytes": self.run_bytes,
            "rated_share": self.rated_share,
            "rates": self.rates.to_dict(),
            "sentences": list(self.sentences()),
        }


def disk_offload_of(
    config: TrainConfig, shape: ModelShape, chosen: Chosen, typical: MicroBatch, steps: int | None
) -> DiskOffload | None:
    """Returns what the plan keeps on the disk; None where that is nothing. typical: the
    micro-batches of a typical step, which writes less than one with full rows.
    """
    choices, kinds = chosen.choices, []
    if config.engine.disk is None:
        return None
    if choices.placement.disk_offloaded_units:
        size, words = disk_offloaded_bytes(shape, choices), disk_offloaded_text(shape, choices)
        kinds.append(
            OffloadedKind(MemoryItem.DISK_OFFLOADED_MOMENTS, f"moments of {words}", size, size)
        )
    if choices.activations.disk_offloaded_block_inputs:
        full = chosen.micro_batch_size * config.row_tokens
        most, usual = (
            disk_offloaded_input_bytes(shape, choices, tokens) for tokens in (full, typical.tokens)
        )
        count = choices.batching.micro_batches * saved_input_count(shape, choices)
        offloaded = choices.activations.disk_offloaded_block_inputs
        words = f"{offloaded} of the {count} block inputs of a step"
        kinds.append(OffloadedKind(MemoryItem.DISK_OFFLOADED_BLOCK_INPUTS, words, most, usual))
    if not kinds:
        return None
    return DiskOffload(config.engine.disk, tuple(kinds), steps, disk_rates_of(config))


def disk_offload_room(config: TrainConfig, machine: Machine) -> int:
    """Returns how many bytes of the disk moments and block inputs may take; 0 where `engine.disk`
    is not set.
    """
    if config.engine.disk is None:
        return 0
    return disk_free(config.engine.disk) if machine.here else _ENOUGH


def offered_folder(machine: Machine) -> str | None:
    """Returns the folder that a report offers for what goes to the disk: that of runs, if it can
    take them. A machine that is only estimated has no folders, so a word stands for one.
    """
    if not machine.here:
        return "FOLDER"
    if not machine.disk_path:
        return None
    folder = existing_part(machine.disk_path)
    try:
        check_offload_folder(str(folder))
    except ConfigError:
        return None
    return str(folder)


def shares_disk_of_runs(config: TrainConfig, machine: Machine) -> bool:
    """Returns whether what goes to the disk takes the space of the disk that runs are written
    to.
    """
    if config.engine.disk is None or not (machine.here and machine.disk_path):
        return False
    return on_one_disk(config.engine.disk, machine.disk_path)


def in_tb(size: int) -> str:
    """Returns written bytes as the makers of drives count them."""
    return f"{size / 1e12:,.1f} TB" if size >= 1e11 else f"{size / 1e9:,.1f} GB"

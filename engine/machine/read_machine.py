"""The machine: its cores, its memory within the limits of RAM and cgroups, its GPUs and its disk.
No torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.files import disk_free
from engine.machine.cgroups import cgroup_memory, usable_cores
from engine.machine.findings import Effect, Finding, findings
from engine.machine.gpus import GpuInfo, order_note
from engine.machine.readings import read


@dataclass(frozen=True)
class Machine:
    """Describes the cores, memory, GPUs and disk of a machine. All sizes are in bytes."""

    cpu_name: str
    cpu_cores: int
    """Number of cores that this process may use."""
    ram_total: int
    ram_limit: int
    """Bytes of RAM that all processes of this session together may use: the smallest of RAM and the
    limits of the cgroups above us.
    """
    ram_available: int
    """Bytes of RAM that can still be allocated within the limit; page cache counts as available."""
    gpus: tuple[GpuInfo, ...] = ()
    disk_path: str = ""
    disk_free: int = 0
    notes: tuple[str, ...] = ()
    """Sentences about what could not be read, and why."""
    findings: tuple[Finding, ...] = ()
    """What stops, slows or limits training here."""
    here: bool = False
    """The machine is the one that the program runs on, with figures as read, not one that is only
    estimated.
    """

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_machine(disk_path: str | os.PathLike[str] = ".") -> Machine:
    """Returns the current figures of this machine. `disk_path` need not exist yet. Figures that
    cannot be read are named in `notes`; no error is raised for them.
    """
    readings = read(disk_path)
    gpus = readings.driver.gpus
    notes = order_note(gpus)
    try:
        free = disk_free(disk_path)
    except OSError as error:
        free = 0
        notes.append(f"The disk at {disk_path} cannot be read ({error.strerror}).")
    return Machine(
        cpu_name=_cpu_name(),
        cpu_cores=usable_cores(),
        ram_total=readings.ram_total,
        ram_limit=readings.ram_limit,
        ram_available=max(0, min(psutil.virtual_memory().available, cgroup_memory()[1])),
        gpus=gpus,
        disk_path=str(disk_path),
        disk_free=free,
        notes=tuple(notes),
        findings=tuple(each for each in findings(readings) if each.effect != Effect.RIGHT),
        here=True,
    )


def _cpu_name() -> str:
    """Returns the name of the CPU as the kernel reports it, or else the architecture."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.machine()

"""Machines that can be asked about without having them: a known card with a given amount of RAM. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from engine.errors import ConfigError
from engine.machine import GpuInfo, Machine, usable_cores

GIB = 1 << 30
MIB = 1 << 20

CARDS = {
    "RTX 3090": 24576,
    "RTX 4090": 24564,
    "RTX 5090": 32607,
    "RTX A6000": 49140,
    "L40S": 46068,
    "A100 80GB": 81920,
    "H100 80GB": 81559,
    "H200": 143771,
    "GH200 96GB": 97871,
}
"""Total memory in MiB as nvidia-smi reports it."""

SYSTEM_RAM_BYTES = 2 * GIB
"""What an idle Linux keeps for itself."""
DRIVER_BYTES = 512 * MIB
"""What the driver keeps of an idle card."""


def named_machine(name: str, ram_gib: float | None) -> Machine:
    """A machine with the card called `name` (case, spaces and dashes do not matter, nor a leading maker's word) and
    `ram_gib` of RAM; its disk is not known. Raises ConfigError for an unknown card or without RAM."""
    wanted = _plain(name)
    matches = [card for card in CARDS if wanted and _plain(card).endswith(wanted)] or \
              [card for card in CARDS if wanted and wanted in _plain(card)]
    if len(matches) != 1:
        raise ConfigError("--machine", f"{name!r} is not one known machine; known are {', '.join(CARDS)}, or give "
                          "--ram-gib, --gpu-gib and --disk-gib.")
    if ram_gib is None:
        raise ConfigError("--ram-gib", f"the {matches[0]} sits in machines of any RAM; give it, such as --ram-gib 128.")
    bare = Machine(cpu_name="", cpu_cores=usable_cores(), ram_total=0, ram_limit=0, ram_available=0)
    return with_figures(replace(bare, gpus=(_card(f"NVIDIA {matches[0]}", CARDS[matches[0]] * MIB),)), ram_gib=ram_gib)


def with_figures(machine: Machine, ram_gib: float | None = None, gpu_gib: float | None = None,
                 disk_gib: float | None = None) -> Machine:
    """`machine` with some of its figures replaced; 0 GiB of GPU memory means no GPU. Raises ConfigError for figures
    that are no sizes."""
    for field, value in (("--ram-gib", ram_gib), ("--gpu-gib", gpu_gib), ("--disk-gib", disk_gib)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(field, f"{value:g} is not a size; give GiB, such as 128.")
    if ram_gib is not None:
        total = round(ram_gib * GIB)
        machine = replace(machine, ram_total=total, ram_limit=total, ram_available=max(0, total - SYSTEM_RAM_BYTES))
    if gpu_gib is not None:
        name = machine.gpus[0].name if machine.gpus else "NVIDIA GPU"
        machine = replace(machine, gpus=(_card(name, round(gpu_gib * GIB)),) if gpu_gib else (), notes=())
    if disk_gib is not None:
        machine = replace(machine, disk_free=round(disk_gib * GIB), disk_path=machine.disk_path or "runs")
    return machine


def _card(name: str, total: int) -> GpuInfo:
    return GpuInfo(name=name, total=total, free=max(0, total - DRIVER_BYTES))


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())

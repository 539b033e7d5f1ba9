"""Free memory and disk that do not waver: those of a machine go up and down all the time, by what
other programs do, and a verdict on what fits must not turn over while somebody looks at it.
"""

from __future__ import annotations

from dataclasses import replace

from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine

WAVERS = 0.02
"""Share of all memory by which the free part wavers."""
DISK_WAVERS = 256 << 20
"""Bytes by which the free disk wavers."""


def steadied(machine: Machine, before: Machine | None) -> Machine:
    """Returns a machine that was just read, with the free memory and disk of `before` wherever they
    have changed by no more than they waver.
    """
    if before is None:
        return machine
    known = {gpu.index: gpu for gpu in before.gpus}
    ram = _steady(machine.ram_available, before.ram_available, WAVERS * machine.ram_limit)
    disk = _steady(machine.disk_free, before.disk_free, DISK_WAVERS)
    gpus = tuple(_steadied(gpu, known.get(gpu.index)) for gpu in machine.gpus)
    return replace(machine, ram_available=ram, disk_free=disk, gpus=gpus)


def free_on(machine: Machine) -> str:
    """Returns all that is free on a machine as one text: verdicts with the same text agree."""
    free = [machine.ram_available, machine.disk_free, *(gpu.free for gpu in machine.gpus)]
    return " ".join(map(str, free))


def _steadied(gpu: GpuInfo, before: GpuInfo | None) -> GpuInfo:
    if before is None:
        return gpu
    return replace(gpu, free=_steady(gpu.free, before.free, WAVERS * gpu.total))


def _steady(free: int, before: int, wavers: float) -> int:
    return before if abs(free - before) <= wavers else free

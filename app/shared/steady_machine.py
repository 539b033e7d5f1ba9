"""Free memory that does not waver: that of a machine goes up and down all the time, by what other
programs do, and a verdict on what fits must not turn over while somebody looks at it.
"""

from __future__ import annotations

from dataclasses import replace

from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine

WAVERS = 0.02
"""Share of all memory by which the free part wavers."""


def steadied(machine: Machine, before: Machine | None) -> Machine:
    """Returns a machine that was just read, with the free memory of `before` wherever it has
    changed by no more than it wavers.
    """
    if before is None:
        return machine
    known = {gpu.index: gpu for gpu in before.gpus}
    ram = _steady(machine.ram_available, before.ram_available, machine.ram_limit)
    gpus = tuple(_steadied(gpu, known.get(gpu.index)) for gpu in machine.gpus)
    return replace(machine, ram_available=ram, gpus=gpus)


def _steadied(gpu: GpuInfo, before: GpuInfo | None) -> GpuInfo:
    return gpu if before is None else replace(gpu, free=_steady(gpu.free, before.free, gpu.total))


def _steady(free: int, before: int, total: int) -> int:
    return before if abs(free - before) <= WAVERS * total else free

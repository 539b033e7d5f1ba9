"""Machines that can be asked about without having them: known cards in a typical host, from
`assets/machines.json`, and rates for them that are estimated from their specifications. No torch.

A figure of the file has its source there; hosts are what such cards usually sit in. An estimated
rate is a specification times a share that was measured on one H200 (docs/performance.md) or is
assumed, as said below, and no measurement.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.machine.gpus import GpuInfo
from engine.machine.rates import Rates
from engine.machine.read_machine import Machine
from engine.paths import PROGRAM_ROOT
from engine.words import GIB, MIB

FILE = PROGRAM_ROOT / "assets" / "machines.json"

SYSTEM_RAM_BYTES = 2 * GIB
"""What an idle Linux keeps for itself."""
DRIVER_BYTES = 512 * MIB
"""What the driver keeps of an idle card."""
UNIFIED_DEVICE_SHARE = 0.25
"""Of a memory that host and device share, what counts as the device's: the planes take most, and
both must fit at once.
"""
SAME_MEMORY = 0.1
"""A card whose memory differs by more than this share is another one that only has the same name.
ECC takes 1/16.
"""

MATMUL_SHARE = 666 / 989
"""Sustained matrix products, of the dense bf16 peak: the H200, 662 to 670 of 989 TFLOPS. Assumed
for cards of which no better figure is known; those with little power for their peak (L4, L40S) may
reach less.
"""
SUSTAINED_SHARE = 666 / 794.5
"""Of the best matrix product that others found on a card, what is sustained: the H200 again, whose
best is 794.5 TFLOPS.
"""
HALF_RATE_SHARE = 0.88
"""Of the peak where a GeForce card accumulates in fp32 at half rate, so that neither power nor
memory limits it. Assumed, a little below the 0.89 to 0.97 that attention reaches on an RTX 5090
(github.com/gau-nernst/learn-cuda, 07_attention).
"""
PACKED_FLOPS, CALL_SECONDS = 3.35e14, 1.2e-5
"""As much as the variable-length kernel comes to on an H200, whose own instructions it does not
use, and as long as a launch beside AdamW takes there.
"""
ATTENTION_SHARE = 505 / 666
"""Causal attention, of matrix products: the H200, 533 TFLOPS forward and 495 backward."""
DEVICE_MEMORY_SHARE = 4164 / 4800
"""Of the device memory's bandwidth: the H200."""
TO_DEVICE_SHARE, FROM_DEVICE_SHARE = 52 / 63.0, 50.7 / 63.0
"""Of the link, each way while both are busy: the H200 on PCIe 5.0 x16."""

ADAMW_BYTES = 26
"""Of host memory that AdamW reads and writes for a parameter."""
THREAD_PARAMETERS = 1e9
"""Parameters a second of one AdamW thread that has host memory to itself. Together with the next
figure this gives 0.88, 1.6, 2.6, 3.8 and 4.8 billion with 1, 2, 4, 8 and 14 threads, where 0.88,
1.7, 2.9, 4.1 and 4.8 were measured.
"""
HOST_MEMORY_SHARE = 7.3e9 * ADAMW_BYTES / 307.2e9
"""Of the host memory's bandwidth, what many threads reach in the end: fitted to the same five
figures, on the assumption that the H200's host had the eight channels of DDR5-4800 that are usual
there.
"""
SHARED_MEMORY_SHARE = 0.93
"""Of that, what AdamW and copies both ways reach together: (3.4 x 26 + 38 + 51) of 190 GB/s."""
FREE_CORES, MAX_THREADS = 2, 32
"""As `engine.runtime.host_kernels` has them, which loads more than is needed here."""


@dataclass(frozen=True)
class KnownMachine:
    """A card in a typical host. Bytes, bytes a second, FLOPs a second and watts, as specified."""

    name: str
    maker: str
    drivers: tuple[str, ...]
    """What the driver calls the card; the first is the usual one."""
    memory_mib: int
    """As the driver reports it; where host and device share one memory, all of it that Linux has.
    """
    memory_bandwidth: float
    bf16_flops: float
    """Dense, accumulated in fp32."""
    accumulate: str
    """`half` where accumulation in fp32 halves the rate of the tensor cores, else `full`."""
    best_bf16_flops: float | None
    """The best matrix product that others measured."""
    link: str
    link_bandwidth: float
    """Between host and device, one way, after the encoding."""
    host: str
    """What the typical host is, in words."""
    host_bandwidth: float
    """Of host memory: channels x 8 bytes x transfers a second."""
    ram_gib: float
    cpu_cores: int
    power_watts: int
    unified: bool
    """Host and device share one memory: RAM must hold what both take."""
    supported: bool
    note: str
    """A sentence on what to know before relying on it; empty where there is nothing."""
    sources: dict[str, tuple[str, ...]]
    """By figure, where it comes from."""

    def machine(self, ram_gib: float | None = None) -> Machine:
        """This machine as `read_machine` would describe it, with `ram_gib` of RAM or else the
        typical amount, which a note says; its disk is not known. Raises ConfigError for RAM that is
        no size.
        """
        notes = [self.note] if self.note else []
        if ram_gib is None:
            notes.append(
                f"RAM was not given: {self.ram_gib:g} GiB are assumed, as in {self.host}; "
                "--ram-gib sets another."
            )
        if self.unified:
            notes.append(
                f"Host and device of the {self.name} share one memory; {UNIFIED_DEVICE_SHARE:.0%} "
                "of it is counted as the device's."
            )
        bare = Machine(
            cpu_name="",
            cpu_cores=self.cpu_cores,
            ram_total=0,
            ram_limit=0,
            ram_available=0,
            gpus=(_card(self.drivers[0], self.memory_mib * MIB),),
            notes=tuple(notes),
        )
        return with_figures(bare, ram_gib=self.ram_gib if ram_gib is None else ram_gib)

    def rates(self, cores: int | None = None, link_bandwidth: float | None = None) -> Rates:
        """Estimated, for `cores` of the host and a link of so many bytes a second, where these are
        not the typical ones.

        Copies and AdamW share host memory in proportion to what each would take alone; where it is
        the device's memory too, a copy reads and writes it.
        """
        matmul = self.bf16_flops * (HALF_RATE_SHARE if self.accumulate == "half" else MATMUL_SHARE)
        if self.best_bf16_flops is not None:
            matmul = self.best_bf16_flops * SUSTAINED_SHARE
        memory = self.host_bandwidth * HOST_MEMORY_SHARE
        touches = 2 if self.unified else 1
        link = self.link_bandwidth if link_bandwidth is None else link_bandwidth
        h2d, d2h = (
            min(link * share, memory / 2 / touches)
            for share in (TO_DEVICE_SHARE, FROM_DEVICE_SHARE)
        )
        adamw = 1 / (
            1 / (THREAD_PARAMETERS * _threads(cores or self.cpu_cores)) + ADAMW_BYTES / memory
        )
        share = min(
            1.0, SHARED_MEMORY_SHARE * memory / (ADAMW_BYTES * adamw + touches * (h2d + d2h))
        )
        return Rates(
            h2d=h2d,
            d2h=d2h,
            matmul=matmul,
            attention=matmul * ATTENTION_SHARE,
            device_memory=self.memory_bandwidth * DEVICE_MEMORY_SHARE,
            adamw=adamw,
            adamw_busy=adamw * share,
            h2d_busy=h2d * share,
            d2h_busy=d2h * share,
            packed_attention=min(matmul * ATTENTION_SHARE, PACKED_FLOPS),
            call=CALL_SECONDS,
        )


@functools.cache
def machines() -> tuple[KnownMachine, ...]:
    """All that are known, the supported and the others, in the order of the file."""
    tree = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(_entry(values, tree["hosts"], tree["sources"]) for values in tree["machines"])


def named_machine(name: str, ram_gib: float | None = None) -> Machine:
    """A machine with the card called `name` (case, spaces and dashes do not matter, nor a leading
    maker's word) and `ram_gib` of RAM, or as much as is typical; its disk is not known. Raises
    ConfigError for a name that is not that of one card.
    """
    return _named(name).machine(ram_gib)


def known_name(name: str) -> str:
    """The full name of the card that `named_machine` would take."""
    return _named(name).name


def _named(name: str) -> KnownMachine:
    wanted = _plain(name)
    matches = _matches(wanted) if wanted else []
    if len(matches) > 1:
        raise ConfigError(
            "--machine",
            f"{name!r} could be {' or '.join(found.name for found in matches)}; name one of them.",
        )
    if not matches:
        raise ConfigError(
            "--machine",
            f"{name!r} is not a known machine; known are {', '.join(m.name for m in machines())}, "
            "or give --ram-gib, --gpu-gib and --disk-gib.",
        )
    return matches[0]


def known_machine(machine: Machine) -> KnownMachine | None:
    """The known machine with the first card of `machine`, by the driver's name and the memory; None
    where there is none.
    """
    gpu = machine.gpus[0] if machine.gpus else None
    found = gpu and _by_driver().get(_plain(gpu.name))
    if not found or (
        not found.unified and abs(gpu.total / (found.memory_mib * MIB) - 1) > SAME_MEMORY
    ):
        return None
    return found


def known_rates(machine: Machine) -> Rates | None:
    """Estimated rates of a machine that was not measured: of its first card's specification, its
    own number of cores and, where the driver says, its own bus; host memory is as fast as is
    typical. None for a card that is not known or not supported.
    """
    found = known_machine(machine)
    if found is None or not found.supported:
        return None
    gpu = machine.gpus[0]
    link = None
    if found.link.startswith("PCIe") and gpu.pcie_generation_max and gpu.pcie_width_max:
        link = _pcie_bandwidth(gpu.pcie_generation_max, gpu.pcie_width_max)
    return found.rates(machine.cpu_cores, link)


def with_figures(
    machine: Machine,
    ram_gib: float | None = None,
    gpu_gib: float | None = None,
    disk_gib: float | None = None,
) -> Machine:
    """`machine` with some of its figures replaced; 0 GiB of GPU memory means no GPU. Where the card
    shares the host's memory, RAM is divided between both. Raises ConfigError for figures that are
    no sizes.
    """
    for field, value in (("--ram-gib", ram_gib), ("--gpu-gib", gpu_gib), ("--disk-gib", disk_gib)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(field, f"{value:g} is not a size; give GiB, such as 128.")
    if ram_gib is not None:
        total, known = round(ram_gib * GIB), known_machine(machine)
        if known is not None and known.unified:
            device = round(UNIFIED_DEVICE_SHARE * total)
            total, machine = (
                total - device,
                replace(machine, gpus=(_card(machine.gpus[0].name, device),)),
            )
        machine = replace(
            machine,
            ram_total=total,
            ram_limit=total,
            ram_available=max(0, total - SYSTEM_RAM_BYTES),
            here=False,
        )
    if gpu_gib is not None:
        name = machine.gpus[0].name if machine.gpus else "NVIDIA GPU"
        # What was read of this machine's card no longer holds; what is known of a named one does.
        machine = replace(
            machine,
            gpus=(_card(name, round(gpu_gib * GIB)),) if gpu_gib else (),
            notes=() if machine.here else machine.notes,
            here=False,
        )
    if disk_gib is not None:
        machine = replace(
            machine, disk_free=round(disk_gib * GIB), disk_path=machine.disk_path or "runs"
        )
    return machine


def _entry(values: dict[str, Any], hosts: dict[str, dict], sources: dict[str, str]) -> KnownMachine:
    host, link = hosts[values["host"]], values["link"]
    origins = {
        figure: tuple(sources[key] for key in ([keys] if isinstance(keys, str) else keys))
        for figure, keys in values["sources"].items()
    }
    plain = {
        key: values[key]
        for key in (
            "name",
            "maker",
            "memory_mib",
            "memory_bandwidth",
            "bf16_flops",
            "accumulate",
            "ram_gib",
            "cpu_cores",
            "power_watts",
        )
    }
    return KnownMachine(
        **plain,
        drivers=tuple(values["drivers"]),
        best_bf16_flops=values.get("best_bf16_flops"),
        link=link["kind"],
        link_bandwidth=link["bytes_per_second"],
        host=host["words"],
        host_bandwidth=host["memory_bandwidth"],
        unified=values.get("unified", False),
        supported=values.get("supported", True),
        note=values.get("note", ""),
        sources=origins | {"host_bandwidth": (host["source"],)},
    )


@functools.cache
def _by_driver() -> dict[str, KnownMachine]:
    return {_plain(driver): known for known in machines() for driver in known.drivers}


def _matches(wanted: str) -> list[KnownMachine]:
    """Of the ways in which a name can be meant, those of the strictest one that finds any."""

    def found(fits: Iterable[bool]) -> list[KnownMachine]:
        return [known for known, does in zip(machines(), fits) if does]

    names = [_plain(known.name) for known in machines()]
    drivers = [[_plain(driver) for driver in known.drivers] for known in machines()]
    return (
        found(wanted in (name, *own) for name, own in zip(names, drivers))
        or found(name.endswith(wanted) for name in names)
        or found(wanted in name for name in names)
        or found(any(wanted in driver for driver in own) for own in drivers)
    )


def _pcie_bandwidth(generation: int, width: int) -> float:
    """Bytes a second one way: 8 GT/s a lane in generation 3, twice that in each later one, 128 of
    130 bits of which are data (source: the PCI Express base specifications 3.0 to 5.0).
    """
    return 2 ** (generation - 3) * 8e9 * width * 128 / 130 / 8


def _threads(cores: int) -> int:
    return min(cores - FREE_CORES if cores >= 4 * FREE_CORES else cores, MAX_THREADS)


def _card(name: str, total: int) -> GpuInfo:
    return GpuInfo(name=name, total=total, free=max(0, total - DRIVER_BYTES))


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())

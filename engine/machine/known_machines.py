"""Known cards in typical hosts, from `assets/machines.json`, for estimates for a machine that the
user does not have. No torch.

- The file has the source of each of its figures. Each host is typical for its card.
- Rates are estimated from specifications. An estimated rate is not a measurement: it is a
  specification times a fraction. The fraction was measured on one H200 (docs/performance.md) or is
  assumed, as noted at the constants below.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.errors import ConfigError
from engine.machine.gpus import GpuInfo
from engine.machine.rates import OTHERS, Rates
from engine.machine.read_machine import Machine
from engine.machine.update_threads import threads_of
from engine.paths import PROGRAM_ROOT
from engine.text import GIB, MIB

FILE = PROGRAM_ROOT / "assets" / "machines.json"

SYSTEM_RAM_BYTES = 2 * GIB
"""Bytes of RAM that an idle Linux system takes."""
DRIVER_BYTES = 512 * MIB
"""Bytes of the memory of an idle card that the driver takes."""
UNIFIED_DEVICE_SHARE = 0.25
"""Fraction of a common memory of host and device that is treated as the device's. The planes take
most of that memory, and both must fit at once.
"""
SAME_MEMORY = 0.1
"""Fraction by which the memory of two cards of the same name may differ before they count as
different cards. ECC takes 1/16.
"""

MATMUL_SHARE = 666 / 989
"""Matrix products sustain this share of the dense bf16 peak: the H200 reached 662 to 670 of 989
TFLOPS. It is assumed for cards for which no better figure is known. Cards with a low power limit
relative to their peak (L4, L40S) may reach less.
"""
SUSTAINED_SHARE = 666 / 794.5
"""Fraction of the best matrix product of a card, as measured by others, that is sustained. It is
that of the H200, whose best is 794.5 TFLOPS.
"""
HALF_RATE_SHARE = 0.88
"""A GeForce card that accumulates in fp32 at half rate sustains this share of its peak, since
neither power nor memory limits it. It is assumed, a little below the 0.89 to 0.97 that attention
reaches on an RTX 5090 (github.com/gau-nernst/learn-cuda, 07_attention).
"""
PACKED_FLOPS, CALL_SECONDS = 3.35e14, 1.2e-5
"""FLOPs per second of the variable-length kernel, which does not use instructions specific to a
card, and seconds to launch an operation while AdamW runs, both on an H200.
"""
ATTENTION_SHARE = 505 / 666
"""Rate of causal attention as a fraction of that of matrix products: on the H200, 533 TFLOPS
forward and 495 backward.
"""
DEVICE_MEMORY_SHARE = 4164 / 4800
"""The H200 reaches this share of the bandwidth of its memory."""
TO_DEVICE_SHARE, FROM_DEVICE_SHARE = 52 / 63.0, 50.7 / 63.0
"""Copies reach these shares of the link's bandwidth in each direction while both directions are
busy (measured on the H200, PCIe 5.0 x16).
"""

HOST_MEMORY_SHARE = 7.3e9 * 26 / 307.2e9
"""Fraction of the host memory's bandwidth that AdamW reaches with many threads, at most. Together
with the rate of one thread (`engine.config.optimizers`) this gives, with moments in fp32, 0.88,
1.6, 2.6, 3.8 and 4.8 billion parameters a second with 1, 2, 4, 8 and 14 threads, where 0.88, 1.7,
2.9, 4.1 and 4.8 were measured. It is fitted to these figures, assuming that the H200's host had
eight channels of DDR5-4800, as is usual.
"""
SHARED_MEMORY_SHARE = 0.93
"""AdamW and copies in both directions together reach this share of that rate: (3.4 x 26 + 38 + 51)
of 190 GB/s.
"""


@dataclass(frozen=True)
class KnownMachine:
    """A card in a typical host. Its figures are the specified ones, in bytes, bytes a second, FLOPs
    a second and watts.
    """

    name: str
    maker: str
    drivers: tuple[str, ...]
    """The driver calls the card one of these; the first is the usual one."""
    memory_mib: int
    """The driver reports this much memory. Where host and device share one memory, it is the total
    that Linux reports.
    """
    memory_bandwidth: float
    bf16_flops: float
    """Peak rate of dense products that are accumulated in fp32."""
    accumulate: str
    """`half` where accumulation in fp32 halves the rate of the tensor cores, else `full`."""
    best_bf16_flops: float | None
    """Best rate of a matrix product that others have measured; None where none is known."""
    link: str
    link_bandwidth: float
    """Bytes a second that the link between host and device moves one way, without the encoding's
    overhead.
    """
    host: str
    """The text describes the typical host."""
    host_bandwidth: float
    """Bandwidth of host memory: channels x 8 bytes x transfers per second."""
    ram_gib: float
    cpu_cores: int
    power_watts: int
    unified: bool
    """Whether host and device share one memory, so that RAM must hold the items of both."""
    supported: bool
    note: str
    """The note warns about limits of the machine; it is empty where there are none."""
    sources: dict[str, tuple[str, ...]]
    """Sources of each figure."""

    def machine(self, ram_gib: float | None = None) -> Machine:
        """Returns the machine as `read_machine` would, with `ram_gib` of RAM, or else with the
        typical amount and a note on that. Its disk is not known. Raises ConfigError for an invalid
        amount of RAM.
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
        """Returns estimated rates. The `cores` of the host and the bytes a second of the link may
        be given where they differ from the typical ones.

        Copies and AdamW share host memory in proportion to what each would take alone. Where host
        memory is the device's memory too, a copy both reads and writes it.
        """
        matmul = self._sustained_matmul()
        memory = self.host_bandwidth * HOST_MEMORY_SHARE
        touches = 2 if self.unified else 1
        link = self.link_bandwidth if link_bandwidth is None else link_bandwidth
        h2d = min(link * TO_DEVICE_SHARE, memory / 2 / touches)
        d2h = min(link * FROM_DEVICE_SHARE, memory / 2 / touches)
        threads = threads_of(cores or self.cpu_cores)

        def updates(optimizer: Optimizer) -> float:
            # The time per parameter is the sum of the time of the threads and that of memory.
            described = OPTIMIZERS[optimizer]
            thread_seconds = 1 / (described.thread_rate * threads)
            return 1 / (thread_seconds + described.update_bytes / memory)

        adamw = updates(ADAMW)
        wanted = OPTIMIZERS[ADAMW].update_bytes * adamw + touches * (h2d + d2h)
        share = min(1.0, SHARED_MEMORY_SHARE * memory / wanted)
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
            others=tuple((optimizer, updates(optimizer)) for optimizer in OTHERS),
        )

    def _sustained_matmul(self) -> float:
        """Returns the FLOPs a second that matrix products sustain on the card."""
        if self.best_bf16_flops is not None:
            return self.best_bf16_flops * SUSTAINED_SHARE
        if self.accumulate == "half":
            return self.bf16_flops * HALF_RATE_SHARE
        return self.bf16_flops * MATMUL_SHARE


@functools.cache
def machines() -> tuple[KnownMachine, ...]:
    """Returns the known machines, supported or not, in the order of the file."""
    tree = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(_entry(values, tree["hosts"], tree["sources"]) for values in tree["machines"])


def named_machine(name: str, ram_gib: float | None = None) -> Machine:
    """Returns a machine with the card called `name` and `ram_gib` of RAM, or as much as is typical.
    Case, spaces, dashes and a leading manufacturer's name are ignored. The disk is not known.
    Raises ConfigError for a name that does not match exactly one card.
    """
    return _named(name).machine(ram_gib)


def known_name(name: str) -> str:
    """Returns the full name of the card that `named_machine` would use."""
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
    """Returns the known machine with the first card of `machine`, by the driver's name and the
    memory; None where the card is not known.
    """
    if not machine.gpus:
        return None
    gpu = machine.gpus[0]
    found = _by_driver().get(_plain(gpu.name))
    if found is None or found.unified:
        return found
    differs = abs(gpu.total / (found.memory_mib * MIB) - 1)
    return found if differs <= SAME_MEMORY else None


def known_rates(machine: Machine) -> Rates | None:
    """Returns estimated rates of a machine that was not measured; None for a card that is unknown
    or unsupported. They are derived from the specification of its first card, its own number of
    cores and, where the driver reports it, its own bus. Host memory is assumed to have the typical
    speed.
    """
    found = known_machine(machine)
    return None if found is None else rates_as(found, machine)


def rates_as(found: KnownMachine, machine: Machine) -> Rates | None:
    """Returns the rates of `machine` where it is `found`; None where that is not supported."""
    if not found.supported:
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
    """Returns `machine` with some of its figures replaced. 0 GiB of GPU memory means no GPU. Where
    the card shares the host's memory, RAM is divided between both. Raises ConfigError for figures
    that are not valid sizes.
    """
    for field, value in (("--ram-gib", ram_gib), ("--gpu-gib", gpu_gib), ("--disk-gib", disk_gib)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(field, f"{value:g} is not a size; give GiB, such as 128.")
    if ram_gib is not None:
        machine = _with_ram(machine, round(ram_gib * GIB))
    if gpu_gib is not None:
        machine = _with_gpu(machine, gpu_gib)
    if disk_gib is not None:
        path = machine.disk_path or "runs"
        machine = replace(machine, disk_free=round(disk_gib * GIB), disk_path=path)
    return machine


def _with_ram(machine: Machine, total: int) -> Machine:
    known = known_machine(machine)
    if known is not None and known.unified:
        device = round(UNIFIED_DEVICE_SHARE * total)
        total -= device
        machine = replace(machine, gpus=(_card(machine.gpus[0].name, device),))
    return replace(
        machine,
        ram_total=total,
        ram_limit=total,
        ram_available=max(0, total - SYSTEM_RAM_BYTES),
        here=False,
    )


def _with_gpu(machine: Machine, gib: float) -> Machine:
    name = machine.gpus[0].name if machine.gpus else "NVIDIA GPU"
    return replace(
        machine,
        gpus=(_card(name, round(gib * GIB)),) * max(1, len(machine.gpus)) if gib else (),
        # Notes about this machine's card no longer apply; those about a named card do.
        notes=() if machine.here else machine.notes,
        here=False,
    )


def _entry(
    values: dict[str, Any], hosts: dict[str, dict[str, Any]], sources: dict[str, str]
) -> KnownMachine:
    """Returns the known machine of one entry in the file."""
    host, link = hosts[values["host"]], values["link"]
    origins: dict[str, tuple[str, ...]] = {}
    for figure, keys in values["sources"].items():
        names = [keys] if isinstance(keys, str) else keys
        origins[figure] = tuple(sources[name] for name in names)
    origins["host_bandwidth"] = (host["source"],)
    return KnownMachine(
        name=values["name"],
        maker=values["maker"],
        drivers=tuple(values["drivers"]),
        memory_mib=values["memory_mib"],
        memory_bandwidth=values["memory_bandwidth"],
        bf16_flops=values["bf16_flops"],
        accumulate=values["accumulate"],
        best_bf16_flops=values.get("best_bf16_flops"),
        link=link["kind"],
        link_bandwidth=link["bytes_per_second"],
        host=host["words"],
        host_bandwidth=host["memory_bandwidth"],
        ram_gib=values["ram_gib"],
        cpu_cores=values["cpu_cores"],
        power_watts=values["power_watts"],
        unified=values.get("unified", False),
        supported=values.get("supported", True),
        note=values.get("note", ""),
        sources=origins,
    )


@functools.cache
def _by_driver() -> dict[str, KnownMachine]:
    """Returns the known machines by every name that a driver gives their card."""
    found: dict[str, KnownMachine] = {}
    for known in machines():
        for driver in known.drivers:
            found[_plain(driver)] = known
    return found


def _matches(wanted: str) -> list[KnownMachine]:
    """Returns the machines that a plain name can mean, by the strictest of these ways that finds
    any: the whole name of a card or of a driver, the end of a name, a part of it, a part of a
    driver's name.
    """

    def is_whole(known: KnownMachine) -> bool:
        return wanted == _plain(known.name) or wanted in _plain_drivers(known)

    def is_end(known: KnownMachine) -> bool:
        return _plain(known.name).endswith(wanted)

    def is_part(known: KnownMachine) -> bool:
        return wanted in _plain(known.name)

    def is_part_of_driver(known: KnownMachine) -> bool:
        return any(wanted in driver for driver in _plain_drivers(known))

    for fits in (is_whole, is_end, is_part, is_part_of_driver):
        found = [known for known in machines() if fits(known)]
        if found:
            return found
    return []


def _plain_drivers(known: KnownMachine) -> list[str]:
    return [_plain(driver) for driver in known.drivers]


def _pcie_bandwidth(generation: int, width: int) -> float:
    """Returns bytes a second one way: 8 GT/s a lane in generation 3, doubled in each later
    generation. Of 130 bits, 128 are data (source: the PCI Express base specifications 3.0 to 5.0).
    """
    return 2 ** (generation - 3) * 8e9 * width * 128 / 130 / 8


def _card(name: str, total: int) -> GpuInfo:
    return GpuInfo(name=name, total=total, free=max(0, total - DRIVER_BYTES))


def _plain(name: str) -> str:
    """Returns a name in a form without case, manufacturer's name, spaces and dashes."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())

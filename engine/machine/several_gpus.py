"""Known machines with several of one card, and estimates of the link between the cards. No torch.

`assets/machines.json` lists machines that are often bought or rented. Their RAM and cores are
assumptions, and so are all rates of links but that of two H200, which was measured.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace

from engine.config.limits import LARGEST
from engine.errors import ConfigError
from engine.machine.known_machines import (
    FILE,
    KnownMachine,
    known_machine,
    known_rates,
    machines,
    named_machine,
    rates_as,
)
from engine.machine.link_rates import ASSUMED_LINK
from engine.machine.rates import Rates
from engine.machine.read_machine import Machine

NVLINK_SHARE = 699e6 / 2.6e-3 / 450e9
"""Ranks receive at this share of the bandwidth of NVLink in one direction. Two H200 gathered 466 MB
of weights in 0.9 ms and reduced and scattered 932 MB of accumulators in 1.7 ms, of which each
receives half. It is assumed for other cards and for more of them.
"""
NVLINK = {
    "A100 40GB": 300e9,
    "A100 80GB": 300e9,
    "H100 SXM": 450e9,
    "H200": 450e9,
    "B200": 900e9,
}
"""Bytes a second that the NVLink of these cards moves in each direction, by specification."""
PEER_LINK = 20e9
"""Bytes per second that cards that read each other's memory over PCIe are assumed to receive."""


@dataclass(frozen=True)
class Link:
    """A link joins the GPUs of one machine."""

    text: str
    bandwidth: float
    """Bytes a second that each GPU receives, while it sends as many."""


def link_of(card: KnownMachine | None) -> Link:
    """Returns the link between several of a card, by what is usual for it. GeForce cards have no
    access to each other's memory, and neither is assumed for a card that is not known.
    """
    if card is None or "GeForce" in card.drivers[0]:
        return Link("the memory of the host", ASSUMED_LINK)
    if card.name in NVLINK:
        return Link("NVLink", NVLINK_SHARE * NVLINK[card.name])
    return Link("PCIe", PEER_LINK)


@dataclass(frozen=True)
class MultiGpu:
    """A machine with several of a card."""

    card: KnownMachine
    """Card with the host of this machine, not the one that is typical for a single card."""
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.card.name}"

    def machine(self, ram_gib: float | None = None) -> Machine:
        """Describes the machine as `KnownMachine.machine` does."""
        single = self.card.machine(ram_gib)
        link = link_of(self.card)
        note = (
            f"Each of the {self.gpus} GPUs is assumed to receive {link.bandwidth / 1e9:.0f} GB/s "
            f"from the others, over {link.text}."
        )
        return replace(single, gpus=single.gpus * self.gpus, notes=(*single.notes, note))


@functools.cache
def machines_with_several() -> tuple[MultiGpu, ...]:
    """Returns the machines with several of a card, in the order of the file."""
    tree = json.loads(FILE.read_text(encoding="utf-8"))
    cards = {known.name: known for known in machines()}
    found = []
    for values in tree["several"]:
        host = tree["hosts"][values["host"]]
        card = replace(
            cards[values["card"]],
            host=host["words"],
            host_bandwidth=host["memory_bandwidth"],
            ram_gib=values["ram_gib"],
            cpu_cores=values["cpu_cores"],
        )
        found.append(MultiGpu(card, values["gpus"]))
    return tuple(found)


def multi_gpu_of(machine: Machine) -> MultiGpu | None:
    """Returns the known machine with as many of the card of `machine`; None where none is known."""
    card = known_machine(machine)
    if card is None:
        return None
    found = (each for each in machines_with_several() if each.card.name == card.name)
    return next((each for each in found if each.gpus == len(machine.gpus)), None)


def rates_with_link(machine: Machine) -> Rates | None:
    """Returns estimated rates, as `known_rates` does, with that of the link between several GPUs.
    The host is the one that is typical for this number of the card, where one is known.
    """
    if len(machine.gpus) < 2:
        return known_rates(machine)
    several = multi_gpu_of(machine)
    found = known_rates(machine) if several is None else rates_as(several.card, machine)
    return None if found is None else replace(found, link=link_of(known_machine(machine)).bandwidth)


def named_with_several(name: str, ram_gib: float | None = None) -> Machine:
    """Returns the machine that `named_machine` does, also for names such as `2 x RTX 4090`. A
    number of cards that the file does not list is put into the host of one. Raises ConfigError.
    """
    count, card = _count_of(name)
    if count == 1:
        return named_machine(card, ram_gib)
    single = named_machine(card, ram_gib)
    found = multi_gpu_of(replace(single, gpus=single.gpus * count))
    if found is None:
        known = known_machine(single)
        assert known is not None  # it has just been found by its name
        found = MultiGpu(known, count)
    return found.machine(ram_gib)


def _count_of(name: str) -> tuple[int, str]:
    """Returns how many cards a name asks for, and the rest of the name."""
    found = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\S.*)", name)
    if found is None:
        return 1, name
    count = int(found[1])
    if not 1 <= count <= LARGEST["gpus"]:
        raise ConfigError("--machine", f"{count} GPUs are not 1 to {LARGEST['gpus']}.")
    return count, found[2]

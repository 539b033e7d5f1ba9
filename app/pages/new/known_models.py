"""The models of the catalog and this machine as texts."""

from __future__ import annotations

import functools

from app.labels import in_bytes
from engine.machine.read_machine import Machine
from engine.planning.shape.catalog import catalog
from engine.text import counted


def machine_text(machine: Machine) -> str:
    """Returns one line that describes a machine, without what changes while a page is open."""
    cores = counted(machine.cpu_cores, "CPU core")
    gpus = ", ".join(f"{gpu.name} ({in_bytes(gpu.total)})" for gpu in machine.gpus)
    return f"{cores} · {in_bytes(machine.ram_limit)} of RAM · {gpus or 'no GPU'}"


@functools.cache
def known_models() -> list[list[str]]:
    """Returns the hub id and the title of every model whose shape is bundled.

    The fit panel of such a model needs no request to the hub.
    """
    named = [[entry.id, entry.title] for entry in catalog()]
    # An entry's title is that of its first model. Others of the same shape go by their id.
    alike = [[name, name.rpartition("/")[2]] for entry in catalog() for name in entry.also]
    return sorted([*named, *alike], key=lambda each: each[0].lower())

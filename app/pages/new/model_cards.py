"""Models as cards, those that fit this machine first. Whether one fits is judged as in the table of
models; the memory is that of the plan that a run would use. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.labels import in_bytes
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.read_machine import Machine
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.model_table import Cell, cell, own_parameters, table_shape
from engine.planning.fit.requirements import FitStatus, requirements_of
from engine.planning.shape.catalog import CatalogEntry, catalog
from engine.planning.shape.model_shape import ModelShape

FITTING, TOO_LARGE = 5, 1
"""Number of cards of models that fit, and of those that do not."""
RAM_GRAIN = 256 << 20
"""Free memory is rounded down to a multiple of this (bytes), so that cards do not change with each
page of memory that some program takes.
"""
DTYPE_BYTES = 2
"""Bytes of a parameter as models are published."""

Known = tuple[CatalogEntry, ModelShape]


def rounded_machine(machine: Machine) -> Machine:
    """Returns the machine as cards see it: without what changes all the time."""
    return replace(machine, ram_available=machine.ram_available // RAM_GRAIN * RAM_GRAIN)


def model_cards(config: TrainConfig, machine: Machine, chosen: TrainConfig) -> list[dict[str, Any]]:
    """Returns models for these settings: that of `chosen`, with its own settings, if it is known;
    some that fit, from the smallest to the largest; then the smallest that does not. It is empty
    for settings that no table is about.
    """
    known = _known(config)
    end = _first_too_large(known, config, machine)
    rest = [*_spread(known[:end], FITTING), *known[end : end + TOO_LARGE]]
    first = [each for each in _known(chosen) if _is_of(chosen, each[0])]
    if first and not any(_is_of(chosen, entry) for entry, _ in rest):
        rest = [*_spread(known[:end], FITTING - 1), *known[end : end + TOO_LARGE]]
    return [
        *(_card(*each, chosen, machine) for each in first),
        *(_card(*each, config, machine) for each in rest if not _is_of(chosen, each[0])),
    ]


def _is_of(config: TrainConfig, entry: CatalogEntry) -> bool:
    return config.model.source in (entry.id, *entry.also)


def _known(config: TrainConfig) -> list[Known]:
    """Returns the models of the catalog with their shapes, the smallest first."""
    found = []
    for entry in catalog():
        try:
            shape = table_shape(entry, config)
        except ConfigError:
            continue
        if shape is not None:
            found.append((entry, shape))
    return sorted(found, key=lambda each: each[1].parameter_count)


def _first_too_large(known: Sequence[Known], config: TrainConfig, machine: Machine) -> int:
    """Returns the place of the first model that does not fit. Larger ones are taken not to fit
    either, so that a dozen of plans suffice.
    """
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        found = _cell(config, known[middle][1], machine)
        if _fits(found):
            low = middle + 1
        else:
            high = middle
    return low


def _spread(known: Sequence[Known], count: int) -> list[Known]:
    """Returns so many of them at even distances, the last one included."""
    if len(known) <= count:
        return list(known)
    return [known[(number + 1) * len(known) // count - 1] for number in range(count)]


def _cell(config: TrainConfig, shape: ModelShape, machine: Machine) -> Cell | None:
    try:
        return cell(config, shape, machine, timed=False)
    except ConfigError:
        return None


def _fits(found: Cell | None) -> bool:
    return found is not None and found.status != FitStatus.DOES_NOT_FIT


def _card(
    entry: CatalogEntry, shape: ModelShape, config: TrainConfig, machine: Machine
) -> dict[str, Any]:
    chat = (name for name in entry.also if name.lower().endswith(("-instruct", "-it")))
    found = _cell(config, shape, machine)
    text = "cannot be trained so"
    if found is not None:
        text = f"lacks {found.missing}"
        if ", " not in found.missing:
            text = text.removesuffix(" of RAM")
        if _fits(found):
            # Not the least that it takes: a plan uses free memory to be faster.
            host = requirements_of(config, machine, shape).parts[PartName.HOST]
            text = f"fits · {in_bytes(host.total)} RAM"
    return {
        "id": next(chat, entry.id),
        "ids": [entry.id, *entry.also],
        "title": entry.title,
        "fits": _fits(found),
        "text": text,
        "download": f"{download_size(shape, config)} download",
    }


def download_size(shape: ModelShape, config: TrainConfig) -> str:
    """Returns about how large the weights of a model are on the hub, such as 2.5 GB or 269 MB."""
    size = DTYPE_BYTES * own_parameters(shape, config)
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"

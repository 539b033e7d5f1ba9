"""Models x machines: does it fit, and how fast? The largest model for a machine, and the machines
for a model. No torch.

Fits are judged with the leanest plan of a job, speeds come from a plan that is chosen and simulated
as a run's is, but of fewer ways (`choose`'s `quick`: some per cent slower at most).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.fit.memory_items import MEMORY, PartName
from engine.fit.needs import PART_WORDS, Verdict, least_needs, measured_rates, needs_of
from engine.machine.known_machines import KnownMachine, machines, with_figures
from engine.machine.read_machine import Machine
from engine.model.catalog import CatalogEntry, catalog
from engine.model.shape import ModelShape
from engine.words import GIB

HERE = "This machine"
SHOWN = ("RTX 4090", "RTX 5090", "A100 80GB", "H100 SXM", "H200")
"""Machines that a table shows where none are named."""
RAM_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
"""GiB of RAM that machines are sold with."""


@dataclass(frozen=True)
class Column:
    """A machine of a table."""

    name: str
    machine: Machine


@dataclass(frozen=True)
class Cell:
    """One model on one machine. Bytes are the least that it takes."""

    verdict: Verdict
    host_bytes: int
    gpu_bytes: int | None
    missing: str
    """What is too small, and by how many GiB; empty where the model fits."""
    tokens_per_second: float | None = None
    """None where it does not fit, was not asked for, or no rates of the machine are known."""
    estimated: bool = True
    """From the card's specification, not measured."""


@dataclass(frozen=True)
class Row:
    """A model with its cells, in the order of the columns."""

    entry: CatalogEntry
    parameters: int
    active_parameters: int
    cells: tuple[Cell, ...]


def columns(names: Sequence[str], here: Machine) -> tuple[Column, ...]:
    """This machine, and known ones with their typical RAM: those of exactly these names. Raises
    ConfigError for a name that is not known.
    """
    known = {machine.name: machine for machine in machines()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            "--machine", f"{unknown[0]!r} is not a known machine; known are {', '.join(known)}."
        )
    return (Column(HERE, here), *(Column(name, known[name].machine()) for name in names))


def table(
    config: TrainConfig,
    shown: Sequence[Column],
    models: Iterable[CatalogEntry] | None = None,
    timed: bool = True,
) -> list[Row]:
    """A row for each model that the settings of `config` suit, all of the catalog if none are
    given. timed: with speeds, which take some hundredths of a second a cell.
    """
    rows = []
    for entry in catalog() if models is None else models:
        shape = entry.shape(config.model.dtype)
        if shape is None:
            continue
        try:
            cells = tuple(cell(config, shape, column.machine, timed) for column in shown)
        except ConfigError:  # rows that are longer than the model's positions
            continue
        rows.append(Row(entry, shape.parameter_count, shape.active_parameters, cells))
    return rows


def cell(config: TrainConfig, shape: ModelShape, machine: Machine, timed: bool = True) -> Cell:
    """`shape` on `machine` with the settings of `config`. Raises ConfigError where they contradict
    the model.
    """
    least = least_needs(config, machine, shape)
    verdict = least.verdict(MEMORY)
    parts = {name: part for name, part in least.parts.items() if name in MEMORY}
    missing = ", ".join(
        f"{(part.total - part.limit) / GIB:,.0f} GiB of {PART_WORDS[name]}"
        for name, part in parts.items()
        if part.verdict == Verdict.DOES_NOT_FIT
    )
    rate = None
    if timed and verdict != Verdict.DOES_NOT_FIT:
        needs = needs_of(config, machine, shape, quick=True)
        if needs.step_seconds:
            rate = config.train.batch_size * config.data.max_seq_len / needs.step_seconds
    gpu_bytes = parts[PartName.GPU].total if PartName.GPU in parts else None
    return Cell(
        verdict,
        parts[PartName.HOST].total,
        gpu_bytes,
        missing,
        rate,
        measured_rates(config, machine) is None,
    )


def largest_model(config: TrainConfig, machine: Machine) -> tuple[CatalogEntry, Cell] | None:
    """The model of the catalog with the most parameters that `machine` can train, its speed
    included; None where it can train none.
    """
    fitting = [
        (entry, shape)
        for entry in catalog()
        if (shape := entry.shape(config.model.dtype)) is not None and _fits(config, shape, machine)
    ]
    if not fitting:
        return None
    entry, shape = max(fitting, key=lambda found: found[1].parameter_count)
    return entry, cell(config, shape, machine)


@dataclass(frozen=True, eq=False)
class Offer:
    """A machine that can train a model, with the least RAM of `RAM_SIZES` that does."""

    known: KnownMachine
    ram_gib: int
    cell: Cell


def machines_for(config: TrainConfig, shape: ModelShape, timed: bool = True) -> list[Offer]:
    """The known machines that can train this, least RAM first and then the fastest; those whose GPU
    cannot hold it, and those that are not supported, are left out.
    """
    offers = []
    for known in machines():
        ram = _least_ram(config, shape, known) if known.supported else None
        if ram is not None:
            offers.append(Offer(known, ram, cell(config, shape, known.machine(ram), timed)))
    return sorted(offers, key=lambda offer: (offer.ram_gib, -(offer.cell.tokens_per_second or 0)))


def _least_ram(config: TrainConfig, shape: ModelShape, known: KnownMachine) -> int | None:
    """GiB; what is soldered cannot be chosen."""
    sizes = (known.ram_gib,) if known.unified else RAM_SIZES
    return next(
        (
            ram
            for ram in sizes
            if _fits(config, shape, with_figures(known.machine(ram), ram_gib=ram))
        ),
        None,
    )


def _fits(config: TrainConfig, shape: ModelShape, machine: Machine) -> bool:
    try:
        return least_needs(config, machine, shape).verdict(MEMORY) != Verdict.DOES_NOT_FIT
    except ConfigError:
        return False


# ---------------------------------------------------------------------- words and files


def as_csv(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """A line for each model and machine, figures in bytes and tokens a second."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            "model",
            "family",
            "parameters",
            "active_parameters",
            "machine",
            "ram_bytes_available",
            "gpu_bytes_free",
            "verdict",
            "host_bytes",
            "gpu_bytes",
            "missing",
            "tokens_per_second",
            "estimated",
        )
    )
    for row in rows:
        for column, found in zip(shown, row.cells):
            gpus = column.machine.gpus
            writer.writerow(
                (
                    row.entry.id,
                    row.entry.family,
                    row.parameters,
                    row.active_parameters,
                    column.name,
                    column.machine.ram_available,
                    gpus[0].free if gpus else "",
                    found.verdict,
                    found.host_bytes,
                    "" if found.gpu_bytes is None else found.gpu_bytes,
                    found.missing,
                    "" if found.tokens_per_second is None else round(found.tokens_per_second, 1),
                    found.estimated,
                )
            )
    return text.getvalue()


def as_dicts(rows: Sequence[Row], shown: Sequence[Column]) -> list[dict[str, Any]]:
    """Plain data of every row, for tools and the screen."""
    return [
        {
            "id": row.entry.id,
            "title": row.entry.title,
            "family": row.entry.family,
            "parameters": row.parameters,
            "active_parameters": row.active_parameters,
            "cells": {
                column.name: {
                    "verdict": found.verdict.value,
                    "host_bytes": found.host_bytes,
                    "gpu_bytes": found.gpu_bytes,
                    "missing": found.missing,
                    "tokens_per_second": found.tokens_per_second,
                    "estimated": found.estimated,
                }
                for column, found in zip(shown, row.cells)
            },
        }
        for row in rows
    ]


def as_text(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """For the terminal: tokens a second where a model fits, and what is missing where it does not."""
    lines = [["model", *(column.name for column in shown)]]
    lines += [[row.entry.title, *map(cell_in_words, row.cells)] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(cells, widths)).rstrip()
        for cells in lines
    )


def cell_in_words(found: Cell) -> str:
    """1,240 tokens/s; fits; needs 83 GiB of RAM more."""
    if found.verdict == Verdict.DOES_NOT_FIT:
        return f"{found.missing} more"
    mark = "" if found.verdict == Verdict.FITS else ", only just"
    if found.tokens_per_second is None:
        return f"fits{mark}"
    return f"{float(f'{found.tokens_per_second:.3g}'):,.0f} tokens/s{mark}"

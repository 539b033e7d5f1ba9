"""A table of models and machines shows whether each model fits on each machine, and how fast it
trains. This file also finds the largest model for a machine, and the machines for a model. No
torch.

Whether a model fits is judged by the leanest plan of the job. Speeds are simulated with a plan that
is chosen as for a run, but among fewer ways (`quick` of `choose`, which costs a few per cent of
speed at most).

A table is about the optimizer of the settings. With `any_optimizer`, each cell is about the first
of `OPTIMIZERS` with which the model fits.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.settings import Optimizer, TrainConfig
from engine.errors import ConfigError
from engine.fit.memory_items import MEMORY, PartName
from engine.fit.needs import PART_WORDS, Verdict, least_needs, measured_rates, needs_of
from engine.machine.known_machines import KnownMachine, machines, with_figures
from engine.machine.read_machine import Machine
from engine.model.catalog import CatalogEntry, catalog
from engine.model.shape import ModelShape
from engine.planes.moments import KINDS
from engine.words import GIB

HERE = "This machine"
SHOWN = ("RTX 4090", "RTX 5090", "A100 80GB", "H100 SXM", "H200")
"""A table shows these machines if none are named."""
RAM_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
"""Machines are sold with these amounts of RAM, in GiB."""
OPTIMIZERS = tuple(KINDS)
"""These are all optimizers, from the one with the most exact moments to the smallest."""
BEST = "best"
"""A person who wants any optimizer chooses this."""

CSV_HEAD = (
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
    "optimizer",
)


@dataclass(frozen=True)
class Column:
    """A column is one machine of a table."""

    name: str
    machine: Machine


@dataclass(frozen=True)
class Cell:
    """A cell gives the memory and the speed of one model on one machine. Bytes are the least that
    the model takes.
    """

    verdict: Verdict
    host_bytes: int
    gpu_bytes: int | None
    missing: str
    """The text says which memory is too small, and by how many GiB; it is empty where the model
    fits.
    """
    tokens_per_second: float | None = None
    """It is None where the model does not fit, where speeds were not requested, or where no rates
    of the machine are known.
    """
    estimated: bool = True
    """The speed comes from the card's specification; it is not measured."""
    optimizer: Optimizer = "adamw"
    """The cell is about this optimizer."""
    any_optimizer: bool = False
    """The optimizer is the first that fits, or the last if none does; the settings do not say it.
    """


@dataclass(frozen=True)
class Row:
    """A row is one model with its cells, in the order of the columns."""

    entry: CatalogEntry
    parameters: int
    active_parameters: int
    cells: tuple[Cell, ...]


def columns(names: Sequence[str], here: Machine) -> tuple[Column, ...]:
    """Returns the columns of this machine and of the known machines with exactly these names, which
    have their typical RAM. Raises ConfigError for a name that is not known.
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
    any_optimizer: bool = False,
) -> list[Row]:
    """Returns a row for each model that the settings of `config` suit. The models are all of the
    catalog if none are given. timed: whether to include speeds, which take a few hundredths of a
    second per cell.
    """
    rows = []
    for entry in catalog() if models is None else models:
        shape = entry.shape(config.model.dtype)
        if shape is None:
            continue
        try:
            cells = tuple(
                cell(config, shape, column.machine, timed, any_optimizer) for column in shown
            )
        except ConfigError:  # such as rows that are longer than the model's positions
            continue
        rows.append(Row(entry, shape.parameter_count, shape.active_parameters, cells))
    return rows


def cell(
    config: TrainConfig,
    shape: ModelShape,
    machine: Machine,
    timed: bool = True,
    any_optimizer: bool = False,
) -> Cell:
    """Returns the cell of `shape` on `machine` with the settings of `config`. Raises ConfigError
    where the settings contradict the model.
    """
    if not any_optimizer:
        return _cell(config, shape, machine, timed)
    # Only a cell that fits is timed, so those that are passed over take hardly any time.
    cells = (_cell(each, shape, machine, timed) for each in _of_each_optimizer(config))
    for found in cells:
        if found.verdict != Verdict.DOES_NOT_FIT:
            break
    return replace(found, any_optimizer=True)


@functools.lru_cache(maxsize=64)
def _of_each_optimizer(config: TrainConfig) -> tuple[TrainConfig, ...]:
    """Returns the settings with each of `OPTIMIZERS`."""
    return tuple(config.with_values({"train.optimizer": optimizer}) for optimizer in OPTIMIZERS)


def _cell(config: TrainConfig, shape: ModelShape, machine: Machine, timed: bool) -> Cell:
    """Returns the cell with the optimizer of `config`."""
    least = least_needs(config, machine, shape)
    verdict = least.verdict(MEMORY)
    parts = {name: part for name, part in least.parts.items() if name in MEMORY}
    missing = ", ".join(
        f"{(part.total - part.known_limit) / GIB:,.0f} GiB of {PART_WORDS[name]}"
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
        verdict=verdict,
        host_bytes=parts[PartName.HOST].total,
        gpu_bytes=gpu_bytes,
        missing=missing,
        tokens_per_second=rate,
        estimated=measured_rates(config, machine) is None,
        optimizer=config.train.optimizer,
    )


def largest_model(
    config: TrainConfig, machine: Machine, any_optimizer: bool = False
) -> tuple[CatalogEntry, Cell] | None:
    """Returns the model of the catalog with the most parameters that `machine` can train, its speed
    included. Returns None where it can train none.
    """
    fitting = []
    for entry in catalog():
        shape = entry.shape(config.model.dtype)
        if shape is not None and _fits(config, shape, machine, any_optimizer):
            fitting.append((entry, shape))
    if not fitting:
        return None
    entry, shape = max(fitting, key=lambda found: found[1].parameter_count)
    return entry, cell(config, shape, machine, any_optimizer=any_optimizer)


@dataclass(frozen=True, eq=False)
class Offer:
    """An offer is a machine that can train a model, with the least RAM of `RAM_SIZES` that does."""

    known: KnownMachine
    ram_gib: float
    cell: Cell


def machines_for(
    config: TrainConfig, shape: ModelShape, timed: bool = True, any_optimizer: bool = False
) -> list[Offer]:
    """Returns the known machines that can train this model, least RAM first and then the fastest.
    Machines whose GPU cannot hold the model, and those that are not supported, are left out.
    """
    offers = []
    for known in machines():
        ram = _least_ram(config, shape, known, any_optimizer) if known.supported else None
        if ram is not None:
            found = cell(config, shape, known.machine(ram), timed, any_optimizer)
            offers.append(Offer(known, ram, found))
    return sorted(offers, key=lambda offer: (offer.ram_gib, -(offer.cell.tokens_per_second or 0)))


def _least_ram(
    config: TrainConfig, shape: ModelShape, known: KnownMachine, any_optimizer: bool
) -> float | None:
    """Returns the least GiB of RAM that suffice; None where none do. For a machine whose RAM is
    soldered, only the RAM that it has is considered.
    """
    sizes: Sequence[float] = (known.ram_gib,) if known.unified else RAM_SIZES
    for ram in sizes:
        if _fits(config, shape, with_figures(known.machine(ram), ram_gib=ram), any_optimizer):
            return ram
    return None


def _fits(config: TrainConfig, shape: ModelShape, machine: Machine, any_optimizer: bool) -> bool:
    try:
        found = cell(config, shape, machine, timed=False, any_optimizer=any_optimizer)
    except ConfigError:
        return False
    return found.verdict != Verdict.DOES_NOT_FIT


# ---------------------------------------------------------------------- words and files


def as_csv(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """Returns a line for each model and machine, with figures in bytes and tokens a second."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for row in rows:
        for column, found in zip(shown, row.cells):
            writer.writerow(_csv_line(row, column, found))
    return text.getvalue()


def _csv_line(row: Row, column: Column, found: Cell) -> tuple[object, ...]:
    gpus = column.machine.gpus
    speed = found.tokens_per_second
    return (
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
        "" if speed is None else round(speed, 1),
        found.estimated,
        found.optimizer,
    )


def as_dicts(rows: Sequence[Row], shown: Sequence[Column]) -> list[dict[str, Any]]:
    """Returns plain data of every row, for tools and the screen."""
    return [_row_as_dict(row, shown) for row in rows]


def _row_as_dict(row: Row, shown: Sequence[Column]) -> dict[str, Any]:
    cells = zip(shown, row.cells)
    return {
        "id": row.entry.id,
        "title": row.entry.title,
        "family": row.entry.family,
        "parameters": row.parameters,
        "active_parameters": row.active_parameters,
        "cells": {column.name: _cell_as_dict(found) for column, found in cells},
    }


def _cell_as_dict(found: Cell) -> dict[str, Any]:
    return {
        "verdict": found.verdict.value,
        "host_bytes": found.host_bytes,
        "gpu_bytes": found.gpu_bytes,
        "missing": found.missing,
        "tokens_per_second": found.tokens_per_second,
        "estimated": found.estimated,
        "optimizer": found.optimizer,
    }


def as_text(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """Returns the table for the terminal: tokens a second where a model fits, and the missing
    memory where it does not.
    """
    lines = [["model", *(column.name for column in shown)]]
    lines += [[row.entry.title, *map(cell_in_words, row.cells)] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    return "\n".join(_aligned(cells, widths) for cells in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(cells, widths)).rstrip()


def cell_in_words(found: Cell) -> str:
    """Returns a cell in words, such as "1,240 tokens/s", "fits" or "83 GiB of RAM more". If it is
    about any optimizer, the last word says how the moments are kept, as in "fits, bf16".
    """
    kept = f", {KINDS[found.optimizer]}" if found.any_optimizer else ""
    if found.verdict == Verdict.DOES_NOT_FIT:
        return f"{found.missing} more{kept}"
    return speed_in_words(found) + kept


def speed_in_words(found: Cell) -> str:
    """Returns how fast a model that fits is, in words: "1,240 tokens/s, only just" or "fits"."""
    mark = "" if found.verdict == Verdict.FITS else ", only just"
    if found.tokens_per_second is None:
        return f"fits{mark}"
    return f"{float(f'{found.tokens_per_second:.3g}'):,.0f} tokens/s{mark}"

"""These functions find what to do instead of a job that does not fit: the largest model for a
machine, smaller models of a kind, and the machines for a model. Whether one fits is judged as in
the table of models (`model_table`). No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.known_machines import KnownMachine, machines, with_figures
from engine.machine.read_machine import Machine
from engine.planning.fit.model_table import (
    HERE,
    Cell,
    Column,
    Row,
    cell,
    rows_of,
    table_shape,
)
from engine.planning.fit.requirements import FitStatus
from engine.planning.shape.catalog import CatalogEntry, catalog
from engine.planning.shape.model_shape import ModelShape

RAM_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
"""Amounts of RAM with which machines are sold, in GiB."""


def largest_model(
    config: TrainConfig,
    machine: Machine,
    any_optimizer: bool = False,
    rows: Iterable[Row] | None = None,
) -> tuple[CatalogEntry, Cell] | None:
    """Returns the model of the catalog with the most parameters that `machine` can train, its speed
    included. Returns None where it can train none. `rows` are those of this machine alone, if they
    are known. Raises ConfigError as `table_shape` does.
    """
    if rows is None:
        column = Column(HERE, machine)
        rows = rows_of(config, (column,), timed=False, any_optimizer=any_optimizer)
    fitting = [row for row in rows if row.cells[0].status != FitStatus.DOES_NOT_FIT]
    if not fitting:
        return None
    entry = max(fitting, key=lambda row: row.parameters).entry
    shape = table_shape(entry, config)
    assert shape is not None  # since it has a row
    return entry, cell(config, shape, machine, any_optimizer=any_optimizer)


def smaller_models(
    config: TrainConfig,
    shape: ModelShape,
    machine: Machine,
    count: int,
    is_offered: Callable[[CatalogEntry], bool],
) -> list[CatalogEntry]:
    """Returns the largest models of the catalog that are smaller than `shape` and that `machine`
    can train, of those that are offered: those of the same kind of model first, at most `count`.
    Raises ConfigError as `table_shape` does.
    """
    known = [(entry, table_shape(entry, config)) for entry in filter(is_offered, catalog())]
    smaller = [
        (entry, other)
        for entry, other in known
        if other is not None and other.parameter_count < shape.parameter_count
    ]
    smaller.sort(
        key=lambda each: (each[1].model_type != shape.model_type, -each[1].parameter_count)
    )
    fitting = (entry for entry, other in smaller if _fits(config, other, machine, False))
    return list(itertools.islice(fitting, count))


@dataclass(frozen=True, eq=False)
class FittingMachine:
    """An offer is a machine that can train a model, with the least RAM of `RAM_SIZES` that does."""

    known: KnownMachine
    ram_gib: float
    cell: Cell


def machines_for(
    config: TrainConfig, shape: ModelShape, timed: bool = True, any_optimizer: bool = False
) -> list[FittingMachine]:
    """Returns the known machines that can train this model, least RAM first and then the fastest.
    Machines whose GPU cannot hold the model, and those that are not supported, are left out.
    """
    offers = []
    for known in machines():
        ram = _least_ram(config, shape, known, any_optimizer) if known.supported else None
        if ram is not None:
            found = cell(config, shape, known.machine(ram), timed, any_optimizer)
            offers.append(FittingMachine(known, ram, found))
    return sorted(offers, key=lambda offer: (offer.ram_gib, -(offer.cell.tokens_per_second or 0)))


def _least_ram(
    config: TrainConfig, shape: ModelShape, known: KnownMachine, any_optimizer: bool
) -> float | None:
    """Returns the least GiB of RAM that suffice; None where none do. For a machine whose RAM is
    soldered, only the RAM that it has is considered. No machine is offered less RAM than its card
    has memory, since hardly one is sold so.
    """
    card = known.memory_mib / 1024
    sizes: Sequence[float] = [size for size in RAM_SIZES if size >= 0.9 * card]
    if known.unified:
        sizes = (known.ram_gib,)
    for ram in sizes:
        if _fits(config, shape, with_figures(known.machine(ram), ram_gib=ram), any_optimizer):
            return ram
    return None


def _fits(config: TrainConfig, shape: ModelShape, machine: Machine, any_optimizer: bool) -> bool:
    try:
        found = cell(config, shape, machine, timed=False, any_optimizer=any_optimizer)
    except ConfigError:
        return False
    return found.status != FitStatus.DOES_NOT_FIT

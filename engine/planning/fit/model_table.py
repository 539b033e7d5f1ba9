"""A table of models and machines shows whether each model fits on each machine, and how fast it
trains. No torch.

Whether a model fits is judged by the minimum-memory plan of the job. Speeds are simulated with a
plan that is chosen as for a run, but among fewer candidates (`coarse` of `choose`, which costs up
to a tenth of the speed).

A table is about the method and the optimizer of the settings: all weights are trained, or adapters
beside every linear layer. With `any_optimizer`, each cell is about the first
of `TRIED` with which the model fits, and its words say the whole way: how moments are kept,
whether gradients are kept on the device, and whether two blocks share an input.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.adapters import SAVE_MODULES, TARGET_PARAMETERS, TARGETS, Adapters
from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.config.settings import TrainConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError
from engine.machine.device import measured_rates
from engine.machine.known_machines import machines
from engine.machine.read_machine import Machine
from engine.planning.fit.memory_items import MEMORY, PartName
from engine.planning.fit.requirements import (
    PART_WORDS,
    FitStatus,
    minimum_requirements,
    requirements_of,
)
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.catalog import CatalogEntry, catalog
from engine.planning.shape.model_shape import ModelShape
from engine.text import GIB, counted, in_gib, in_seconds

HERE = "This machine"
SHOWN = ("RTX 4090", "RTX 5090", "A100 80GB", "H100 SXM", "H200")
"""Machines that a table shows if none are named."""
TRIED: tuple[Optimizer, ...] = (ADAMW, *OPTIMIZERS[ADAMW].smaller)
"""Optimizers that are tried where a table is about any, the one with the most exact moments first.
"""
BEST = "best"
"""Choice of a person who wants any optimizer."""

CSV_HEAD = (
    "model",
    "family",
    "parameters",
    "active_parameters",
    "trained_parameters",
    "whole_parameters",
    "method",
    "machine",
    "ram_bytes_available",
    "gpu_bytes_free",
    "verdict",
    "host_bytes",
    "gpu_bytes",
    "missing",
    "tokens_per_second",
    "step_seconds",
    "estimated",
    "optimizer",
    "gradients_on_gpu",
    "offload_pairs",
)
KEPT_ON_GPU, PAIRS = "GPU gradients", "pairs"
"""Words of cells where the plan of their speed takes less RAM by such means."""
LEGEND = (
    f"{KEPT_ON_GPU}: gradients wait on the GPU until they are applied; {PAIRS}: only every "
    "second block keeps its input."
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

    status: FitStatus
    host_bytes: int
    gpu_bytes: int | None
    missing: str
    """Which memory is too small, and by how many GiB; empty where the model fits."""
    tokens_per_second: float | None = None
    """Speed; None where the model does not fit, where speeds were not requested, or where no rates
    of the machine are known.
    """
    step_seconds: float | None = None
    """Seconds of a step; None as above."""
    estimated: bool = True
    """Whether the speed comes from the card's specification and is not measured."""
    optimizer: Optimizer = ADAMW
    """Optimizer of the cell."""
    method: str = "full"
    """Method of training of the cell (`train.method`)."""
    any_optimizer: bool = False
    """Whether the optimizer is the first that fits, or the last if none does; the settings do not
    say it.
    """
    gradients_on_gpu: bool | None = None
    """Whether the plan of the speed keeps gradients on the GPU; it is None where no plan was
    made.
    """
    offload_pairs: bool | None = None
    """Whether that plan keeps the input of every second block; None as above."""

    @property
    def savings(self) -> tuple[str, ...]:
        """What the plan of the speed does to take less RAM, in the words of `LEGEND`."""
        found = ((KEPT_ON_GPU, self.gradients_on_gpu), (PAIRS, self.offload_pairs))
        return tuple(word for word, is_used in found if is_used)


@dataclass(frozen=True)
class Row:
    """A row is one model with its cells, in the order of the columns."""

    entry: CatalogEntry
    parameters: int
    """Number of parameters of the model, without adapters."""
    active_parameters: int
    trained_parameters: int
    """Number of parameters that are trained: all of the model, or those of adapters."""
    whole_parameters: int
    """Number of parameters of the checkpoint: those of the model, and what reads images or sound
    beside it.
    """
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


def rows_of(
    config: TrainConfig,
    shown: Sequence[Column],
    models: Iterable[CatalogEntry] | None = None,
    timed: bool = True,
    any_optimizer: bool = False,
) -> Iterator[Row]:
    """Yields a row for each model that the settings of `config` suit. The models are all of the
    catalog if none are given. timed: whether to include speeds, which take a few hundredths of a
    second per cell. Raises ConfigError as `table_shape` does.
    """
    for entry in catalog() if models is None else models:
        shape = table_shape(entry, config)
        if shape is None:
            continue
        try:
            cells = tuple(
                cell(config, shape, column.machine, timed, any_optimizer) for column in shown
            )
        except ConfigError:  # such as rows that are longer than the model's positions
            continue
        own = own_parameters(shape, config)
        active = shape.active_parameters - (shape.parameter_count - own)
        whole = own + shape.untouched_numel
        yield Row(entry, own, active, shape.trained_count, whole, cells)


def table_shape(entry: CatalogEntry, config: TrainConfig) -> ModelShape | None:
    """Returns the shape of a model of the catalog as `config` trains it, or None where it has no
    counts in the dtype.

    Raises ConfigError for parts of a model, and for adapters that are not plain: which they are
    depends on the names of the model's layers.
    """
    adapters = config.train.parts
    if isinstance(adapters, Parts):
        raise ConfigError(
            "train.method",
            "parts have other names in each model, so there is no table of them; set it to full or "
            "lora, or check one model.",
        )
    if adapters is not None and not adapters.is_plain:
        raise ConfigError(
            _not_plain(adapters),
            "a table counts adapters of every linear layer, without dropout, stacked experts and "
            "modules that are trained whole; leave it out, or check one model.",
        )
    return entry.shape(config.model.dtype, adapters=adapters)


def own_parameters(shape: ModelShape, config: TrainConfig) -> int:
    """Returns how many parameters the model of a table has, without adapters."""
    beside = 0 if config.train.parts is None else shape.trained_count
    return shape.parameter_count - beside


def _not_plain(adapters: Adapters) -> str:
    """Returns the first setting by which adapters are not plain."""
    if adapters.dropout:
        return "train.lora_dropout"
    if adapters.target_parameters:
        return TARGET_PARAMETERS
    return SAVE_MODULES if adapters.save_modules else TARGETS


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
        if found.status != FitStatus.DOES_NOT_FIT:
            break
    return replace(found, any_optimizer=True)


@functools.lru_cache(maxsize=64)
def _of_each_optimizer(config: TrainConfig) -> tuple[TrainConfig, ...]:
    """Returns the settings with each of `TRIED`."""
    return tuple(config.with_values({"train.optimizer": optimizer}) for optimizer in TRIED)


def _cell(config: TrainConfig, shape: ModelShape, machine: Machine, timed: bool) -> Cell:
    """Returns the cell with the optimizer of `config`."""
    least = minimum_requirements(config, machine, shape)
    status = least.status(MEMORY)
    parts = {name: part for name, part in least.parts.items() if name in MEMORY}
    missing = ", ".join(
        f"{_missing_gib(part.total - part.known_limit)} GiB of {PART_WORDS[name]}"
        for name, part in parts.items()
        if part.status == FitStatus.DOES_NOT_FIT
    )
    rate = seconds = choices = None
    if timed and status != FitStatus.DOES_NOT_FIT:
        requirements = requirements_of(config, machine, shape, coarse=True)
        choices = requirements.chosen.choices
        seconds = requirements.step_seconds or None
        if seconds:
            rate = config.train.batch_size * config.row_tokens / seconds
    gpu_bytes = parts[PartName.GPU].total if PartName.GPU in parts else None
    return Cell(
        status=status,
        host_bytes=parts[PartName.HOST].total,
        gpu_bytes=gpu_bytes,
        missing=missing,
        tokens_per_second=rate,
        step_seconds=seconds,
        estimated=measured_rates(config, machine) is None,
        optimizer=config.train.optimizer,
        method=config.train.method,
        gradients_on_gpu=choices.gradients.gradients_on_gpu if choices else None,
        offload_pairs=_keeps_pairs(shape, choices) if choices else None,
    )


def _missing_gib(size: int) -> str:
    """Returns how many GiB are missing, never zero."""
    gib = size / GIB
    return f"{gib:,.0f}" if gib >= 1 else f"{max(gib, 0.1):.1f}"


def _keeps_pairs(shape: ModelShape, choices: PlanChoices) -> bool:
    """Returns whether any block keeps no input because two of them share one."""
    return bool(choices.activations.seconds_of_pairs(len(shape.blocks)))


# ---------------------------------------------------------------------- words and files


def as_csv(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """Returns a line for each model and machine, with figures in bytes and tokens a second."""
    return "".join(f"{part}\n" for part in csv_parts(rows, shown))


def csv_parts(rows: Iterable[Row], shown: Sequence[Column]) -> Iterator[str]:
    """Yields the first line of the file, and then the lines of each row. None ends in a break."""
    yield _in_csv([CSV_HEAD])
    for row in rows:
        yield _in_csv([_csv_line(row, *each) for each in zip(shown, row.cells)])


def _in_csv(lines: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().removesuffix("\n")


def _csv_line(row: Row, column: Column, found: Cell) -> tuple[object, ...]:
    gpus = column.machine.gpus
    speed = found.tokens_per_second
    return (
        row.entry.id,
        row.entry.family,
        row.parameters,
        row.active_parameters,
        row.trained_parameters,
        row.whole_parameters,
        found.method,
        column.name,
        column.machine.ram_available,
        gpus[0].free if gpus else "",
        found.status,
        found.host_bytes,
        "" if found.gpu_bytes is None else found.gpu_bytes,
        found.missing,
        "" if speed is None else round(speed, 1),
        "" if found.step_seconds is None else round(found.step_seconds, 3),
        found.estimated,
        found.optimizer,
        "" if found.gradients_on_gpu is None else found.gradients_on_gpu,
        "" if found.offload_pairs is None else found.offload_pairs,
    )


def counts_text(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """Returns how many of the models each machine can train, as in "Of 73 models, this many fit:
    RTX 4090 18, H200 40.", in one sentence.
    """
    fitting = [0] * len(shown)
    for row in rows:
        for at, found in enumerate(row.cells):
            fitting[at] += found.status != FitStatus.DOES_NOT_FIT
    counts = ", ".join(f"{column.name} {count}" for column, count in zip(shown, fitting))
    return f"Of {counted(len(rows), 'model')}, this many fit: {counts}."


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
        "trained_parameters": row.trained_parameters,
        "whole_parameters": row.whole_parameters,
        "cells": {column.name: _cell_as_dict(found) for column, found in cells},
    }


def _cell_as_dict(found: Cell) -> dict[str, Any]:
    return {
        "verdict": found.status.value,
        "host_bytes": found.host_bytes,
        "gpu_bytes": found.gpu_bytes,
        "missing": found.missing,
        "tokens_per_second": found.tokens_per_second,
        "step_seconds": found.step_seconds,
        "method": found.method,
        "estimated": found.estimated,
        "optimizer": found.optimizer,
        "gradients_on_gpu": found.gradients_on_gpu,
        "offload_pairs": found.offload_pairs,
    }


def as_text(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """Returns the table for the terminal: parameters, and then tokens a second where a model fits,
    and the missing memory where it does not.
    """
    lines = [["model", "parameters", *(column.name for column in shown)]]
    lines += [[row.entry.title, _in_billions(row), *map(cell_text, row.cells)] for row in rows]
    return _aligned(lines)


def as_details(rows: Sequence[Row]) -> str:
    """Returns a table of one machine for the terminal: the memory that each model takes at least,
    the time of a step where it is known, and the speed. All models fit.
    """
    lines = [["model", "parameters", "RAM", "GPU memory", "a step", "speed"]]
    for row in rows:
        (found,) = row.cells
        gpu, seconds = found.gpu_bytes, found.step_seconds
        memory = [in_gib(found.host_bytes), "" if gpu is None else in_gib(gpu)]
        time = "" if seconds is None else in_seconds(seconds)
        words = [_in_billions(row), *memory, time, cell_text(found)]
        lines.append([row.entry.title, *words])
    return _aligned(lines)


def _in_billions(row: Row) -> str:
    """Returns the parameters of a row, such as "8.03 B"; with those of the whole checkpoint where
    it has more, as in "7.62 of 8.29 B".
    """
    own, whole = (f"{count / 1e9:,.2f}" for count in (row.parameters, row.whole_parameters))
    return f"{own} B" if row.parameters == row.whole_parameters else f"{own} of {whole} B"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns lines of cells as text in columns."""
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    return "\n".join(_padded(cells, widths) for cells in lines)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(cells, widths)).rstrip()


def method_text(config: TrainConfig) -> str:
    """Returns what is trained in a table, as in "all weights"."""
    if config.train.method == "full":
        return "all weights"
    return f"adapters (LoRA) of rank {config.train.lora_rank} beside every linear layer"


def cell_text(found: Cell) -> str:
    """Returns a cell in words, such as "1,240 tokens/s", "fits" or "83 GiB of RAM more". If it is
    about any optimizer, the last words name the way, as in "fits, bf16" or "1,930 tokens/s, only
    just, 8 bits, GPU gradients, pairs" (`LEGEND`).
    """
    words = ("", OPTIMIZERS[found.optimizer].format, *found.savings)
    way = ", ".join(words) if found.any_optimizer else ""
    if found.status == FitStatus.DOES_NOT_FIT:
        return f"{found.missing} more{way}"
    return speed_text(found) + way


def speed_text(found: Cell) -> str:
    """Returns how fast a model that fits is, in words: "1,240 tokens/s, only just" or "fits"."""
    mark = "" if found.status == FitStatus.FITS else ", only just"
    if found.tokens_per_second is None:
        return f"fits{mark}"
    return f"{float(f'{found.tokens_per_second:.3g}'):,.0f} tokens/s{mark}"

"""What the Hardware tab says: this machine as it is, the models that it and known machines can
train, the machines for a model, and the measurement of this machine. Plain data for `hardware.js`;
answers are remembered by what they depend on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.form.settings_form import describe_error
from app.pages.measuring import probe
from app.session.jobs import Job
from app.session.session import Session
from app.view.hardware_words import (
    and_gpu_memory,
    cell_detail,
    cell_words,
    free_memory_words,
    gpu_memory_words,
    in_billions,
    known_in_words,
    machine_facts,
    rates_in_words,
    rounded_rate,
    speed_words,
)
from app.words import in_bytes
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError
from engine.fit.model_table import (
    HERE,
    SHOWN,
    Cell,
    Column,
    Row,
    as_csv,
    as_dicts,
    columns,
    largest_model,
    machines_for,
    table,
)
from engine.fit.needs import Verdict
from engine.machine.known_machines import KnownMachine, known_machine, known_rates, machines
from engine.machine.rates import Rates, measured_at, stored_rates
from engine.machine.read_machine import Machine, read_machine
from engine.model.catalog import CatalogEntry, catalog, entry_of
from engine.model.shape import ModelShape

DEFAULTS = {"rows": 32, "tokens": 1024, "dtype": "bfloat16"}
FIELDS = {"rows": "train.batch_size", "tokens": "data.max_seq_len", "dtype": "model.dtype"}
MOST_ROWS = 1 << 16
"""Of a step, in the table: with more, a column takes minutes."""
RAM_GRAIN, GPU_GRAIN = 256 << 20, 64 << 20
"""What is free is rounded down to these, so that a table is not made anew for every page that a
program takes.
"""
GPU_WORK_STATES = ("preparing", "running", "pausing", "paused", "stopping", "saving")
MOST_MACHINES = 12
"""In one table, beside this one."""


def choices() -> dict[str, Any]:
    """What can be chosen in the tab: models, machines with the sources of their figures, and the
    settings to begin with.
    """
    return {
        "here": HERE,
        "defaults": DEFAULTS,
        "most_rows": MOST_ROWS,
        "most_machines": MOST_MACHINES,
        "shown": [known.name for known in _supported() if known.name in SHOWN],
        "machines": [known_in_words(known) for known in _supported()],
        "models": [
            {
                "id": entry.id,
                "title": entry.title,
                "family": entry.family,
                "published": entry.published,
                "also": list(entry.also),
            }
            for entry in catalog()
        ],
    }


class Hardware:
    """Answers for one session. All methods may be called from any thread; those that compute take
    up to seconds.
    """

    def __init__(
        self,
        session: Session,
        read: Callable[..., Machine] = read_machine,
        measure: Callable[..., str] = probe,
    ):
        """`read` and `measure` are those of the engine; tests give their own."""
        self._session, self._read, self._measure = session, read, measure
        self._job: Job | None = None
        self._kept: Machine | None = None
        self._rows = functools.lru_cache(maxsize=256)(_rows_of)
        self._largest = functools.lru_cache(maxsize=64)(_largest_of)
        self._offers = functools.lru_cache(maxsize=64)(machines_for)

    # ------------------------------------------------------------------ this machine

    def about(self) -> dict[str, Any]:
        """This machine as it is now, and the measurement under way, if there is one. The table is
        of the same reading.
        """
        machine = self._read(self._session.runs_dir)
        self._kept = _settled(machine)
        job, why_not = self._job, self.why_not_measure()
        return {
            "machine": machine_facts(machine, bool(why_not)),
            "rates": _rates(machine),
            "why_not_measure": why_not,
            "job": job.to_dict() if job is not None and job.state == "working" else None,
        }

    def why_not_measure(self) -> str:
        """The sentence beside a Measure that cannot be pressed; empty where it can."""
        working = self._others_at_work()
        return (
            (
                f"{working} is under way: it shares the processor and the memory that would be "
                "measured. Measure when it is over."
            )
            if working
            else ""
        )

    def measure(self) -> Job:
        """Measure this machine in some ten seconds and keep its rates. Raises RunError while a run
        or another job is at work. A run that starts meanwhile ends the measurement.
        """
        reason = self.why_not_measure()
        if reason:
            raise RunError(reason)

        def go_on(job: Job) -> None:
            job.check()
            if self._session.active_id is not None:
                raise RunError(
                    "A run was started, so the measurement was given up; the rates are as they "
                    "were."
                )

        job = self._session.jobs.start(
            "The measurement of this machine", lambda job: self._measure(job, lambda: go_on(job))
        )
        self._job = job
        return job

    def _others_at_work(self) -> str:
        """The run that is at work on this machine, in this process or in another; empty where none
        is.
        """
        if self._session.active_id is not None:
            return self._session.active_id
        return next((run.id for run in self._session.runs() if run.state in GPU_WORK_STATES), "")

    # ------------------------------------------------------------------ models x machines

    def column(self, settings: Mapping[str, Any], name: str, timed: bool) -> dict[str, Any]:
        """One machine of the table: its cells by model id, with speeds if `timed`. Raises
        ConfigError for a machine that is not known and for settings that no run could have,
        RunError for what is no setting.
        """
        (column,) = self._columns([name])
        rows = self._rows(read_settings(settings), column, timed, _measured(column.machine))
        return {
            "name": name,
            "memory": free_memory_words(column.machine),
            "cells": {
                row["id"]: cell
                | {"words": cell_words(found.cells[0]), "detail": cell_detail(found.cells[0])}
                for found, row in zip(rows, as_dicts(rows, (column,)))
                for cell in row["cells"].values()
            },
            "counts": {
                row.entry.id: {"parameters": row.parameters, "active": row.active_parameters}
                for row in rows
            },
        }

    def csv(self, settings: Mapping[str, Any], names: Sequence[str], models: Sequence[str]) -> str:
        """The rows of `models`, in this order, on the machines of `names`. Raises as `column` does."""
        config, shown = read_settings(settings), self._columns(names)
        by_machine = [
            {
                row.entry.id: row
                for row in self._rows(config, column, True, _measured(column.machine))
            }
            for column in shown
        ]
        rows = []
        for model in models:
            if any(model not in found for found in by_machine):
                raise RunError(f"{model!r} is no row of this table.")
            first = by_machine[0][model]
            rows.append(
                Row(
                    first.entry,
                    first.parameters,
                    first.active_parameters,
                    tuple(found[model].cells[0] for found in by_machine),
                )
            )
        return as_csv(rows, shown)

    def largest(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The largest model that this machine can train, as a sentence and an id (None where it can
        train none).
        """
        config = read_settings(settings)
        found = self._largest(config, self._here(), _measured(self._here()))
        job = f"{config.train.batch_size:,} rows of {config.data.max_seq_len:,} tokens a step in {config.model.dtype}"
        if found is None:
            return {
                "id": None,
                "sentence": f"No model of the catalog fits this machine with {job}. Fewer or shorter rows take "
                "less; the bundled starter fits anywhere.",
            }
        entry, cell = found
        shape = _shape(entry, config)
        speed = (
            ""
            if cell.tokens_per_second is None
            else f", at about {rounded_rate(cell.tokens_per_second)} tokens/s{' (estimated)' if cell.estimated else ''}"
        )
        tight = ", only just" if cell.verdict == Verdict.TIGHT else ""
        return {
            "id": entry.id,
            "sentence": f"{entry.title} ({in_billions(shape.parameter_count)} parameters): {job} take "
            f"{in_bytes(cell.host_bytes)} of RAM{and_gpu_memory(cell)}{tight}{speed}.",
        }

    def offers(self, settings: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Known machines that would train `model`, an id or a title of the catalog. Raises RunError
        for another.
        """
        config, entry = read_settings(settings), _entry(model)
        shape = _shape(entry, config)
        try:
            found = self._offers(config, shape)
        except ConfigError as error:
            raise RunError(describe_error(error)) from None
        return {
            "id": entry.id,
            "title": entry.title,
            "parameters": in_billions(shape.parameter_count),
            "source": entry.source,
            "offers": [
                {
                    "name": offer.known.name,
                    "ram": f"{offer.ram_gib:,} GiB",
                    "gpu": gpu_memory_words(offer.known),
                    "speed": speed_words(offer.cell),
                    "tight": offer.cell.verdict == Verdict.TIGHT,
                    "note": offer.known.note,
                }
                for offer in found
            ],
        }

    def _columns(self, names: Sequence[str]) -> tuple[Column, ...]:
        if not 0 < len(names) <= MOST_MACHINES + 1:
            raise RunError(
                f"{len(names)} machines are asked for; a table shows up to {MOST_MACHINES} beside "
                "this one."
            )
        unknown = set(names) - {HERE, *(known.name for known in machines())}
        if unknown:
            raise RunError(f"{min(unknown)!r} is not a known machine; choose one of the list.")
        here, *known = columns([name for name in names if name != HERE], self._here())
        others = iter(known)
        return tuple(here if name == HERE else next(others) for name in names)

    def _here(self) -> Machine:
        if self._kept is None:
            self._kept = _settled(self._read(self._session.runs_dir))
        return self._kept


def read_settings(settings: Mapping[str, Any]) -> TrainConfig:
    """The job that machines are asked about: `rows` a step, `tokens` a row and `dtype`, as DEFAULTS
    has them where they are left out. Raises RunError for what is none.
    """
    values = {name: settings.get(name, default) for name, default in DEFAULTS.items()}
    if isinstance(values["rows"], int) and values["rows"] > MOST_ROWS:
        raise RunError(
            f"Rows a step: {values['rows']:,} is too many for a table; at most {MOST_ROWS:,}."
        )
    tree: dict[str, Any] = {
        "name": "table",
        "model": {"source": "any model"},
        "data": {"source": "any data set"},
    }
    try:
        return TrainConfig.from_dict(tree).with_values(
            {FIELDS[name]: value for name, value in values.items()}
        )
    except ConfigError as error:
        raise RunError(describe_error(error)) from None


def _rows_of(config: TrainConfig, column: Column, timed: bool, _rates: Rates | None) -> list[Row]:
    return table(config, (column,), timed=timed)


def _largest_of(
    config: TrainConfig, machine: Machine, _rates: Rates | None
) -> tuple[CatalogEntry, Cell] | None:
    return largest_model(config, machine)


def _rates(machine: Machine) -> dict[str, Any]:
    """What plans are made with, in words."""
    device = machine.gpus[0].name if machine.gpus else "CPU"
    measured = stored_rates(device)
    estimated = known_rates(machine) if measured is None else None
    return rates_in_words(
        machine,
        measured,
        measured_at(device) if measured is not None else None,
        estimated,
        known_machine(machine) if estimated is not None else None,
    )


def _measured(machine: Machine) -> Rates | None:
    """Rates that were measured here, which speeds depend on: what is remembered must not outlive
    them.
    """
    return stored_rates(machine.gpus[0].name) if machine.here and machine.gpus else None


def _entry(model: str) -> CatalogEntry:
    wanted = model.strip()
    found = entry_of(wanted) or next(
        (entry for entry in catalog() if entry.title.lower() == wanted.lower()), None
    )
    if found is None:
        raise RunError(f"{wanted!r} is not in the catalog; choose one of the list.")
    return found


def _shape(entry: CatalogEntry, config: TrainConfig) -> ModelShape:
    shape = entry.shape(config.model.dtype)
    if shape is None:
        raise RunError(
            f"{entry.title} is too large to be counted in {config.model.dtype}; choose bfloat16."
        )
    return shape


def _supported() -> list[KnownMachine]:
    return [known for known in machines() if known.supported]


def _settled(machine: Machine) -> Machine:
    """`machine` without what changes from one reading to the next and decides nothing."""
    gpus = tuple(
        replace(
            gpu,
            free=gpu.free // GPU_GRAIN * GPU_GRAIN,
            temperature=None,
            power=None,
            pcie_generation=None,
            pcie_width=None,
        )
        for gpu in machine.gpus
    )
    return replace(
        machine,
        ram_available=machine.ram_available // RAM_GRAIN * RAM_GRAIN,
        gpus=gpus,
        disk_free=0,
        disk_path="",
        notes=(),
    )

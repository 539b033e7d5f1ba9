"""Data for Hardware: the current state of this machine, the models that it and known machines can
train, the machines for a model, and the measurement of this machine.

Answers are plain data for `hardware.js`, and are cached by the values that they depend on.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from app.form.settings_form import describe_error
from app.labels import in_bytes
from app.pages.hardware.hardware_text import (
    and_gpu_memory,
    cell_detail,
    cell_labels,
    free_memory_text,
    free_then_text,
    gpu_memory_text,
    in_billions,
    known_machine_text,
    machine_facts,
    moments_text,
    rate_text,
    rates_text,
    rounded_rate,
)
from app.pages.hardware.kept_rows import rows_with_files
from app.pages.hardware.measuring import probe
from app.session.jobs import Job
from app.session.session import Session
from app.shared.steady_machine import steadied
from engine.config.optimizers import ADAMW, OPTIMIZERS
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError
from engine.machine.known_machines import KnownMachine, known_machine, known_rates, machines
from engine.machine.rates import Rates, measured_at, stored_rates
from engine.machine.read_machine import Machine, read_machine
from engine.planning.fit.fitting_machines import FittingMachine, largest_model, machines_for
from engine.planning.fit.model_table import (
    BEST,
    HERE,
    SHOWN,
    Cell,
    Column,
    Row,
    as_csv,
    as_dicts,
    columns,
    method_text,
    own_parameters,
    rows_of,
    table_shape,
)
from engine.planning.fit.requirements import FitStatus
from engine.planning.shape.catalog import CatalogEntry, catalog, entry_of
from engine.planning.shape.model_shape import ModelShape

P = ParamSpec("P")
T = TypeVar("T")
DEFAULTS = {
    "method": "full",
    "rows": 32,
    "tokens": 1024,
    "dtype": "bfloat16",
    "optimizer": ADAMW,
}
FIELDS = {
    "method": "train.method",
    "rows": "train.batch_size",
    "tokens": "data.max_seq_len",
    "dtype": "model.dtype",
    "optimizer": "train.optimizer",
}
BEST_LABEL = "AdamW, the largest moments that fit"
METHODS = {"full": "all weights", "lora": "LoRA"}
"""Methods of training for which the largest model is told."""
MOST_ROWS = 1 << 16
"""Largest number of rows per step in the table's settings: with more, a column takes minutes."""
RAM_GRAIN, GPU_GRAIN = 256 << 20, 64 << 20
"""Bytes to whose multiples free memory is rounded down, so that the table is not rebuilt whenever
some program allocates a page of memory.
"""
GPU_WORK_STATES = ("preparing", "running", "pausing", "paused", "stopping", "saving")
WAIT_SECONDS = 0.1
"""Seconds after which a measurement that waits for its turn looks whether it was cancelled."""
MOST_MACHINES = 12
"""Largest number of machines in one table in addition to this one."""


def choices() -> dict[str, Any]:
    """Returns the models and machines that can be chosen on the page.

    They come with the sources of the machines' figures, and the initial settings.
    """
    return {
        "here": HERE,
        "defaults": DEFAULTS,
        "optimizers": {name: each.label for name, each in OPTIMIZERS.items()} | {BEST: BEST_LABEL},
        "most_rows": MOST_ROWS,
        "most_machines": MOST_MACHINES,
        "shown": [known.name for known in _supported() if known.name in SHOWN],
        "machines": [known_machine_text(known) for known in _supported()],
        "models": [_model_choice(entry) for entry in catalog()],
        "counts": _first_counts(),
    }


@functools.cache
def _first_counts() -> dict[str, dict[str, int]]:
    """Returns the parameters of the models with the initial settings: no machine changes them, so
    the table has its rows before the first column is found.
    """
    config = read_settings({})
    shapes = ((entry.id, table_shape(entry, config)) for entry in catalog())
    return {
        model_id: _counts(own_parameters(shape, config), shape.untouched_numel)
        for model_id, shape in shapes
        if shape is not None
    }


def _counts(own: int, untouched: int) -> dict[str, int]:
    return {"parameters": own, "whole": own + untouched}


def _model_choice(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "title": entry.title,
        "family": entry.family,
        "published": entry.published,
        "also": list(entry.also),
    }


class Hardware:
    """Prepares the page’s answers for one session. Any thread may call; some calls take seconds."""

    def __init__(
        self,
        session: Session,
        read: Callable[..., Machine] = read_machine,
        measure: Callable[..., str] = probe,
    ):
        """Takes the functions that read and measure this machine; tests pass their own."""
        self._session = session
        self._read = read
        self._measure = measure
        self._job: Job | None = None
        """Job of the latest measurement."""
        self._kept: Machine | None = None
        """Reading of the machine on which the table is based."""
        self._kept_at = 0.0
        """Unix time of that reading."""
        self._alone = threading.Lock()
        """Held by what computes for seconds: beside it, measured rates would be far too low."""
        self._rows = functools.lru_cache(maxsize=256)(_in_turn(self._alone, _rows_of))
        self._offers = functools.lru_cache(maxsize=64)(_in_turn(self._alone, machines_for))

    # ------------------------------------------------------------------ this machine

    def about(self, fresh: bool = False) -> dict[str, Any]:
        """Returns the current state of this machine, the reading that the table is based on, and
        the measurement in progress, if any.

        The table stays with its reading until free memory has changed by more than it wavers, or
        one that is `fresh` is asked for.
        """
        machine = self._read(self._session.runs_dir)
        self._keep(machine, fresh)
        job = self._job
        why_not = self.why_not_measure()
        return {
            "machine": machine_facts(machine, bool(why_not)),
            "rates": _rates(machine),
            "table": {"at": self._kept_at, "memory": free_then_text(self._here())},
            "why_not_measure": why_not,
            "job": job.to_dict() if job is not None and job.state == "working" else None,
        }

    def why_not_measure(self) -> str:
        """Returns why this machine cannot be measured now; the text is empty if it can."""
        working = self._others_at_work()
        if not working:
            return ""
        return f"{working} is training, which would slow the measurement. Measure when it is over."

    def measure(self) -> Job:
        """Starts the job that measures this machine in about ten seconds and stores its rates.

        Raises RunError while a run or another job is active. A run that starts meanwhile ends the
        measurement.
        """
        reason = self.why_not_measure()
        if reason:
            raise RunError(reason)

        def go_on(job: Job) -> None:
            job.check()
            if self._session.active_id is not None:
                raise RunError(
                    "A run was started, so the measurement ended. The earlier speeds are kept."
                )

        def work(job: Job) -> str:
            while not self._alone.acquire(timeout=WAIT_SECONDS):
                go_on(job)
            try:
                return self._measure(job, lambda: go_on(job))
            finally:
                self._alone.release()

        job = self._session.jobs.start("The measurement of this machine", work)
        self._job = job
        return job

    def _others_at_work(self) -> str:
        """Returns the name of the run that is active on this machine, in this process or another.

        It is empty if no run is active.
        """
        if self._session.active_id is not None:
            return self._session.name_of_run(self._session.active_id)
        return next((run.name for run in self._session.runs() if run.state in GPU_WORK_STATES), "")

    # ------------------------------------------------------------------ models x machines

    def column(self, settings: Mapping[str, Any], name: str, timed: bool) -> dict[str, Any]:
        """Returns one machine's column of the table: its cells by model id, with speeds if `timed`.

        Raises ConfigError for an unknown machine and for settings that no run could have, and
        RunError for an unknown setting.
        """
        (column,) = self._columns([name])
        job = read_settings(settings), wants_any_optimizer(settings)
        rows = self._rows(*job, column, timed, _measured(column.machine))
        cells = {}
        counts = {}
        for row, plain in zip(rows, as_dicts(rows, (column,))):
            counts[row.entry.id] = _counts(row.parameters, row.whole_parameters - row.parameters)
            texts = {"labels": cell_labels(row.cells[0]), "detail": cell_detail(row.cells[0])}
            for cell in plain["cells"].values():
                cells[plain["id"]] = cell | texts
        return {
            "name": name,
            "memory": free_memory_text(column.machine),
            "cells": cells,
            "counts": counts,
        }

    def csv(self, settings: Mapping[str, Any], names: Sequence[str], models: Sequence[str]) -> str:
        """Returns the rows of `models`, in this order, on the machines `names`, as the text of a
        CSV file.

        Raises as `column` does, and RunError for a model that the table does not have.
        """
        job = read_settings(settings), wants_any_optimizer(settings)
        shown = self._columns(names)
        by_machine = []
        for column in shown:
            found_rows = self._rows(*job, column, True, _measured(column.machine))
            by_machine.append({row.entry.id: row for row in found_rows})
        rows = []
        for model in models:
            if any(model not in found for found in by_machine):
                raise RunError(f"{model!r} is no row of this table.")
            first = by_machine[0][model]
            cells = tuple(found[model].cells[0] for found in by_machine)
            rows.append(replace(first, cells=cells))
        return as_csv(rows, shown)

    def largest(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the largest models that this machine can train with all weights and with LoRA:
        both in one `text`, each as a sentence, and the `id` of the one with the method of the
        settings, None if it can train none.
        """
        given = read_settings(settings)
        asked = given.train.method
        any_optimizer = wants_any_optimizer(settings)
        texts, sentences, ids = [], [], {}
        for method, words in METHODS.items():
            config = read_settings({**settings, "method": method})
            found = self._largest(config, any_optimizer)
            texts.append(f"{_size(found, config)} ({words})")
            sentences.append(_about_largest(found, config))
            ids[method] = None if found is None else found[0].id
        batch = f"{given.train.batch_size:,} rows of {given.data.max_seq_len:,} tokens"
        text = f"{' · '.join(texts)}, in batches of {batch}"
        return {"id": ids[asked], "text": text, "sentences": sentences}

    def _largest(
        self, config: TrainConfig, any_optimizer: bool
    ) -> tuple[CatalogEntry, Cell] | None:
        """Returns the largest model of this machine's column, with its speed."""
        column = Column(HERE, self._here())
        rows = self._rows(config, any_optimizer, column, False, _measured(column.machine))
        return largest_model(config, column.machine, any_optimizer, rows)

    def offers(self, settings: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Returns the known machines that could train `model`, which is an id or a title of the
        catalog.

        Raises RunError for an unknown model.
        """
        config = read_settings(settings)
        entry = _entry(model)
        shape = _shape(entry, config)
        try:
            found = self._offers(config, shape, any_optimizer=wants_any_optimizer(settings))
        except ConfigError as error:
            raise RunError(describe_error(error)) from None
        return {
            "id": entry.id,
            "title": entry.title,
            "parameters": _counted(shape, config),
            "source": entry.source,
            "offers": [_offer_texts(offer) for offer in found],
        }

    def _columns(self, names: Sequence[str]) -> tuple[Column, ...]:
        """Returns the columns of the machines `names`, in this order. Raises RunError for unknown
        ones.
        """
        if not 0 < len(names) <= MOST_MACHINES + 1:
            raise RunError(
                f"{len(names)} machines are asked for; a table shows up to {MOST_MACHINES} beside "
                "this one."
            )
        unknown = set(names) - {HERE, *(known.name for known in machines())}
        if unknown:
            raise RunError(f"{min(unknown)!r} is not a known machine; choose one of the list.")
        found = columns([name for name in names if name != HERE], self._here())
        by_name = {column.name: column for column in found}
        return tuple(by_name[name] for name in names)

    def _here(self) -> Machine:
        """Returns this machine as last read for the table."""
        if self._kept is None:
            self._keep(self._read(self._session.runs_dir))
        assert self._kept is not None  # it was just read
        return _without_free_memory(self._kept)

    def _keep(self, machine: Machine, fresh: bool = False) -> None:
        """Bases the table on what was just read, unless that says the same as before."""
        before, now = self._kept, steadied(machine, None if fresh else self._kept)
        is_same = before is not None and _without_free_memory(now) == _without_free_memory(before)
        if fresh or not is_same:
            self._kept, self._kept_at = now, time.time()


def read_settings(settings: Mapping[str, Any]) -> TrainConfig:
    """Returns the job that the table is about: `method`, `rows` per step, `tokens` per row, `dtype`
    and `optimizer`. The optimizer means nothing if the table is about any (`wants_any_optimizer`).

    DEFAULTS replace missing settings. Raises RunError for settings that no run could have.
    """
    values = {name: settings.get(name, default) for name, default in DEFAULTS.items()}
    if wants_any_optimizer(settings):
        values["optimizer"] = DEFAULTS["optimizer"]
    if isinstance(values["rows"], int) and values["rows"] > MOST_ROWS:
        raise RunError(
            f"Batch size: {values['rows']:,} is too large for a table; at most {MOST_ROWS:,}."
        )
    tree: dict[str, Any] = {
        "name": "table",
        "model": {"source": "any model"},
        "data": {"source": "any data set"},
    }
    by_field = {FIELDS[name]: value for name, value in values.items()}
    try:
        return TrainConfig.from_dict(tree).with_values(by_field)
    except ConfigError as error:
        raise RunError(describe_error(error)) from None


def wants_any_optimizer(settings: Mapping[str, Any]) -> bool:
    """Returns whether each cell of the table is about the first optimizer that fits."""
    return settings.get("optimizer") == BEST


def _in_turn(lock: threading.Lock, work: Callable[P, T]) -> Callable[P, T]:
    """Returns `work` so that it holds the lock."""

    def with_lock(*arguments: P.args, **options: P.kwargs) -> T:
        with lock:
            return work(*arguments, **options)

    return with_lock


def _rows_of(
    config: TrainConfig, any_optimizer: bool, column: Column, timed: bool, _rates: Rates | None
) -> list[Row]:
    """Returns the rows of one machine. The rates are only part of the key of the cached answer: the
    engine reads them itself.
    """

    def compute() -> Iterator[Row]:
        return rows_of(config, (column,), timed=timed, any_optimizer=any_optimizer)

    return rows_with_files(config, any_optimizer, column, timed, compute)


def _rates(machine: Machine) -> dict[str, Any]:
    """Returns the rates that plans use, as texts."""
    device = machine.gpus[0].name if machine.gpus else "CPU"
    measured = stored_rates(device)
    if measured is not None:
        return rates_text(machine, measured, measured_at(device), None, None)
    estimated = known_rates(machine)
    known = known_machine(machine) if estimated is not None else None
    return rates_text(machine, None, None, estimated, known)


def _measured(machine: Machine) -> Rates | None:
    """Returns the rates measured on this machine, or None for any other machine.

    Speeds depend on these rates, so a cached answer must not outlive them.
    """
    return stored_rates(machine.gpus[0].name) if machine.here and machine.gpus else None


def _entry(model: str) -> CatalogEntry:
    wanted = model.strip()
    with_title = (entry for entry in catalog() if entry.title.lower() == wanted.lower())
    found = entry_of(wanted) or next(with_title, None)
    if found is None:
        raise RunError(f"{wanted!r} is not in the catalog; choose one of the list.")
    return found


def _shape(entry: CatalogEntry, config: TrainConfig) -> ModelShape:
    shape = table_shape(entry, config)
    if shape is None:
        raise RunError(
            f"{entry.title} is too large to be counted in {config.model.dtype}; choose bfloat16."
        )
    return shape


def _counted(shape: ModelShape, config: TrainConfig) -> str:
    """Returns how many parameters the model of a table has, in billions."""
    own = own_parameters(shape, config)
    return in_billions(own, own + shape.untouched_numel)


def _size(found: tuple[CatalogEntry, Cell] | None, config: TrainConfig) -> str:
    if found is None:
        return "none"
    return f"{own_parameters(_shape(found[0], config), config) / 1e9:,.2g}B"


def _about_largest(found: tuple[CatalogEntry, Cell] | None, config: TrainConfig) -> str:
    """Returns a sentence on the largest model, and what it takes."""
    rows, tokens = config.train.batch_size, config.data.max_seq_len
    job = f"{rows:,} rows of {tokens:,} tokens in {config.model.dtype}"
    if config.train.method != "full":
        job += f", {method_text(config)}"
    if found is None:
        return f"No model of the catalog fits here with {job}. Fewer or shorter rows take less."
    entry, cell = found
    tight = ", and just fits" if cell.status == FitStatus.TIGHT else ""
    return (
        f"{entry.title} ({_counted(_shape(entry, config), config)} parameters), {job}: "
        f"{in_bytes(cell.host_bytes)} of RAM{and_gpu_memory(cell)} "
        f"{moments_text(cell)}{tight}{_and_speed(cell)}."
    )


def _and_speed(cell: Cell) -> str:
    if cell.tokens_per_second is None:
        return ""
    estimated = " (estimated)" if cell.estimated else ""
    return f", at about {rounded_rate(cell.tokens_per_second)} tokens/s{estimated}"


def _offer_texts(offer: FittingMachine) -> dict[str, Any]:
    return {
        "name": offer.known.name,
        "ram": f"{offer.ram_gib:,} GiB",
        "gpu": gpu_memory_text(offer.known),
        "speed": rate_text(offer.cell),
        "tight": offer.cell.status == FitStatus.TIGHT,
        "moments": moments_text(offer.cell) if offer.cell.any_optimizer else "",
        "note": offer.known.note,
    }


def _supported() -> list[KnownMachine]:
    return [known for known in machines() if known.supported]


def _without_free_memory(machine: Machine) -> Machine:
    """Returns `machine` without values that change with each reading but affect no answer."""
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
        findings=(),
    )

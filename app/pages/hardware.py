"""What the Hardware tab says: this machine as it is, the models that it and known machines can train, the machines for a
model, and the measurement of this machine. Plain data for `hardware.js`; answers are remembered by what they depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.form.settings_form import describe_error
from app.pages.measuring import probe
from app.session.jobs import Job
from app.session.session import Session
from app.words import GIB, in_bytes
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError
from engine.fit.model_table import (HERE, SHOWN, Cell, Column, Row, as_csv, as_dicts, cell_in_words, columns, largest_model,
                                    machines_for, table)
from engine.fit.needs import DOES_NOT_FIT, FITS, TIGHT_VERDICT
from engine.machine.gpus import GpuInfo
from engine.machine.known_machines import ADAMW_BYTES, KnownMachine, known_machine, known_rates, machines
from engine.machine.rates import Rates, measured_at, stored_rates
from engine.machine.read_machine import Machine, read_machine
from engine.model.catalog import CatalogEntry, catalog, entry_of
from engine.model.shape import ModelShape
from engine.words import counted

DEFAULTS = {"rows": 32, "tokens": 1024, "dtype": "bfloat16"}
FIELDS = {"rows": "train.batch_size", "tokens": "data.max_seq_len", "dtype": "model.dtype"}
MOST_ROWS = 1 << 16
"""Of a step, in the table: with more, a column takes minutes."""
RAM_GRAIN, GPU_GRAIN = 256 << 20, 64 << 20
"""What is free is rounded down to these, so that a table is not made anew for every page that a program takes."""
GPU_WORK_STATES = ("preparing", "running", "pausing", "paused", "stopping", "saving")
MOST_MACHINES = 12
"""In one table, beside this one."""
WORDS = {FITS: ("good", "fits"), TIGHT_VERDICT: ("warn", "just fits"), DOES_NOT_FIT: ("bad", "too large")}
FIGURES = {"memory_mib": "Memory", "memory_bandwidth": "Its bandwidth", "bf16_flops": "bf16 matrix products, peak",
           "best_bf16_flops": "Best that others measured", "link": "Link to the host", "host_bandwidth": "Bandwidth of RAM",
           "ram_gib": "RAM", "cpu_cores": "CPU cores", "power_watts": "Power"}


def choices() -> dict[str, Any]:
    """What can be chosen in the tab: models, machines with the sources of their figures, and the settings to begin with."""
    return {"here": HERE, "defaults": DEFAULTS, "most_rows": MOST_ROWS, "most_machines": MOST_MACHINES,
            "shown": [known.name for known in _supported() if known.name in SHOWN],
            "machines": [_known_in_words(known) for known in _supported()],
            "models": [{"id": entry.id, "title": entry.title, "family": entry.family, "published": entry.published,
                        "also": list(entry.also)} for entry in catalog()]}


class Hardware:
    """Answers for one session. All methods may be called from any thread; those that compute take up to seconds."""

    def __init__(self, session: Session, read: Callable[..., Machine] = read_machine, measure: Callable[..., str] = probe):
        """`read` and `measure` are those of the engine; tests give their own."""
        self._session, self._read, self._measure = session, read, measure
        self._job: Job | None = None
        self._kept: Machine | None = None
        self._rows = functools.lru_cache(maxsize=256)(_rows_of)
        self._largest = functools.lru_cache(maxsize=64)(_largest_of)
        self._offers = functools.lru_cache(maxsize=64)(machines_for)

    # ------------------------------------------------------------------ this machine

    def about(self) -> dict[str, Any]:
        """This machine as it is now, and the measurement under way, if there is one. The table is of the same reading."""
        machine = self._read(self._session.runs_dir)
        self._kept = _settled(machine)
        job, why_not = self._job, self.why_not_measure()
        return {"machine": _facts(machine, bool(why_not)), "rates": _rates_in_words(machine), "why_not_measure": why_not,
                "job": job.to_dict() if job is not None and job.state == "working" else None}

    def why_not_measure(self) -> str:
        """The sentence beside a Measure that cannot be pressed; empty where it can."""
        working = self._others_at_work()
        return (f"{working} is under way: it shares the processor and the memory that would be measured. Measure when it is "
                "over.") if working else ""

    def measure(self) -> Job:
        """Measure this machine in some ten seconds and keep its rates. Raises RunError while a run or another job is at
        work. A run that starts meanwhile ends the measurement."""
        reason = self.why_not_measure()
        if reason:
            raise RunError(reason)
        def go_on(job: Job) -> None:
            job.check()
            if self._session.active_id is not None:
                raise RunError("A run was started, so the measurement was given up; the rates are as they were.")

        job = self._session.jobs.start("The measurement of this machine", lambda job: self._measure(job, lambda: go_on(job)))
        self._job = job
        return job

    def _others_at_work(self) -> str:
        """The run that is at work on this machine, in this process or in another; empty where none is."""
        if self._session.active_id is not None:
            return self._session.active_id
        return next((run.id for run in self._session.runs() if run.state in GPU_WORK_STATES), "")

    # ------------------------------------------------------------------ models x machines

    def column(self, settings: Mapping[str, Any], name: str, timed: bool) -> dict[str, Any]:
        """One machine of the table: its cells by model id, with speeds if `timed`. Raises ConfigError for a machine that is
        not known and for settings that no run could have, RunError for what is no setting."""
        (column,) = self._columns([name])
        rows = self._rows(read_settings(settings), column, timed, _measured(column.machine))
        return {"name": name, "memory": _memory_words(column.machine), "cells": {
            row["id"]: cell | {"words": _cell_words(found.cells[0]), "detail": _detail(found.cells[0])}
            for found, row in zip(rows, as_dicts(rows, (column,))) for cell in row["cells"].values()},
            "counts": {row.entry.id: {"parameters": row.parameters, "active": row.active_parameters} for row in rows}}

    def csv(self, settings: Mapping[str, Any], names: Sequence[str], models: Sequence[str]) -> str:
        """The rows of `models`, in this order, on the machines of `names`. Raises as `column` does."""
        config, shown = read_settings(settings), self._columns(names)
        by_machine = [{row.entry.id: row for row in self._rows(config, column, True, _measured(column.machine))}
                      for column in shown]
        rows = []
        for model in models:
            if any(model not in found for found in by_machine):
                raise RunError(f"{model!r} is no row of this table.")
            first = by_machine[0][model]
            rows.append(Row(first.entry, first.parameters, first.active_parameters,
                            tuple(found[model].cells[0] for found in by_machine)))
        return as_csv(rows, shown)

    def largest(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The largest model that this machine can train, as a sentence and an id (None where it can train none)."""
        config = read_settings(settings)
        found = self._largest(config, self._here(), _measured(self._here()))
        job = f"{config.train.batch_size:,} rows of {config.data.max_seq_len:,} tokens a step in {config.model.dtype}"
        if found is None:
            return {"id": None, "sentence": f"No model of the catalog fits this machine with {job}. Fewer or shorter rows take "
                                            "less; the bundled starter fits anywhere."}
        entry, cell = found
        shape = _shape(entry, config)
        speed = "" if cell.tokens_per_second is None else \
            f", at about {_rounded(cell.tokens_per_second)} tokens/s{' (estimated)' if cell.estimated else ''}"
        tight = ", only just" if cell.verdict == TIGHT_VERDICT else ""
        return {"id": entry.id, "sentence": f"{entry.title} ({_billions(shape.parameter_count)} parameters): {job} take "
                                            f"{in_bytes(cell.host_bytes)} of RAM{_gpu_words(cell)}{tight}{speed}."}

    def offers(self, settings: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Known machines that would train `model`, an id or a title of the catalog. Raises RunError for another."""
        config, entry = read_settings(settings), _entry(model)
        shape = _shape(entry, config)
        try:
            found = self._offers(config, shape)
        except ConfigError as error:
            raise RunError(describe_error(error)) from None
        return {"id": entry.id, "title": entry.title, "parameters": _billions(shape.parameter_count), "source": entry.source,
                "offers": [{"name": offer.known.name, "ram": f"{offer.ram_gib:,} GiB", "gpu": _memory(offer.known),
                            "speed": _speed_words(offer.cell), "tight": offer.cell.verdict == TIGHT_VERDICT,
                            "note": offer.known.note} for offer in found]}

    def _columns(self, names: Sequence[str]) -> tuple[Column, ...]:
        if not 0 < len(names) <= MOST_MACHINES + 1:
            raise RunError(f"{len(names)} machines are asked for; a table shows up to {MOST_MACHINES} beside this one.")
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
    """The job that machines are asked about: `rows` a step, `tokens` a row and `dtype`, as DEFAULTS has them where they are
    left out. Raises RunError for what is none."""
    values = {name: settings.get(name, default) for name, default in DEFAULTS.items()}
    if isinstance(values["rows"], int) and values["rows"] > MOST_ROWS:
        raise RunError(f"Rows a step: {values['rows']:,} is too many for a table; at most {MOST_ROWS:,}.")
    tree: dict[str, Any] = {"name": "table", "model": {"source": "any model"}, "data": {"source": "any data set"}}
    try:
        return TrainConfig.from_dict(tree).with_values({FIELDS[name]: value for name, value in values.items()})
    except ConfigError as error:
        raise RunError(describe_error(error)) from None


def _rows_of(config: TrainConfig, column: Column, timed: bool, _rates: Rates | None) -> list[Row]:
    return table(config, (column,), timed=timed)


def _largest_of(config: TrainConfig, machine: Machine, _rates: Rates | None) -> tuple[CatalogEntry, Cell] | None:
    return largest_model(config, machine)


def _measured(machine: Machine) -> Rates | None:
    """Rates that were measured here, which speeds depend on: what is remembered must not outlive them."""
    return stored_rates(machine.gpus[0].name) if machine.here and machine.gpus else None


def _entry(model: str) -> CatalogEntry:
    wanted = model.strip()
    found = entry_of(wanted) or next((entry for entry in catalog() if entry.title.lower() == wanted.lower()), None)
    if found is None:
        raise RunError(f"{wanted!r} is not in the catalog; choose one of the list.")
    return found


def _shape(entry: CatalogEntry, config: TrainConfig) -> ModelShape:
    shape = entry.shape(config.model.dtype)
    if shape is None:
        raise RunError(f"{entry.title} is too large to be counted in {config.model.dtype}; choose bfloat16.")
    return shape


def _supported() -> list[KnownMachine]:
    return [known for known in machines() if known.supported]


def _settled(machine: Machine) -> Machine:
    """`machine` without what changes from one reading to the next and decides nothing."""
    gpus = tuple(replace(gpu, free=gpu.free // GPU_GRAIN * GPU_GRAIN, temperature=None, power=None, pcie_generation=None,
                         pcie_width=None) for gpu in machine.gpus)
    return replace(machine, ram_available=machine.ram_available // RAM_GRAIN * RAM_GRAIN, gpus=gpus, disk_free=0, disk_path="",
                   notes=())


# ---------------------------------------------------------------------- in words

def _facts(machine: Machine, busy: bool) -> dict[str, Any]:
    """Pairs of name and text, and sentences."""
    limited = "a limit of its control group" if machine.ram_limit < machine.ram_total else "all that is built in"
    used = max(0, machine.ram_limit - machine.ram_available)
    pairs = [["Processor", f"{machine.cpu_name}, {counted(machine.cpu_cores, 'core')} usable"],
             ["RAM", f"{in_bytes(machine.ram_available)} free of {in_bytes(machine.ram_limit)} ({limited}); "
                     f"{in_bytes(used)} in use; swap is not counted"]]
    pairs += [[f"GPU {gpu.index}" if len(machine.gpus) > 1 else "GPU", _gpu(gpu)] for gpu in machine.gpus]
    pairs += [] if machine.gpus else [["GPU", "none: blocks compute on the CPU"]]
    pairs += [["Disk", f"{in_bytes(machine.disk_free)} free in {machine.disk_path}"]]
    notes = list(machine.notes)
    if len(machine.gpus) > 1:
        notes.append(f"One GPU computes: the first, {machine.gpus[0].name}.")
    if busy:
        notes.append("A run is under way: what it holds of RAM and GPU memory does not count as free.")
    return {"pairs": pairs, "notes": notes}


def _gpu(gpu: GpuInfo) -> str:
    words = [f"{gpu.name}, {in_bytes(gpu.free)} free of {in_bytes(gpu.total)}"]
    if gpu.driver:
        words.append(f"driver {gpu.driver}")
    now, most = (_bus(gpu.pcie_generation, gpu.pcie_width), _bus(gpu.pcie_generation_max, gpu.pcie_width_max))
    if now or most:
        words.append(f"{now or most} now, {most or now} at most")
    return "; ".join(words)


def _bus(generation: int | None, width: int | None) -> str:
    return f"PCIe {generation}.0 x{width}" if generation and width else ""


def _rates_in_words(machine: Machine) -> dict[str, Any]:
    """What plans are made with: `origin` is measured, estimated or unknown; `at` Unix seconds of the last measurement."""
    device = machine.gpus[0].name if machine.gpus else "CPU"
    rates = stored_rates(device)
    if rates is not None:
        said = "Measured on this machine." if machine.gpus else \
            "Measured on this machine, for the times of steps in float32; on the CPU nothing is chosen by speed."
        return {"origin": "measured", "said": said, "at": measured_at(device), "pairs": _rate_pairs(rates, bool(machine.gpus))}
    rates = known_rates(machine)
    if rates is not None:
        known = known_machine(machine)
        return {"origin": "estimated", "said": f"Estimated from the specification of the {known.name}. The first run, or "
                                               "Measure, replaces them by measured ones.", "at": None,
                "pairs": _rate_pairs(rates, True)}
    said = "Not known: this card is not among the known ones. The first run, or Measure, measures them." if machine.gpus else \
        "Not measured. Once they are, times of steps in float32 are predicted; nothing is chosen by speed on the CPU."
    return {"origin": "unknown", "said": said, "at": None, "pairs": []}


def _rate_pairs(rates: Rates, gpu: bool) -> list[list[str]]:
    host = ADAMW_BYTES * rates.adamw
    update = ["AdamW on the host", f"{rates.adamw / 1e9:,.3g} billion parameters/s ({host / 1e9:,.3g} GB/s of RAM)"]
    product = ["Matrix products", f"{rates.matmul / 1e12:,.3g} TFLOPS in bf16"]
    if not gpu:
        product[1] = f"{rates.matmul / 1e9:,.3g} GFLOPS in fp32"
        return [product, ["Norms, activations, sums", f"{rates.device_memory / 1e9:,.3g} GB/s, read and written"], update]
    return [["Bus, both ways at once", f"{rates.h2d / 1e9:,.3g} GB/s to the GPU, {rates.d2h / 1e9:,.3g} GB/s back"],
            product, ["GPU memory", f"{rates.device_memory / 1e9:,.4g} GB/s"], update,
            ["AdamW beside a busy bus", f"{rates.adamw_busy / 1e9:,.3g} billion parameters/s"]]


def _known_in_words(known: KnownMachine) -> dict[str, Any]:
    values = {"memory_mib": _memory(known), "memory_bandwidth": f"{known.memory_bandwidth / 1e9:,.4g} GB/s",
              "bf16_flops": f"{known.bf16_flops / 1e12:,.4g} TFLOPS", "link": f"{known.link}, "
              f"{known.link_bandwidth / 1e9:,.3g} GB/s one way", "host_bandwidth": f"{known.host_bandwidth / 1e9:,.3g} GB/s, "
              f"{known.host}", "ram_gib": f"{known.ram_gib:g} GiB", "cpu_cores": str(known.cpu_cores),
              "power_watts": f"{known.power_watts} W"}
    if known.best_bf16_flops is not None:
        values["best_bf16_flops"] = f"{known.best_bf16_flops / 1e12:,.4g} TFLOPS"
    return {"name": known.name, "maker": known.maker, "memory": f"{known.ram_gib:g} GiB RAM", "note": known.note,
            "figures": [{"name": FIGURES[name], "value": value, "sources": list(known.sources.get(name, ()))}
                        for name, value in values.items()]}


def _memory(known: KnownMachine) -> str:
    return "shared with RAM" if known.unified else f"{known.memory_mib / 1024:,.4g} GiB"


def _memory_words(machine: Machine) -> str:
    """Of a column's head: RAM and GPU memory that are free."""
    card = f", {machine.gpus[0].free / GIB:,.0f} GPU" if machine.gpus else ", no GPU"
    return f"{machine.ram_available / GIB:,.0f} GiB RAM{card}"


def _cell_words(found: Cell) -> dict[str, str]:
    """The verdict in a word, with its tone, and the speed."""
    tone, word = WORDS[found.verdict]
    return {"tone": tone, "word": word, "speed": _speed_words(found)}


def _speed_words(found: Cell) -> str:
    return "" if found.tokens_per_second is None else f"about {_rounded(found.tokens_per_second)} tokens/s"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.3g} billion"


def _rounded(rate: float) -> str:
    return f"{float(f'{rate:.3g}'):,.0f}"


def _detail(found: Cell) -> str:
    """Of one cell, in a sentence or two."""
    takes = f"Takes {in_bytes(found.host_bytes)} of RAM{_gpu_words(found)} at least."
    if found.missing:
        return f"{takes} Missing: {found.missing}."
    if found.tokens_per_second is None:
        return takes
    origin = "estimated from the specification" if found.estimated else "from measured rates"
    return f"{takes} {cell_in_words(found)}, {origin}."


def _gpu_words(found: Cell) -> str:
    return "" if found.gpu_bytes is None else f" and {in_bytes(found.gpu_bytes)} of GPU memory"

"""Everything between a configuration and the first step: data, model, fit, plan, planes and the
engine over them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.restore import load_newest_checkpoint, newest_checkpoint
from engine.checkpoints.weights import initialise, load_pretrained
from engine.config.settings import TrainConfig
from engine.data.loader import PreparedData, prepare_data
from engine.data.preview import check_first_rows
from engine.data.rows import padded_length
from engine.data.tokenise import Execution
from engine.errors import CheckpointError, FitError, GpuMemoryError, RunError
from engine.fit.choose import Chosen, choose
from engine.fit.cost import MicroBatch, largest_product
from engine.fit.job import Job, Target
from engine.fit.needs import RUNTIME_GROWTH_BYTES, Resident, SessionFacts, Verdict, rates_of_steps
from engine.fit.predict import predicted_step
from engine.fit.predicted import predictions
from engine.fit.report import estimate
from engine.fit.sizes import CUDA_CONTEXT_BYTES
from engine.machine.cgroups import give_back_free_memory, private_memory, sample_host_memory
from engine.machine.rates import Rates, store_rates, stored_cpu_rates, stored_rates
from engine.machine.read_machine import read_machine
from engine.model.build import build_model
from engine.model.hub import fetch
from engine.model.measure_shape import shape_of
from engine.model.pretrained_files import load_config, load_tokenizer
from engine.model.shape import ModelShape
from engine.model.units import StreamedModel
from engine.plan.ops import Span
from engine.plan.text import grid
from engine.plan.waits import as_records
from engine.runs.events import (
    DataPrepared,
    FitReported,
    JobProgressed,
    LogLine,
    PlanBuilt,
    PlanSimulated,
)
from engine.runs.folder import RunFolder
from engine.runs.recorder import RunRecorder
from engine.runtime.backend import Backend
from engine.runtime.ceilings import measure
from engine.runtime.generate import Sampler
from engine.runtime.host_adamw import AdamWSettings, HostAdamW
from engine.runtime.host_store import HostStore
from engine.runtime.open_backend import open_backend
from engine.runtime.streaming_engine import EngineSettings, StreamingEngine
from engine.train.explain import note_memory
from engine.train.memory_account import MemoryAccount, data_bytes
from engine.train.memory_shortage import ShareName
from engine.train.memory_watch import PeakMemory
from engine.train.resume import changed_settings

PROBE_SECONDS = 0.1
"""For each figure."""


@dataclass(frozen=True)
class Planned:
    """What was decided before anything was allocated."""

    chosen: Chosen
    predicted: dict[str, float]
    """By `engine.fit.predicted.predictions`."""
    simulated: PlanSimulated | None
    """A step, as predicted for these choices; None where no rates are known."""
    account: MemoryAccount
    ceiling: float | None = None
    """FLOPs a second of large matrix products, as measured on the device."""

    @property
    def seconds(self) -> float | None:
        return self.simulated and self.simulated.seconds


@dataclass
class Prepared:
    """What the trainer drives. `step`: optimizer steps already in the planes. `loading_peak`: the
    most bytes of host memory while weights were read, None where they came from a checkpoint.
    """

    model: StreamedModel
    tokenizer: Any
    data: PreparedData
    backend: Backend
    store: HostStore
    adamw: HostAdamW
    engine: StreamingEngine
    planned: Planned
    total_steps: int
    step: int = 0
    loading_peak: int | None = None

    @property
    def chosen(self) -> Chosen:
        return self.planned.chosen

    def change_total_steps(self, steps: int) -> None:
        """The run is to end after another number of steps."""
        self.total_steps = steps

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Draws answers from the weights as they are; every step must be applied."""
        return Sampler(self.engine)

    def close(self) -> None:
        """Give host and device memory back, each part though another fails; nothing may be under
        way.
        """
        with contextlib.ExitStack() as parts:
            for part in (
                self.backend,
                self.store,
                self.adamw,
                self.engine,
            ):  # closed the other way round
                parts.callback(part.close)


class RecordedProgress:
    """Reports one job to the record, at most twice a second and always at its end."""

    def __init__(self, recorder: RunRecorder, job: str, check: Callable[[], None] | None = None):
        self._recorder, self._job, self._check = recorder, job, check
        self._last = 0.0

    def __call__(self, done: float, total: float, message: str = "") -> None:
        if self._check is not None:
            self._check()
        now = time.monotonic()
        if now - self._last >= 0.5 or done >= total:
            self._last = now
            self._recorder.emit(JobProgressed(self._job, done, total, message))


def prepare(
    config: TrainConfig,
    folder: RunFolder,
    recorder: RunRecorder,
    resume: bool,
    check: Callable[[], None],
) -> Prepared:
    """Build everything. `check` is called often and raises to give up early (a stop before the
    first step).

    Raises RamstreamError for what the user can mend: a model or data set that cannot be used, a job
    that does not fit.
    """
    download = RecordedProgress(recorder, "download", check)
    fetch(config.model.source, False, download, check)
    hf_config = load_config(config.model.source)
    tokenizer = load_tokenizer(config.model.source)
    model = build_model(hf_config, config.model)
    check()
    newest = (
        newest_checkpoint(folder.checkpoints_path) if resume else None
    )  # before anything is allocated
    if (
        config.model.init == "pretrained" and newest is None
    ):  # not waited for where model or data cannot be used
        check_first_rows(config.data)
        fetch(config.model.source, True, download, check)
    # Processes that read data are new ones, no forks, and gone before CUDA starts and before the
    # planes take the memory.
    problem = model.packing.problem_of(config.data.max_seq_len)
    problem = problem and f"{hf_config.model_type}: {problem}"
    data = prepare_data(
        config.data,
        tokenizer,
        config.train.seed,
        problem,
        Execution(RecordedProgress(recorder, "tokenise", check)),
    )
    recorder.emit(DataPrepared(data.summary))
    vocabulary = model.config.get_text_config().vocab_size
    if data.highest_id >= vocabulary:
        raise RunError(
            f"The tokenizer of {config.model.source} makes token {data.highest_id}, but the model "
            f"knows only {vocabulary}; use the tokenizer that belongs to the model."
        )
    state = newest.state if newest is not None else None
    total_steps = _total_steps(config, data)
    if newest is not None:
        if state["data"] != data.fingerprint:
            raise RunError(
                f"The data of run {folder.id} is no longer what it was trained on; restore "
                f"{config.data.title} or start a new run."
            )
        for sentence in changed_settings(config, folder.id, state, newest.step, total_steps):
            recorder.emit(LogLine("warning", sentence))
    backend = open_backend(config.engine.device)
    store = planned = None
    try:
        planned = _plan(config, folder, recorder, model, data, backend, state, check)
        chosen = planned.chosen
        check()
        on_device = backend.device.type != "cpu"
        store = HostStore(
            model.layouts,
            model.dtype,
            backend.register if on_device else None,
            backend.unregister if on_device else None,
        )
        account = planned.account
        account.holds(
            lambda: {ShareName.PLANES: store.allocated_bytes, ShareName.DATA: data_bytes(data)}
        )
        watched = account.watched(
            check, "nothing was trained yet" if state is None else "nothing is lost"
        )
        step, loading_peak = _fill(
            config, folder, recorder, model, store, backend, state is not None, watched
        )
        train = config.train
        settings = AdamWSettings(train.beta1, train.beta2, train.eps, train.weight_decay)
        adamw = HostAdamW(store, settings)
        tokens = chosen.micro_batch_size * padded_length(
            max(data.train.longest, data.eval.longest, 1), config.data.max_seq_len
        )
        engine = StreamingEngine(
            model,
            store,
            backend,
            EngineSettings(
                chosen.choices, tokens, chosen.loss_chunk, train.max_grad_norm, train.seed
            ),
            adamw,
        )
        account.holds(
            lambda: {
                ShareName.PLANES: store.allocated_bytes,
                ShareName.BOUNDARIES: engine.boundary_bytes,
                ShareName.DATA: data_bytes(data),
            },
            engine.state.fixed_bytes,
        )
        recorder.emit(
            PlanBuilt(
                chosen.choices.to_dict()
                | {
                    "micro_batch_size": chosen.micro_batch_size,
                    "loss_chunk": chosen.loss_chunk,
                    "predicted_seconds": planned.seconds,
                    "device_buffers": engine.state.fixed_bytes(),
                    "host_boundaries_bytes": engine.boundary_bytes,
                },
                grid(engine.plan),
            )
        )
        if planned.simulated is not None:
            recorder.emit(planned.simulated)
        return Prepared(
            model,
            tokenizer,
            data,
            backend,
            store,
            adamw,
            engine,
            planned,
            total_steps,
            step,
            loading_peak,
        )
    except BaseException as error:
        if planned is not None:
            note_memory(error, planned.account.note)
        if store is not None:
            store.close()
        backend.close()
        raise


def _total_steps(config: TrainConfig, data: PreparedData) -> int:
    if config.train.steps is not None:
        return config.train.steps
    return data.train.steps_of(config.train.epochs or 1.0, config.train.batch_size)


def _plan(
    config: TrainConfig,
    folder: RunFolder,
    recorder: RunRecorder,
    model: StreamedModel,
    data: PreparedData,
    backend: Backend,
    state: dict[str, Any] | None,
    check: Callable[[], None],
) -> Planned:
    """Judge the fit, record it, and choose. Raises FitError for what does not fit."""
    if backend.device.type != "cpu" and config.engine.gpu_memory_gib is not None:
        backend.limit_memory(
            max(0, config.engine.within_cap(backend.memory()["total"]) - CUDA_CONTEXT_BYTES)
        )
    give_back_free_memory()
    _first_resident.setdefault(backend.device.type, sample_host_memory()[0])
    rates = _measured(backend, recorder, check)
    give_back_free_memory()  # of measuring: what this program needs is read next
    shape = shape_of(model)
    rounding = (state.get("rounding") or {}) if state is not None else {}
    longest = padded_length(max(data.train.longest, data.eval.longest, 1), config.data.max_seq_len)
    machine = read_machine(folder.path)
    # What this program already has is part of what it needs; what an earlier session left on the
    # disk is replaced.
    machine = replace(
        machine,
        ram_available=machine.ram_available + private_memory(),
        disk_free=machine.disk_free
        + _bytes_under(folder.checkpoints_path)
        + _bytes_under(folder.export_path),
    )
    facts = SessionFacts(
        rounding, rates, _resident(backend.device.type), _total_steps(config, data)
    )
    planned_config = config.with_values({"data.max_seq_len": longest})
    report = estimate(planned_config, machine, shape, facts)
    recorder.emit(FitReported(report.to_dict()))
    if report.verdict == Verdict.DOES_NOT_FIT:
        raise FitError(" ".join([report.headline, *report.reasons[:2]]))
    device = backend.device.type
    limit = None
    if device != "cpu":
        # Peak and limit hold for the whole process: those of an earlier run are not this one's.
        backend.reset_peak()
        limit = (
            backend.memory()["free"] + CUDA_CONTEXT_BYTES
        )  # this process's context is there already
        if config.engine.gpu_memory_gib is not None:
            limit = config.engine.within_cap(limit)
            backend.limit_memory(limit - CUDA_CONTEXT_BYTES)
        else:
            backend.limit_memory(backend.memory()["total"])
    # The resumed run must continue bit for bit, however much memory there is now.
    target = Target(device, limit, sample_host_memory()[1], rates)
    chosen = choose(Job(shape, config, longest, rounding), target)
    product = largest_product(shape, chosen.micro_batch_size * longest)
    if device == "cpu":
        backend.share_work(product)
    simulated = _simulated(shape, chosen, rates, longest, device, config.data.packing)
    told = report.to_dict()
    account = MemoryAccount(
        told, backend, lambda: {ShareName.DATA: data_bytes(data)}, loading=state is None
    )
    return Planned(
        chosen,
        predictions(told, shape.checkpoint_bytes),
        simulated,
        account,
        _ceiling(stored_cpu_rates(product) if device == "cpu" else rates, shape, device),
    )


def _simulated(
    shape: ModelShape,
    chosen: Chosen,
    rates: Rates | None,
    row_length: int,
    device: str,
    packed: bool,
) -> PlanSimulated | None:
    rates = rates_of_steps(shape, chosen, rates, row_length, device)
    if rates is None:
        return None
    varlen = shape.varlen(packed, device)
    micro_batch = MicroBatch(chosen.micro_batch_size, row_length, varlen)
    plan, found = predicted_step(shape, chosen.choices, rates, micro_batch, device)
    spans = [Span(op, start, end) for op, start, end in zip(plan.ops, found.starts, found.ends)]
    return PlanSimulated(found.seconds, as_records(spans))


def _ceiling(rates: Rates | None, shape: ModelShape, device: str) -> float | None:
    """FLOPs a second of large matrix products; they are measured in float32 on a CPU and in
    bfloat16 on a GPU.
    """
    return (
        rates.matmul
        if rates is not None and shape.dtype == ("float32" if device == "cpu" else "bfloat16")
        else None
    )


def _measured(backend: Backend, recorder: RunRecorder, check: Callable[[], None]) -> Rates | None:
    """Rates of this machine: those kept, or measured now, which takes some seconds. On the CPU no
    choice depends on them.
    """
    if backend.device.type == "cpu":
        return None
    rates = stored_rates(backend.device_name)
    if rates is None:
        recorder.emit(
            LogLine(
                "info",
                "Measuring the bus, the device and the host once: plans are made with their rates. "
                "`launch.py bench` measures them again.",
            )
        )
        try:
            rates = measure(backend, PROBE_SECONDS, lambda what: check(), for_plans=True).rates()
        except (
            torch.OutOfMemoryError,
            GpuMemoryError,
            FitError,
        ):  # the plan is made with typical rates then
            return None
        finally:
            gc.collect()
            backend.reset_peak()
        store_rates(backend.device_name, rates)
    return rates


_first_resident: dict[str, int] = {}
"""RAM of this program when it first prepared a run, by device: what it has more now is libraries
that need not come again.
"""


def _resident(device: str) -> Resident:
    now = sample_host_memory()[0]
    return Resident(
        now, max(0, RUNTIME_GROWTH_BYTES[device] - max(0, now - _first_resident[device]))
    )


def _bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _fill(
    config: TrainConfig,
    folder: RunFolder,
    recorder: RunRecorder,
    model: StreamedModel,
    store: HostStore,
    backend: Backend,
    from_checkpoint: bool,
    check: Callable[[], None],
) -> tuple[int, int | None]:
    """Allocate and fill the planes; the step that they hold, and the most host memory while weights
    came from the model.
    """
    allocating, loading = (
        RecordedProgress(recorder, "allocate", check),
        RecordedProgress(recorder, "load_model", check),
    )
    peak = PeakMemory()
    store.allocate_weights(allocating)
    if not from_checkpoint:
        if config.model.init == "random":
            initialise(model, store, config.train.seed, backend.device, loading)
        else:
            load_pretrained(model, config.model.source, store, loading)
        loading_peak = peak.read()
        store.allocate_states(allocating)
        return 0, loading_peak
    store.allocate_states(allocating)
    found = load_newest_checkpoint(
        folder.checkpoints_path, store, model.persistent_buffers(), progress=loading
    )
    if found is None:
        raise CheckpointError(
            f"The checkpoints of run {folder.id} vanished while they were being read."
        )
    for sentence in found.skipped:
        recorder.emit(LogLine("warning", sentence))
    return found.step, None


def program_version() -> str:
    """The installed version, or the one in the source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ramstream")
    except PackageNotFoundError:
        return os.environ.get("RAMSTREAM_VERSION", "source")

"""Everything between a configuration and the first step is prepared here.

- The model's settings and tokenizer are fetched and read, and the streamed model is built without
  weights. Weights are downloaded only once the first rows of the data set are known to be usable.
- The data set becomes rows of tokens. The processes that read data are spawned, not forked, and end
  before CUDA starts and before the planes are allocated.
- A resumed run must have the same data, and settings that are compatible with its earlier steps.
- The backend is opened and the plan is made (`engine.train.planning`).
- The planes are allocated, and filled from the newest checkpoint, from the model's weights, or at
  random.
- The engine is built on top of the planes. If any of this fails, everything is freed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.checkpoints.checkpoint import CheckpointInfo
from engine.checkpoints.restore import load_newest_checkpoint, newest_checkpoint
from engine.checkpoints.weights import initialise, load_pretrained
from engine.config.settings import TrainConfig
from engine.data.loader import PreparedData, prepare_data
from engine.data.preview import check_first_rows
from engine.data.rows import padded_length
from engine.data.tokenise import Execution
from engine.errors import CheckpointError, RunError
from engine.fit.choose import Chosen
from engine.fit.cost import MEASURED_FLOPS_FORMULA
from engine.model.build import build_model
from engine.model.hub import fetch
from engine.model.pretrained_files import load_config, load_tokenizer
from engine.model.units import StreamedModel
from engine.plan.text import grid
from engine.runs.events import DataPrepared, PlanBuilt, RunStarted
from engine.runtime.backend import Backend
from engine.runtime.generate import Sampler
from engine.runtime.host_adamw import AdamWSettings, HostAdamW
from engine.runtime.host_store import HostStore
from engine.runtime.open_backend import open_backend
from engine.runtime.streaming_engine import EngineSettings, StreamingEngine
from engine.train.explain import note_memory
from engine.train.memory_account import data_bytes
from engine.train.memory_shortage import ShareName
from engine.train.memory_watch import PeakMemory
from engine.train.planning import Planned, TrainingJob, make_plan
from engine.train.resume import changed_settings
from engine.train.session import Session


@dataclass
class Prepared:
    """A `Prepared` holds everything that the trainer needs for its steps.

    The planes hold the state after `step` optimizer steps. `loading_peak` is the peak of host
    memory in bytes while weights were read, or None if they came from a checkpoint.
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
        """Changes the number of steps after which the run ends."""
        self.total_steps = steps

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Returns a sampler that uses the current weights; every submitted step must be applied."""
        return Sampler(self.engine)

    def close(self) -> None:
        """Frees host and device memory; no work may be in progress.

        Each part is closed even if closing another one fails.
        """
        # The stack closes in reverse order: the engine uses the optimizer, and both use the planes.
        with contextlib.ExitStack() as parts:
            for part in (self.backend, self.store, self.adamw, self.engine):
                parts.callback(part.close)


def prepare(session: Session, resume: bool, check: Callable[[], None]) -> Prepared:
    """Builds everything that a run needs.

    `check` is called often; it raises an exception to give up early, for example when the run is
    stopped before the first step. Raises RamstreamError for what the user can fix: a model or data
    set that cannot be used, or a job that does not fit.
    """
    config = session.config
    download = session.progress("download", check)
    fetch(config.model.source, False, download, check)
    hf_config = load_config(config.model.source)
    tokenizer = load_tokenizer(config.model.source)
    model = build_model(hf_config, config.model)
    check()
    # A damaged checkpoint is found before anything is allocated.
    newest = newest_checkpoint(session.folder.checkpoints_path) if resume else None
    if config.model.init == "pretrained" and newest is None:
        # An unusable data set should be reported before a large download.
        check_first_rows(config.data)
        fetch(config.model.source, True, download, check)
    problem = model.packing.problem_of(config.data.max_seq_len)
    if problem:
        problem = f"{hf_config.model_type}: {problem}"
    data = prepare_data(
        config.data,
        tokenizer,
        config.train.seed,
        problem,
        Execution(session.progress("tokenise", check)),
    )
    session.recorder.emit(DataPrepared(data.summary))
    _refuse_foreign_tokens(config, model, data)
    total_steps = _total_steps(config, data)
    if newest is not None:
        _compare_with_checkpoint(session, newest, data, total_steps)
    backend = open_backend(config.engine.device)
    rounding = (newest.state.get("rounding") if newest is not None else None) or {}
    job = TrainingJob(model, data, backend, total_steps, newest is not None, rounding)
    with contextlib.ExitStack() as allocated:
        allocated.callback(backend.close)
        return _build(session, job, tokenizer, check, allocated)


def _build(
    session: Session,
    job: TrainingJob,
    tokenizer: Any,
    check: Callable[[], None],
    allocated: contextlib.ExitStack,
) -> Prepared:
    """Plans the job, then allocates and fills what the plan needs.

    What is allocated is registered in `allocated`, which frees it if a later part fails.
    """
    config, model, data, backend = session.config, job.model, job.data, job.backend
    planned = make_plan(session, job, check)
    account = planned.account
    try:
        check()
        on_device = backend.device.type != "cpu"
        store = HostStore(
            model.layouts,
            model.dtype,
            backend.register if on_device else None,
            backend.unregister if on_device else None,
        )
        allocated.callback(store.close)
        account.holds(
            lambda: {ShareName.PLANES: store.allocated_bytes, ShareName.DATA: data_bytes(data)}
        )
        kept = "nothing is lost" if job.is_resumed else "nothing was trained yet"
        step, loading_peak = _fill(session, job, store, account.watched(check, kept))
        train = config.train
        hyperparameters = AdamWSettings(train.beta1, train.beta2, train.eps, train.weight_decay)
        adamw = HostAdamW(store, hyperparameters)
        engine = _engine(config, job, planned.chosen, store, adamw)
        account.holds(
            lambda: {
                ShareName.PLANES: store.allocated_bytes,
                ShareName.BOUNDARIES: engine.boundary_bytes,
                ShareName.DATA: data_bytes(data),
            },
            engine.state.fixed_bytes,
        )
        session.recorder.emit(_plan_built(planned, engine))
        if planned.simulated is not None:
            session.recorder.emit(planned.simulated)
    except BaseException as error:
        # The use of memory must be noted while the memory is still held.
        note_memory(error, account.note)
        raise
    allocated.pop_all()  # from here on, `Prepared.close` frees everything
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        data=data,
        backend=backend,
        store=store,
        adamw=adamw,
        engine=engine,
        planned=planned,
        total_steps=job.total_steps,
        step=step,
        loading_peak=loading_peak,
    )


def _engine(
    config: TrainConfig, job: TrainingJob, chosen: Chosen, store: HostStore, adamw: HostAdamW
) -> StreamingEngine:
    longest_row = max(job.data.train.longest, job.data.eval.longest, 1)
    tokens = chosen.micro_batch_size * padded_length(longest_row, config.data.max_seq_len)
    train = config.train
    settings = EngineSettings(
        chosen.choices, tokens, chosen.loss_chunk, train.max_grad_norm, train.seed
    )
    return StreamingEngine(job.model, store, job.backend, settings, adamw)


def _plan_built(planned: Planned, engine: StreamingEngine) -> PlanBuilt:
    """Returns the event that records the plan and what the engine allocated for it."""
    chosen = planned.chosen
    details = {
        "micro_batch_size": chosen.micro_batch_size,
        "loss_chunk": chosen.loss_chunk,
        "predicted_seconds": planned.seconds,
        "device_buffers": engine.state.fixed_bytes(),
        "host_boundaries_bytes": engine.boundary_bytes,
    }
    return PlanBuilt(chosen.choices.to_dict() | details, grid(engine.plan))


def _refuse_foreign_tokens(config: TrainConfig, model: StreamedModel, data: PreparedData) -> None:
    """Raises RunError if the tokenizer produces tokens that the model does not know."""
    vocabulary = model.config.get_text_config().vocab_size
    if data.highest_id >= vocabulary:
        raise RunError(
            f"The tokenizer of {config.model.source} makes token {data.highest_id}, but the model "
            f"knows only {vocabulary}; use the tokenizer that belongs to the model."
        )


def _compare_with_checkpoint(
    session: Session, newest: CheckpointInfo, data: PreparedData, total_steps: int
) -> None:
    """Warns about settings that differ from those of the checkpoint.

    Raises RunError if the run cannot continue with these settings or this data.
    """
    if newest.state["data"] != data.fingerprint:
        raise RunError(
            f"The data of run {session.folder.id} is no longer what it was trained on; restore "
            f"{session.config.data.title} or start a new run."
        )
    told = changed_settings(
        session.config, session.folder.id, newest.state, newest.step, total_steps
    )
    for sentence in told:
        session.log("warning", sentence)


def _total_steps(config: TrainConfig, data: PreparedData) -> int:
    if config.train.steps is not None:
        return config.train.steps
    return data.train.steps_of(config.train.epochs or 1.0, config.train.batch_size)


def _fill(
    session: Session, job: TrainingJob, store: HostStore, check: Callable[[], None]
) -> tuple[int, int | None]:
    """Allocates and fills the planes.

    Returns the step whose state they hold, and the peak of host memory in bytes while weights were
    read from the model (None for a checkpoint).
    """
    config, model = session.config, job.model
    allocating = session.progress("allocate", check)
    loading = session.progress("load_model", check)
    peak = PeakMemory()
    store.allocate_weights(allocating)
    if not job.is_resumed:
        if config.model.init == "random":
            initialise(model, store, config.train.seed, job.backend.device, loading)
        else:
            load_pretrained(model, config.model.source, store, loading)
        # Reading needs additional memory, which is freed before the states are allocated.
        loading_peak = peak.read()
        store.allocate_states(allocating)
        return 0, loading_peak
    store.allocate_states(allocating)
    found = load_newest_checkpoint(
        session.folder.checkpoints_path, store, model.persistent_buffers(), progress=loading
    )
    if found is None:
        raise CheckpointError(
            f"The checkpoints of run {session.folder.id} vanished while they were being read."
        )
    for sentence in found.skipped:
        session.log("warning", sentence)
    return found.step, None


def program_version() -> str:
    """Returns the installed version, or the version in the source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ramstream")
    except PackageNotFoundError:
        return os.environ.get("RAMSTREAM_VERSION", "source")


def started_event(config: TrainConfig, prepared: Prepared, version: str, pid: int) -> RunStarted:
    """Returns the event that describes the run, once everything is prepared."""
    device = prepared.backend.device
    return RunStarted(
        name=config.name,
        pid=pid,
        device=device.type,
        device_name=prepared.backend.device_name,
        total_steps=prepared.total_steps,
        parameters=prepared.model.parameter_count,
        units=[unit.name for unit in prepared.model.units],
        resumed_step=prepared.step or None,
        program_version=version,
        flops_formula=MEASURED_FLOPS_FORMULA,
        ceiling_tflops=(prepared.planned.ceiling or 0.0) / 1e12,
    )

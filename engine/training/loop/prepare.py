"""Everything between a configuration and the first step.

- The model's settings and tokenizer are fetched and read, and the streamed model is built without
  weights. Weights are downloaded only once the first rows of the data set are known to be usable.
- The data set becomes rows of tokens. The processes that read data are spawned, not forked, and end
  before CUDA starts and before the planes are allocated.
- A resumed run must have the same data, and settings that are compatible with its earlier steps.
- The backend is opened and the plan is made (`engine.training.loop.planning`).
- The planes are allocated, and filled from the newest checkpoint, from the model's weights, or at
  random.
- The engine is built on top of the planes. If any of this fails, everything is freed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine.config.settings import TrainConfig
from engine.data.batches.loader import PreparedData, prepare_data
from engine.data.batches.preview import check_first_rows
from engine.data.tokens.template_process import template_process
from engine.data.tokens.tokenize import Execution
from engine.errors import CheckpointError
from engine.machine.offload_folder import check_offload_folder
from engine.model.build.build import build_model
from engine.model.build.read_model import read_model
from engine.model.build.units import StreamedModel
from engine.model.hub.hub import fetch
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import largest_product
from engine.planning.schedule.grid import grid
from engine.planning.shape.active_parameters import measured_flops_formula
from engine.progress import Progress
from engine.runs.record.events import DataPrepared, PlanBuilt, RunStarted
from engine.runs.record.run_folder import RunFolder
from engine.runtime.device.backend import Backend
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.device.open_backend import open_run_backend
from engine.runtime.distributed.build_engine import (
    RankZeroComponents,
    build_engines,
    engine_settings,
)
from engine.runtime.distributed.rank_samples import gpus_of
from engine.runtime.distributed.worker_group import WorkerGroup
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.sampling.generate import Sampler
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints.checkpoint import CheckpointInfo, clear_leftovers
from engine.training.checkpoints.restore import load_newest_checkpoint, newest_checkpoint
from engine.training.checkpoints.staging import StagingBuffers
from engine.training.loop.explain import note_memory
from engine.training.loop.memory_breakdown import data_bytes
from engine.training.loop.memory_watch import PeakMemory
from engine.training.loop.oom_report import ShareName
from engine.training.loop.open_states import (
    join_nodes,
    open_host_states,
    report_placement,
    start_workers,
)
from engine.training.loop.planning import Planned, TrainingJob, make_plan, planned_as_before
from engine.training.loop.resume import changed_settings, kept_rounding, refuse_other_data
from engine.training.loop.session import Session
from engine.training.weights.multimodal_weights import Source
from engine.training.weights.start_weights import fill_start, tokens_at_start
from engine.training.weights.usable_start import needs_own_weights, refuse_unusable


@dataclass
class Prepared:
    """Everything that the trainer needs for its steps.

    `loading_peak` is the peak of host memory in bytes while weights were read, or None if they came
    from a checkpoint.
    """

    model: StreamedModel
    tokenizer: Any
    data: PreparedData
    backend: Backend
    host_states: HostStates
    optimizer: HostOptimizer
    config: TrainConfig
    """Settings with which the session began."""
    planned: Planned
    copies: StagingBuffers
    """Staging buffers, to which planes are copied while a checkpoint is written beside training."""
    total_steps: int
    workers: WorkerGroup | None = None
    """Processes that compute the run together with this one; None where there are none."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """A copy of the model's persistent buffers on the host: they are never trained, and a lost
    device does not give them back.
    """
    loading_peak: int | None = None
    _engine: StreamingEngine | None = None

    @property
    def engine(self) -> StreamingEngine:
        """Engine of the current plan. Raises RuntimeError between two plans."""
        if self._engine is None:
            raise RuntimeError("there is no engine between two plans")
        return self._engine

    @property
    def has_engine(self) -> bool:
        """False between two plans, and after a device took no plan."""
        return self._engine is not None

    def drain(self) -> None:
        """Waits until every submitted step is applied. Raises the first error of any lane."""
        if self._engine is not None:
            self._engine.drain()

    def close_engine(self) -> None:
        """Frees the device's buffers before another plan is made. No work may be in progress."""
        self.__dict__.pop("sampler", None)
        engine, self._engine = self._engine, None
        self._report_breakdown()
        if engine is not None:
            engine.close()
        del engine
        gc.collect()
        self.backend.reset_peak()

    def build_engine(self, planned: Planned) -> PlanBuilt:
        """Builds the engine of a plan, and returns the event for the record. Raises what the device
        raises for a lack of memory; there is no engine then.
        """
        self.planned = planned
        chosen, train = planned.chosen, self.config.train
        tokens = chosen.micro_batch_size * planned.job.row_length
        settings = engine_settings(chosen, tokens, train)
        if isinstance(self.backend, CpuBackend):
            product = largest_product(planned.job.shape, tokens)
            self.backend.share_work(product, chosen.choices.sharding.ranks_per_node)
        if self.workers is None:
            self._engine = StreamingEngine(
                self.model, self.host_states, self.backend, settings, self.optimizer
            )
        else:
            parts = RankZeroComponents(self.model, self.host_states, self.backend, self.optimizer)
            self._engine = build_engines(
                self.workers, parts, self.config.model, train.hyperparameters, settings
            )
        self._report_breakdown()
        return _plan_built(planned, self._engine)

    def _report_breakdown(self) -> None:
        """Passes what the run holds on purpose to the memory breakdown."""
        held = {ShareName.DATA: data_bytes(self.data), ShareName.COPIES: self.copies.nbytes}
        engine, states = self._engine, self.host_states
        buffers = 0
        if engine is not None:
            held[ShareName.BLOCK_INPUTS] = engine.block_input_bytes
            buffers = engine.state.fixed_bytes()
        self.planned.breakdown.holds(
            lambda: held | {ShareName.PLANES: states.ram.nbytes}, lambda: buffers
        )

    @property
    def step(self) -> int:
        """Number of optimizer steps whose state the planes hold."""
        return self.host_states.held.step

    @property
    def chosen(self) -> Chosen:
        return self.planned.chosen

    def change_total_steps(self, steps: int) -> None:
        """Changes the number of steps after which the run ends."""
        self.total_steps = steps

    @functools.cached_property
    def sampler(self) -> Sampler:
        """A sampler that uses the current weights; every submitted step must be applied."""
        return Sampler(self.engine)

    def close(self) -> None:
        """Frees host and device memory; no work may be in progress.

        Each part is closed even if closing another one fails.
        """
        # The stack closes in reverse order: the engine uses the optimizer, and both use the planes.
        with contextlib.ExitStack() as parts:
            own = (
                self.backend,
                self.workers,
                self.host_states,
                self.optimizer,
                self._engine,
                self.copies,
            )
            for part in own:
                if part is not None:
                    parts.callback(part.close)


def prepare(session: Session, resume: bool, check: Callable[[], None]) -> Prepared:
    """Builds everything that a run needs.

    `check` is called often; it raises an exception to end early, for example when the run is
    stopped before the first step. Raises RamstreamError for what the user can fix: a model or data
    set that cannot be used, or a job that does not fit.
    """
    config = session.config
    if config.engine.disk is not None:
        check_offload_folder(config.engine.disk)
    # A damaged checkpoint is found before anything is allocated.
    newest = newest_checkpoint(session.folder.checkpoints_path, True) if resume else None
    if newest is None:
        refuse_unusable(config)  # what is missing is reported at once
    download = session.progress("download", check)
    fetch(config.model.source, False, download, check)
    read = read_model(config)
    hf_config, tokenizer = read.config, read.tokenizer
    model = build_model(hf_config, config.model, config.train.parts)
    for sentence in read.notes:
        session.log("info", sentence)
    check()
    if newest is None:
        read.refuse_untrained(model, config, tokens_at_start(config))
    is_read = config.model.init == "pretrained" and needs_own_weights(config)
    if newest is None and (is_read or model.non_text):
        # An unusable data set should be reported before a large download.
        check_first_rows(config.read_data)
        fetch(config.model.source, True, download, check)
        if model.non_text:
            Source.of(model, config.model.source)  # an export will need it
    data = prepare_rows(config, model, tokenizer, session.progress("tokenize", check))
    session.recorder.emit(DataPrepared(data.summary))
    template_process().end_if_memory_is_short()
    read.refuse_foreign(data.highest_id, config.model.source)
    total_steps = config.train.steps
    if total_steps is None:
        total_steps = data.train.steps_of(config.train.epochs or 1.0, config.train.batch_size)
    if newest is not None:
        _compare_with_checkpoint(session, newest, data, total_steps)
    backend = open_run_backend(config)
    rounding = kept_rounding(config, newest.state) if newest is not None else {}
    resumed_step = newest.step if newest is not None else 0
    job = TrainingJob(model, data, backend, total_steps, newest is not None, rounding, resumed_step)
    with contextlib.ExitStack() as allocated:
        allocated.callback(backend.close)
        return _build(session, job, tokenizer, check, allocated)


def prepare_rows(
    config: TrainConfig, model: StreamedModel, tokenizer: Any, progress: Progress
) -> PreparedData:
    """Returns the rows of a run: those it trains, and its validation rows."""
    problem = model.packing.problem_of(config.data.max_seq_len)
    if problem:
        problem = f"{model.config.model_type}: {problem}"
    data = prepare_data(
        config.read_data, tokenizer, config.train.seed, problem, Execution(progress)
    )
    if not config.packs or problem:
        data = data.grouped_by_length(config.train.batch_size)
    data.learn(config.objective)
    return data


def _build(
    session: Session,
    job: TrainingJob,
    tokenizer: Any,
    check: Callable[[], None],
    allocated: contextlib.ExitStack,
) -> Prepared:
    """Plans the job, then allocates and fills what the plan needs.

    What is allocated is registered in `allocated`, which frees it if a later stage fails.
    """
    config, model, data, backend = session.config, job.model, job.data, job.backend
    workers, job = join_nodes(session, job, allocated)
    planned = make_plan(session, job, check)
    breakdown = planned.breakdown
    try:
        check()
        workers = workers or start_workers(
            session, job, planned.chosen.choices.sharding.ranks_per_node, allocated
        )
        if workers is not None:
            breakdown.counts(workers.host_memory)
        states = open_host_states(config, job, planned.chosen.choices, workers)
        allocated.callback(states.close)
        breakdown.holds(
            lambda: {ShareName.PLANES: states.ram.nbytes, ShareName.DATA: data_bytes(data)}
        )
        kept = "nothing is lost" if job.is_resumed else "nothing was trained yet"
        allocate_states = partial(
            states.allocate_states,
            optimizer=config.train.optimizer,
            gradients=not planned.chosen.choices.gradients.gradients_on_gpu,
        )
        watched = breakdown.watched(check, kept)
        loading_peak, loaded = _fill(session, job, states, watched, allocate_states)
        if loading_peak is not None:
            loading_peak += sum(breakdown.of_ranks().values())
        if loaded is not None and loaded.step != job.resumed_step:
            planned = _plan_of_older(session, job, planned, loaded)
        # The engine moves these buffers to the device.
        kept_buffers = model.persistent_buffers().items()
        buffers = {name: buffer.to("cpu", copy=True) for name, buffer in kept_buffers}
        threads = None if workers is None else workers.plan.threads
        optimizer = host_optimizer(states, config.train.hyperparameters, threads)
        copies = StagingBuffers(planned.copy_bytes)
        allocated.callback(copies.close)
        prepared = Prepared(
            model=model,
            tokenizer=tokenizer,
            data=data,
            backend=backend,
            host_states=states,
            optimizer=optimizer,
            config=config,
            planned=planned,
            copies=copies,
            workers=workers,
            total_steps=job.total_steps,
            buffers=buffers,
            loading_peak=loading_peak,
        )
        session.recorder.emit(prepared.build_engine(planned))
        report_placement(session, prepared.engine, states)
        if planned.simulated is not None:
            session.recorder.emit(planned.simulated)
    except BaseException as error:
        # The use of memory must be noted while the memory is still held.
        note_memory(error, breakdown.note)
        raise
    allocated.pop_all()  # from here on, `Prepared.close` frees everything
    return prepared


def _plan_built(planned: Planned, engine: StreamingEngine) -> PlanBuilt:
    """Returns the event that records the plan and what the engine allocated for it."""
    chosen = planned.chosen
    details = {
        "micro_batch_size": chosen.micro_batch_size,
        "loss_chunk": chosen.loss_chunk,
        "predicted_seconds": planned.seconds,
        "device_buffers": engine.state.fixed_bytes(),
        "offloaded_input_bytes": engine.block_input_bytes,
    }
    return PlanBuilt(chosen.choices.to_dict() | details, grid(engine.plan))


def _compare_with_checkpoint(
    session: Session, newest: CheckpointInfo, data: PreparedData, total_steps: int
) -> None:
    """Warns about settings that differ from those of the checkpoint.

    Raises RunError if the run cannot continue with these settings or this data.
    """
    refuse_other_data(
        session.config, session.folder.id, newest.state, newest.step, data.fingerprint
    )
    changes = changed_settings(
        session.config, session.folder.id, newest.state, newest.step, total_steps
    )
    for sentence in changes:
        session.log("warning", sentence)


def _plan_of_older(
    session: Session, job: TrainingJob, planned: Planned, loaded: CheckpointInfo
) -> Planned:
    """Returns the plan of a run that continues from an older checkpoint, since the newest, for
    which `planned` was made, turned out to be damaged.

    Raises RunError if the run cannot continue from there with these settings or this data.
    """
    _compare_with_checkpoint(session, loaded, job.data, job.total_steps)
    rounding = kept_rounding(session.config, loaded.state)
    if rounding == job.rounding:
        return planned
    return planned_as_before(session, job, planned, rounding)


def _fill(
    session: Session,
    job: TrainingJob,
    states: HostStates,
    check: Callable[[], None],
    allocate_states: Callable[[Progress], None],
) -> tuple[int | None, CheckpointInfo | None]:
    """Allocates and fills the planes.

    Returns the peak of host memory in bytes while weights were read from the model, or None if they
    came from a checkpoint, and that checkpoint.
    """
    config, model = session.config, job.model
    allocating = session.progress("allocate", check)
    loading = session.progress("load_model", check)
    peak = PeakMemory()
    states.allocate_weights(allocating)
    if not job.is_resumed:
        for sentence in fill_start(config, model, states, (job.backend.device, loading)):
            session.log("info", sentence)
        # Reading needs additional memory, which is freed before the states are allocated.
        loading_peak = peak.read()
        allocate_states(allocating)
        return loading_peak, None
    allocate_states(allocating)
    found = load_newest_checkpoint(
        session.folder.checkpoints_path, states, model.persistent_buffers(), progress=loading
    )
    if found is None:
        raise CheckpointError(
            f"The checkpoints of run {session.folder.id} vanished while they were being read."
        )
    for sentence in found.skipped:
        session.log("warning", sentence)
    _clear_leftovers(session.folder)
    states.held.restore(found.step, found.state.get("skipped", ()))
    return None, found


def _clear_leftovers(folder: RunFolder) -> None:
    """Removes what a killed writer left in the folder of a run whose checkpoint is loaded. Each
    writer does so, too, but after the last step none may follow. Where it is not possible, the next
    writer says why.
    """
    for root in (folder.checkpoints_path, folder.best_path):
        with contextlib.suppress(OSError):
            clear_leftovers(root)


def started_event(config: TrainConfig, prepared: Prepared, version: str, pid: int) -> RunStarted:
    """Returns the event that describes the run, once everything is prepared."""
    device = prepared.backend.device
    gpus = gpus_of(device.type, prepared.workers)
    return RunStarted(
        name=config.name,
        pid=pid,
        device=device.type,
        device_name=prepared.backend.device_name,
        total_steps=prepared.total_steps,
        parameters=prepared.model.parameter_count,
        trained_parameters=prepared.model.trained_count if config.train.parts else None,
        units=[unit.name for unit in prepared.model.units],
        resumed_step=prepared.step or None,
        program_version=version,
        flops_formula=measured_flops_formula(prepared.model.work_parameters is None),
        ceiling_tflops=gpus * (prepared.planned.ceiling or 0.0) / 1e12,
        best_by=config.output.best_by,
    )

"""The plan of a run: what fits, and which choices are fastest.

- The device's memory limit is set, so that no measurement takes more than the run is allowed.
- The machine's rates are looked up, or measured once. On the CPU, no choice depends on them.
- The fit report is made and recorded. A job that does not fit fails here.
- The choices are made for the available memory. A resumed run keeps the choices that affect
  rounding, so that it continues bit for bit.
- A step is simulated, for the record and for the comparison of predictions and measurements.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from engine.config.settings import TrainConfig
from engine.data.batches.length_bucketing import padded_length
from engine.data.batches.loader import PreparedData
from engine.data.batches.rows import RowSet
from engine.errors import FitError, GpuMemoryError
from engine.files import bytes_in
from engine.machine.cgroups import give_back_free_memory, private_memory, sample_host_memory
from engine.machine.device import gpu_count, with_link
from engine.machine.disk_rates import with_disk
from engine.machine.rates import Rates, store_rates, stored_cpu_rates, stored_rates
from engine.machine.read_machine import Machine, read_machine
from engine.model.build.find_shape import adapted_shape
from engine.model.build.measure_shape import shape_of
from engine.model.build.units import StreamedModel
from engine.paths import program_command
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import MicroBatch, largest_product
from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.fit.disk_offload import disk_offload_room
from engine.planning.fit.job import Job, Target, nodes_per_replica_options, numbers_of_ranks
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.fit.predictions import predictions
from engine.planning.fit.report import FitReport, estimate
from engine.planning.fit.requirements import RUNTIME_GROWTH_BYTES, FitStatus, Resident, SessionFacts
from engine.planning.fit.simulate_step import predicted_step, rates_of_steps
from engine.planning.schedule.schedule import Span, StepPlan
from engine.planning.schedule.simulate import Simulated
from engine.planning.schedule.stalls import as_records
from engine.planning.shape.model_shape import ModelShape
from engine.runs.record import events
from engine.runs.record.events import FitReported, PlanSimulated
from engine.runs.record.run_folder import RunFolder
from engine.runtime.device.backend import Backend
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.measure.links import link_rate
from engine.runtime.measure.machine_rates import measure
from engine.text import counted
from engine.training.checkpoints.checkpoint import folders_by_step
from engine.training.loop.memory_breakdown import MemoryBreakdown, data_bytes
from engine.training.loop.oom_report import ShareName
from engine.training.loop.session import Session

PROBE_SECONDS = 0.1
"""Seconds for which each rate is measured."""


@dataclass(frozen=True)
class Planned:
    """Decisions made before anything is allocated."""

    chosen: Chosen
    predicted: dict[str, float]
    """Figures that the fit report predicted (`engine.planning.fit.predictions.predictions`)."""
    simulated: PlanSimulated | None
    """Simulated step with these choices; None if no rates are known."""
    breakdown: MemoryBreakdown
    job: Job
    target: Target
    """Target for which the choices were made."""
    copy_bytes: int = 0
    """Bytes of RAM that the fit report set aside for copies of planes, for checkpoints."""
    keeps_best: bool = False
    """The best weights are to be kept, and the disk has room for them."""
    ceiling: float | None = None
    """FLOPs per second of large matrix products, as measured on the device."""

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of a step."""
        return self.simulated.seconds if self.simulated is not None else None


@dataclass(frozen=True)
class TrainingJob:
    """A job and its device, before it is planned.

    `rounding` holds the choices of a resumed run that affect rounding. It is empty for a new run.
    """

    model: StreamedModel
    data: PreparedData
    backend: Backend
    total_steps: int
    is_resumed: bool
    rounding: dict[str, Any]
    resumed_step: int = 0
    """Step of the newest checkpoint of a resumed run."""
    network: float = 0.0
    """Bytes per second that a node receives from the others, as measured; 0 for one node."""
    collective_bytes: int = 0
    """Bytes by which each GPU has less free memory since the ranks' collectives were set up. They
    are part of what the run takes.
    """


def make_plan(session: Session, job: TrainingJob, check: Callable[[], None]) -> Planned:
    """Makes and records the fit report, and makes the choices. Raises FitError if the job does not
    fit.
    """
    config, backend = session.config, job.backend
    device: Literal["cpu", "cuda"] = "cpu" if backend.device.type == "cpu" else "cuda"
    if device != "cpu" and config.engine.gpu_memory_gib is not None:
        limit = config.engine.within_cap(backend.memory()["total"])
        backend.limit_memory(max(0, limit - CUDA_CONTEXT_BYTES))
    give_back_free_memory()
    _first_resident.setdefault(device, sample_host_memory()[0])
    rates = _rates_of_machine(session, job, check)
    give_back_free_memory()  # measuring used some; the memory of this program is read next
    shape = shape_of(job.model).with_optimizer(config.train.optimizer)
    longest_row = max(job.data.train.longest, job.data.eval.longest, 1)
    sequence_length = padded_length(longest_row, config.data.max_seq_len)
    row_length = config.objective.sequences * sequence_length
    gpu_limit = _limit_gpu_memory(job, config) if device != "cpu" else None
    machine = read_machine(session.folder.path)
    if rates is not None:
        rates = with_link(rates, machine)
    room = disk_offload_room(config, machine)
    target = Target(device, gpu_limit, sample_host_memory()[1], rates, room)
    report, rounding = _judged(session, job, shape, sequence_length, target)
    # The plan is the report's own. Another choice among the same ways, with the free memory of a
    # moment later, could need more RAM than the report has promised.
    chosen = report.chosen
    # Later plans of this job make these two choices again: they decide how much memory it takes.
    gradients_on_gpu, together = (
        report.choices["gradients_on_gpu"],
        report.choices["blocks_per_saved_input"],
    )
    choices, nodes = chosen.choices, session.nodes
    ranks, nodes_per_replica = choices.sharding.ranks_per_node, choices.sharding.nodes_per_replica
    planned_job = Job(
        shape,
        config,
        row_length,
        rounding,
        gradients_on_gpu,
        together,
        ranks,
        nodes=nodes,
        nodes_per_replica=nodes_per_replica,
    )
    product = largest_product(shape, chosen.micro_batch_size * row_length)
    matmul_rates = rates
    note = padding_note(config, job.data.train, chosen)
    if note:
        session.log("info", note)
    if isinstance(backend, CpuBackend):
        backend.share_work(product)
        matmul_rates = stored_cpu_rates(product)
    as_dict = report.to_dict()
    breakdown = MemoryBreakdown(
        as_dict,
        backend,
        lambda: {ShareName.DATA: data_bytes(job.data)},
        loading=not job.is_resumed,
    )
    return Planned(
        chosen,
        predictions(as_dict, shape.states.checkpoint_bytes(config.output.checkpoint)),
        simulated_step(planned_job, chosen, target, typical_length(config, job.data, chosen)),
        breakdown,
        planned_job,
        target,
        sum(item.bytes for item in report.host.items if item.kind == MemoryItem.STAGING_BUFFERS),
        any(item.kind == MemoryItem.BEST for item in report.disk.items),
        _ceiling(matmul_rates, shape, device),
    )


def planned_as_before(
    session: Session, job: TrainingJob, planned: Planned, rounding: dict[str, Any]
) -> Planned:
    """Returns the plan with another `rounding`, that of the checkpoint that was loaded."""
    changed = replace(planned.job, rounding=rounding)
    chosen = choose(changed, planned.target)
    length = typical_length(session.config, job.data, chosen)
    simulated = simulated_step(changed, chosen, planned.target, length)
    return replace(planned, chosen=chosen, job=changed, simulated=simulated)


def simulated_step(job: Job, chosen: Chosen, target: Target, length: int) -> PlanSimulated | None:
    """Returns the event of a simulated step with these choices, or None if no rates are known. Its
    rows have `length` tokens, padding included.
    """
    shape, device = job.shape, target.device
    rows = chosen.micro_batch_size
    step_rates = rates_of_steps(shape, rows, target.rates, job.row_length, device)
    if step_rates is None:
        return None
    step_rates = with_disk(step_rates, job.config)
    varlen = shape.varlen(job.config.packs, device)
    micro_batch = MicroBatch(chosen.micro_batch_size, length, varlen)
    micro_batch = micro_batch.learning(job.config.objective, chosen.loss_chunk)
    return _as_event(*predicted_step(shape, chosen.choices, step_rates, micro_batch, device))


def typical_length(config: TrainConfig, data: PreparedData, chosen: Chosen) -> int:
    """Returns the length of the rows of a typical step, padding included; a pair counts as one row.

    Rows that are not packed are shorter than the longest, for which the memory is counted. Packed
    rows are taken to be as long as the longest.
    """
    rows, longest = data.train, config.data.max_seq_len
    if rows.packed:
        return padded_length(max(rows.longest, data.eval.longest, 1), longest)
    pad_up_to = chosen.pad_up_to(longest)
    mean = rows.mean_padded_length(config.train.batch_size, chosen.micro_batch_size, pad_up_to)
    return max(1, round(mean * rows.sequences_per_row))


def padding_note(config: TrainConfig, rows: RowSet, chosen: Chosen) -> str:
    """Returns a sentence on how much of a step is padding where rows have one document each, or an
    empty text. Sequences of pairs are not counted, since each pair is padded to its longer one.
    """
    if rows.packed or rows.sequences_per_row > 1:
        return ""
    pad_up_to = chosen.pad_up_to(config.data.max_seq_len)
    size = chosen.micro_batch_size
    percent = rows.percent_padding(config.train.batch_size, size, pad_up_to)
    if not config.data.shuffle:
        return (
            f"Rows have one document each, and {percent:.1f} % of a step is padding: rows of "
            "similar length share a step only with data.shuffle."
        )
    return (
        f"Rows have one document each, and those of similar length share a step: {percent:.1f} % "
        "of it is padding."
    )


def _judged(
    session: Session, job: TrainingJob, shape: ModelShape, sequence_length: int, target: Target
) -> tuple[FitReport, dict[str, Any]]:
    """Makes and records the fit report. Returns it with the rounding that the planner must keep.

    A resumed run that no longer fits with the plan that it had is planned anew, which is logged.
    Raises FitError if the job does not fit.
    """
    resident = _resident(job.backend.device.type)
    config = session.config.with_values({"data.max_seq_len": sequence_length})
    kept = shape.states.checkpoint_bytes(config.output.checkpoint) + shape.states.frozen_bytes
    machine = _machine_for(session.folder, kept)
    if target.gpu_limit is not None and machine.gpus:
        first = replace(machine.gpus[0], free=target.gpu_limit)
        met = job.collective_bytes + CUDA_CONTEXT_BYTES if job.collective_bytes else 0
        others = [replace(each, free=each.free + met) for each in machine.gpus[1:]]
        machine = replace(machine, gpus=(first, *others))
    before = len(folders_by_step(session.folder.checkpoints_path))

    def judged(rounding: dict[str, Any]) -> FitReport:
        facts = SessionFacts(
            rounding,
            target.rates,
            resident,
            job.total_steps,
            lambda chosen: typical_length(session.config, job.data, chosen),
            before,
            session.nodes,
        )
        return estimate(config, machine, shape, facts, adapted_shape)

    rounding = _possible_rounding(session, job.rounding, machine)
    report = judged(rounding)
    if report.status == FitStatus.DOES_NOT_FIT and rounding:
        anew = judged({})
        if anew.status != FitStatus.DOES_NOT_FIT:
            report, rounding = anew, {}
            session.log(
                "warning",
                "The plan that this run had does not fit any more, so the step is planned anew: "
                "sums are rounded in another order from here on.",
            )
    session.recorder.emit(FitReported(report.to_dict()))
    if report.status == FitStatus.DOES_NOT_FIT:
        raise FitError(" ".join([report.headline, *report.reasons[:2]]))
    return report, rounding


def _possible_rounding(
    session: Session, rounding: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """Returns the rounding of the run's last session if this machine has as many GPUs as that took,
    and as many nodes compute the run; else nothing, which is logged.
    """
    if not rounding:
        return rounding
    nodes_per_replica = rounding["nodes_per_replica"]
    nodes = rounding["replicas"] * nodes_per_replica
    if nodes != session.nodes:
        session.log(
            "warning",
            f"The run was computed on {counted(nodes, 'node')} and is now on {session.nodes}, so "
            "the step is planned anew: sums are added in another order from here on.",
        )
        return {}
    if nodes_per_replica not in nodes_per_replica_options(session.config, nodes, {}):
        session.log(
            "warning",
            "Planes are divided among nodes, or copied to each, as they were not before, so the "
            "step is planned anew: sums are added in another order from here on.",
        )
        return {}
    gpus = gpu_count(session.config, machine)
    ranks = rounding["ranks"] // nodes_per_replica
    if ranks in numbers_of_ranks(session.config, gpus, {}):
        return rounding
    session.log(
        "warning",
        f"The run was computed by {counted(ranks, 'GPU')}, which this machine lacks, "
        "so the step is planned anew: sums are rounded in another order from here on.",
    )
    return {}


def _machine_for(folder: RunFolder, checkpoint_bytes: int) -> Machine:
    """Returns this machine, counting what this program and earlier sessions of the run take as
    free.

    The memory that this program already has is part of what it needs, and the files that an earlier
    session left on the disk will be replaced. The report counts each checkpoint with
    `checkpoint_bytes`, so one that takes more is free only so far.
    """
    machine = read_machine(folder.path)
    left_behind = bytes_in(folder.export_path)
    left_behind += bytes_in(folder.checkpoints_path)
    left_behind += bytes_in(folder.best_path)
    for path in folders_by_step(folder.checkpoints_path).values():
        left_behind -= max(0, bytes_in(path) - checkpoint_bytes)
    return replace(
        machine,
        ram_available=machine.ram_available + private_memory(),
        disk_free=machine.disk_free + left_behind,
    )


def _limit_gpu_memory(job: TrainingJob, config: TrainConfig) -> int:
    """Limits how much memory the device's allocator may take.

    Returns the bytes that this process may take in total, including its CUDA context.
    """
    # The peak and the limit hold for the whole process, so those of an earlier run are reset.
    backend = job.backend
    backend.reset_peak()
    # The CUDA context of this process exists already, so the free memory does not include it.
    limit = backend.memory()["free"] + CUDA_CONTEXT_BYTES + job.collective_bytes
    if config.engine.gpu_memory_gib is not None:
        limit = config.engine.within_cap(limit)
        backend.limit_memory(limit - CUDA_CONTEXT_BYTES)
    else:
        backend.limit_memory(backend.memory()["total"])
    return limit


def _as_event(plan: StepPlan, timing: Simulated) -> PlanSimulated:
    """Returns the event that records when each op of a step should run."""
    spans = [Span(op, start, end) for op, start, end in zip(plan.ops, timing.starts, timing.ends)]
    return PlanSimulated(timing.seconds, cast(list[events.Span], as_records(spans)))


def _ceiling(rates: Rates | None, shape: ModelShape, device: str) -> float | None:
    """Returns the FLOPs per second of large matrix products, or None if they were not measured.

    They are measured in float32 on a CPU and in bfloat16 on a GPU; for a model with another data
    type the figure is meaningless.
    """
    measured_dtype = "float32" if device == "cpu" else "bfloat16"
    if rates is None or shape.dtype != measured_dtype:
        return None
    return rates.matmul


def _rates_of_machine(
    session: Session, job: TrainingJob, check: Callable[[], None]
) -> Rates | None:
    """Returns the rates of this machine: the stored ones, or new ones, whose measurement takes some
    seconds.

    Returns None on the CPU, where no choice depends on them.
    """
    backend = job.backend
    if backend.device.type == "cpu":
        return None
    rates = stored_rates(backend.device_name)
    if rates is None:
        session.log(
            "info",
            "Measuring the speed of this machine once: plans are made with it. "
            f"`{program_command()} bench` measures it again.",
        )
        try:
            rates = measure(backend, PROBE_SECONDS, lambda _: check(), for_plans=True).rates()
        except (torch.OutOfMemoryError, GpuMemoryError, FitError):
            return None  # the plan is made with typical rates instead
        finally:
            # The buffers of the measurement must be freed before the free memory is read.
            gc.collect()
            backend.reset_peak()
        store_rates(backend.device_name, rates)
    if session.config.engine.gpus != 1 and not rates.link:
        rates = replace(rates, link=link_rate())
        store_rates(backend.device_name, rates)
    if job.network:
        rates = replace(rates, network=job.network)
        store_rates(backend.device_name, rates)
    return rates


_first_resident: dict[str, int] = {}
"""Bytes of RAM that this program took when it first prepared a run, by device. The growth since
then is due to libraries, which need not be loaded again.
"""


def _resident(device: str) -> Resident:
    """Returns the memory that this program takes now, and by how much it will still grow, in
    bytes.
    """
    now = sample_host_memory()[0]
    grown = max(0, now - _first_resident[device])
    return Resident(now, max(0, RUNTIME_GROWTH_BYTES[device] - grown))

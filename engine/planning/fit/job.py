"""A plan is made for a `Job` on a `Target`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config.gpu_shares import ONE_GPU
from engine.config.optimizers import ADAMW, OPTIMIZERS
from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError
from engine.machine.rates import Rates
from engine.planning.shape.model_shape import ModelShape


@dataclass(frozen=True)
class Job:
    """A job is a model with the settings and the data that it is trained with."""

    shape: ModelShape
    config: TrainConfig
    row_length: int
    """Number of tokens of the longest row, those of both lines of a pair."""
    rounding: Mapping[str, Any] = field(default_factory=dict)
    """The `Chosen.rounding` of the session that this one continues bit for bit; empty for a new
    run.
    """
    gradients_on_gpu: bool | None = None
    """Whether gradients are kept on the GPU, as was decided before; None where the planner
    decides.
    """
    blocks_per_saved_input: int | None = None
    """Number of blocks for which one block input is kept, as was decided before; None where the
    planner decides.
    """
    ranks: int = 1
    """Number of ranks of a node that compute each step together (`numbers_of_ranks`)."""
    nodes: int = 1
    """Number of nodes that compute the job."""
    nodes_per_replica: int = 1
    """Number of them over which a copy of the planes is sharded: one, each of which has all, or all
    of them.
    """

    @property
    def cuts_units(self) -> bool:
        """Whether the optimizer can update a unit in chunks, or in shards of several ranks."""
        return OPTIMIZERS[self.config.train.optimizer].grain is not None

    @property
    def world_size(self) -> int:
        """Number of ranks that compute each step, on all nodes."""
        return self.nodes * self.ranks

    @property
    def rows(self) -> int:
        """Rows of a step that one rank computes."""
        return self.config.train.batch_size // self.world_size


@dataclass(frozen=True)
class Target:
    """A target holds the facts that the planner uses about the machine that a job is planned
    for.
    """

    device: str
    """Device on which blocks compute: `cpu` or `cuda`."""
    gpu_limit: int | None
    """Bytes of GPU memory that this process may take in total, CUDA context included
    (engine.gpu_memory_gib lowers it); for `cuda` only. With several ranks, each may take as much of
    its GPU.
    """
    host_free: int
    """Bytes of RAM that are free before the planes are allocated."""
    rates: Rates | None = None
    """Rates of the machine; None where they are not known."""
    disk_free: int = 0
    """Bytes of the disk that moments and block inputs which do not fit in RAM may take; 0 where
    they may not go there.
    """
    here: bool = True
    """Whether the target is this machine. Any other is assumed to be able to compile kernels."""


def numbers_of_ranks(
    config: TrainConfig, gpus: int, rounding: Mapping[str, Any]
) -> tuple[int, ...]:
    """Returns the numbers of ranks that may compute a step, of which the fastest is taken: one, or
    for `auto` one and every divisor of the rows up to the number of GPUs. gpus: number of GPUs of
    the machine, 0 where blocks compute on the CPU. rounding: as in `Job`. Raises ConfigError where
    more GPUs are asked for than there are.
    """
    asked, train = config.engine.gpus, config.train
    if asked != AUTO and gpus and asked > gpus:
        raise ConfigError(
            "engine.gpus",
            f"{asked} are asked for, but the machine has {gpus}; choose {gpus} or fewer, or auto.",
        )
    if rounding:
        return (rounding["ranks"] // rounding["nodes_per_replica"],)
    if asked != AUTO:
        return (asked,)
    whole = config.engine.disk is not None or OPTIMIZERS[train.optimizer].grain is None
    most = 1 if whole else max(1, gpus)
    least = 1 if train.micro_batch_size == AUTO else train.micro_batch_size
    return tuple(
        ranks
        for ranks in range(1, most + 1)
        if ranks == 1 or train.batch_size % (ranks * least) == 0
    )


def nodes_per_replica_options(
    config: TrainConfig, nodes: int, rounding: Mapping[str, Any]
) -> tuple[int, ...]:
    """Returns among how many of `nodes` the planes may be divided (`Job.nodes_per_replica`). The
    fastest way that fits is taken. rounding: as in `Job`.
    """
    if rounding:
        return (rounding["nodes_per_replica"],)
    across = config.engine.across_nodes
    if nodes == 1 or across == "replicate" or (across == AUTO and config.train.parts is not None):
        return (1,)
    return (nodes,) if across == "shard" else (1, nodes)


def refuse_contradictions(job: Job) -> None:
    """Raises ConfigError where settings contradict each other or the model."""
    shape, engine = job.shape, job.config.engine
    blocks = len(shape.blocks)
    positions = shape.max_position_embeddings
    length = job.row_length // job.config.objective.sequences
    if shape.learned_positions and positions is not None and length > positions:
        raise ConfigError(
            "data.max_seq_len",
            f"{length} is beyond the {positions} positions that this model has; "
            f"lower it to {positions} or less.",
        )
    if engine.blocks_kept_in_slots != AUTO and engine.blocks_kept_in_slots > blocks:
        raise ConfigError(
            "engine.blocks_kept_in_slots",
            f"{engine.blocks_kept_in_slots} blocks cannot stay on the device, since this model has "
            f"{blocks}; choose 0 to {blocks} or auto.",
        )
    if shape.frozen_units and engine.activation_checkpointing == "offload_pairs":
        raise ConfigError(
            "engine.activation_checkpointing",
            "offload_pairs is for models that are trained whole; choose auto or offload, or "
            "set train.method to full.",
        )
    if engine.rounds != AUTO:
        _refuse_uneven_rounds(job, engine.rounds)
    if job.nodes > 1:
        _refuse_uneven_nodes(job)
    if job.world_size > 1:
        _refuse_one_gpu_s(job)
    if not job.cuts_units:
        _refuse_cut_units(job)
    optimizer = job.config.train.optimizer
    if OPTIMIZERS[optimizer].orthogonalizes and shape.non_linear_matrix:
        raise ConfigError(
            "train.optimizer",
            f"{optimizer} would orthogonalize updates of {shape.non_linear_matrix} of "
            f"{shape.model_type}, which has two dimensions but is not the weight of one linear "
            f"layer; set train.optimizer to {ADAMW}.",
        )


def is_possible(job: Job) -> bool:
    """Returns whether `refuse_contradictions` finds none."""
    try:
        refuse_contradictions(job)
    except ConfigError:
        return False
    return True


def _refuse_uneven_nodes(job: Job) -> None:
    """Raises ConfigError where the ranks of all nodes would get unequal shares of a step."""
    train, ranks = job.config.train, job.world_size
    if train.batch_size % ranks:
        raise ConfigError(
            "train.batch_size",
            f"{train.batch_size} is no multiple of the {ranks} ranks that {job.nodes} nodes have, "
            f"which would get unequal shares of a step; choose a multiple of {ranks}.",
        )
    size = train.micro_batch_size
    if size != AUTO and job.rows % size:
        raise ConfigError(
            "train.micro_batch_size",
            f"{size} does not divide the {job.rows} rows that each of {ranks} ranks gets; choose a "
            f"divisor of {job.rows}.",
        )


def _refuse_uneven_rounds(job: Job, rounds: int) -> None:
    size, each = job.config.train.micro_batch_size, ""
    if job.world_size > 1:
        each = f" that each of {job.world_size} GPUs gets"
    if size != AUTO:
        micro_batches = job.rows // size
        if micro_batches % rounds:
            raise ConfigError(
                "engine.rounds",
                f"{rounds} does not divide the {micro_batches} micro-batches of a step{each} "
                "(train.batch_size / train.micro_batch_size); choose a divisor or auto.",
            )
    elif job.rows % rounds:
        what = f"the {job.rows} rows of a step{each}"
        if job.world_size == 1:
            what = f"train.batch_size {job.rows}"
        raise ConfigError(
            "engine.rounds", f"{rounds} does not divide {what}; choose a divisor or auto."
        )


def _refuse_one_gpu_s(job: Job) -> None:
    """Raises ConfigError for settings that are for one GPU alone, or for one node."""
    if job.nodes_per_replica > 1 and job.config.train.parts is not None:
        what = "adapters" if job.config.train.method == "lora" else "parts of a model"
        raise ConfigError(
            "engine.across_nodes",
            f"planes are divided among nodes only where a model is trained whole, and here {what} "
            "are trained; choose auto or copy.",
        )
    if job.config.engine.activation_checkpointing == "offload_pairs":
        raise ConfigError(
            "engine.activation_checkpointing",
            f"offload_pairs is for one GPU, not for {job.world_size}; choose auto or "
            f"offload, or {_alone(job)}.",
        )
    if job.config.engine.disk is not None:
        raise ConfigError(
            "engine.disk",
            f"nothing can be on the disk where {job.world_size} GPUs compute; set engine.disk to "
            f"null, or {_alone(job)}.",
        )


def _refuse_cut_units(job: Job) -> None:
    """Raises ConfigError for settings with which units would be updated in chunks or in shards."""
    engine = job.config.engine
    cutting = {
        "engine.gradients": engine.gradients == "gpu",
        "engine.disk": engine.disk is not None,
    }
    optimizer = job.config.train.optimizer
    if job.world_size > 1:
        raise ConfigError(
            "engine.gpus",
            f"{optimizer} trains on one GPU of one node; set engine.gpus to 1 and start one node, "
            f"or set train.optimizer to {ADAMW}.",
        )
    for name, cuts in cutting.items():
        if cuts:
            raise ConfigError(
                name,
                f"{optimizer} updates a unit as a whole, and this cuts units; "
                f"leave it as it is by default, or set train.optimizer to {ADAMW}.",
            )


def _alone(job: Job) -> str:
    """Returns what a person must do so that one GPU computes."""
    return f"set {ONE_GPU}" if job.nodes == 1 else "start one process on one node"

"""A plan is made for a `Job` on a `Target`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError
from engine.machine.rates import Rates
from engine.model.shape import ModelShape


@dataclass(frozen=True)
class Job:
    """A job is a model with the settings and the data that it is trained with."""

    shape: ModelShape
    config: TrainConfig
    row_length: int
    """The longest row has this many tokens."""
    rounding: Mapping[str, Any] = field(default_factory=dict)
    """It is the `Chosen.rounding` of the session that this one continues bit for bit; empty for a
    new run.
    """
    parked_gradients: bool | None = None
    """Gradients are parked or not, as was decided before; None where the planner decides."""
    boundary_blocks: int | None = None
    """A boundary is kept for this many blocks, as was decided before; None where the planner
    decides.
    """


@dataclass(frozen=True)
class Target:
    """A target holds the facts that the planner uses about the machine that a job is planned
    for.
    """

    device: str
    """Blocks compute on this device: `cpu` or `cuda`."""
    gpu_limit: int | None
    """This process may take this many bytes of GPU memory in total, CUDA context included
    (engine.gpu_memory_gib lowers it). It is needed for `cuda` only.
    """
    host_free: int
    """This many bytes of RAM are free before the planes are allocated."""
    rates: Rates | None = None
    """These are the rates of the machine; None where they are not known."""
    disk_free: int = 0
    """Moments that do not fit in RAM may take this many bytes of the disk; 0 where they may not."""
    here: bool = True
    """The target is this machine. Any other is assumed to be able to compile kernels."""


def refuse_contradictions(job: Job) -> None:
    """Raises ConfigError where settings contradict each other or the model."""
    shape, engine = job.shape, job.config.engine
    blocks = len(shape.blocks)
    positions = shape.max_position_embeddings
    if shape.learned_positions and positions is not None and job.row_length > positions:
        raise ConfigError(
            "data.max_seq_len",
            f"{job.row_length} is beyond the {positions} positions that this model has; "
            f"lower it to {positions} or less.",
        )
    if engine.residency != AUTO and engine.residency > blocks:
        raise ConfigError(
            "engine.residency",
            f"{engine.residency} blocks cannot stay on the device, since this model has "
            f"{blocks}; choose 0 to {blocks} or auto.",
        )
    if engine.rounds != AUTO:
        _refuse_uneven_rounds(job.config, engine.rounds)


def _refuse_uneven_rounds(config: TrainConfig, rounds: int) -> None:
    train = config.train
    if train.micro_batch_size != AUTO:
        micro_batches = train.batch_size // train.micro_batch_size
        if micro_batches % rounds:
            raise ConfigError(
                "engine.rounds",
                f"{rounds} does not divide the {micro_batches} micro-batches of a step "
                "(train.batch_size / train.micro_batch_size); choose a divisor or auto.",
            )
    elif train.batch_size % rounds:
        raise ConfigError(
            "engine.rounds",
            f"{rounds} does not divide train.batch_size {train.batch_size}; choose a divisor "
            "or auto.",
        )

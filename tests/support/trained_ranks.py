"""Tiny models that several ranks train, in the threads of one process (`tests.support.ranks`)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config.adapters import Adapters
from engine.config.optimizers import ADAMW, MOMENTS
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.runtime.device.backend import Backend
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.step.engine_settings import AppliedStep
from engine.training.weights.adapter_weights import initialize_adapters
from tests.support.families import tiny_family_config
from tests.support.ranks import ThreadExchange, on_ranks
from tests.support.tiny import Batch, Streamed, plain_model, random_batches, streamed, tiny_config

RATE = 3e-3
_alone = threading.Lock()
"""Transformers can build one model at a time, and all ranks draw from one generator of torch."""


class InTurn(CpuBackend):
    """Runs an op of COMPUTE while no other rank runs one: dropout draws from the generator of the
    process, which each op seeds.
    """

    def submit(self, lane, waits, work):
        if lane != Lane.COMPUTE:
            return super().submit(lane, waits, work)
        with _alone:
            return super().submit(lane, waits, work)


@dataclass(frozen=True)
class Job:
    """A job says what is trained, and how."""

    family: str = "qwen3"
    dtype: str = "float32"
    steps: int = 2
    micro_batches: int = 4
    """A step has this many micro-batches, those of all ranks together."""
    changes: dict[str, Any] = field(default_factory=dict)
    """The configuration of the tiny model has these values."""
    engine: dict[str, Any] = field(default_factory=dict)
    """`streamed` gets these arguments."""
    batches: Callable[..., list[Batch]] = random_batches
    """It makes the micro-batches of a step."""
    exact: bool = False
    """The model is one of those with weights in fp32 (`tests.support.families`)."""


@dataclass(frozen=True)
class Trained:
    """This is left of a training."""

    steps: list[tuple[float, float]]
    """Each step has its loss and its norm, which all ranks found alike."""
    planes: dict[tuple[str, str], torch.Tensor]
    """Each plane, by unit and name, is put together from the shards of the ranks of a node. Those
    of all nodes have the same bits.
    """

    def assert_same_bits(self, other: Trained) -> None:
        assert self.planes.keys() == other.planes.keys()
        wrong = [
            key
            for key, plane in self.planes.items()
            if not torch.equal(plane.view(torch.uint8), other.planes[key].view(torch.uint8))
        ]
        assert not wrong, f"{len(wrong)} planes differ, among them {wrong[:5]}"


@functools.lru_cache(maxsize=8)
def _plain(family: str, exact: bool, changes: tuple) -> tuple[torch.nn.Module, Any]:
    """Returns a plain model that is read and never trained, and its configuration."""
    made = tiny_family_config if exact else tiny_config
    config = made(family, **dict(changes))
    return plain_model(config), config


def open_rank(
    job: Job, choices: PlanChoices, collectives: ThreadExchange, backend: Backend | None = None
) -> Streamed:
    """Returns the engine of one rank. With one rank alone, it is an engine like any other."""
    with _alone:
        plain, config = _plain(job.family, job.exact, tuple(job.changes.items()))
        run = streamed(
            plain,
            choices,
            backend=backend,
            dtype=job.dtype,
            config=config,
            collectives=collectives if collectives.place.world_size > 1 else None,
            **job.engine,
        )
        if isinstance(run.model.parts, Adapters):
            initialize_adapters(run.model, run.host_states, seed=7)
        return run


def shard_of(run: Streamed, unit: str, plane: str) -> torch.Tensor:
    """Returns a copy of this rank's shard of a plane. It is of bytes where moments are rounded."""
    layout, optimizer = run.model.unit(unit).layout, run.host_states.optimizer
    begin, end = run.engine.shards.bounds(layout.numel)
    if plane in MOMENTS and optimizer != ADAMW and begin < end:
        begin, end = layout.state_bounds(optimizer, plane, begin, end)
    return run.host_states.tensor(unit, plane)[begin:end].clone()


def shards_of(run: Streamed) -> dict[tuple[str, str], torch.Tensor]:
    """Returns a copy of this rank's shard of every plane."""
    planes = [plane for plane in run.host_states.planes if plane != "grad" or has_gradients(run)]
    return {
        (unit.name, plane): shard_of(run, unit.name, plane)
        for unit in run.model.units
        for plane in planes
    }


def has_gradients(run: Streamed) -> bool:
    """Tells whether the host has planes of gradients that the step wrote as a whole."""
    choices = run.engine.choices
    return not choices.gradients.gradients_on_gpu and not choices.updates.device_updated_units


def train(
    ranks: int,
    job: Job = Job(),
    backends: Callable[[int], Backend] | None = None,
    nodes: int = 1,
    **choices: Any,
) -> Trained:
    """Trains with so many ranks on each node, each of which has its part of the micro-batches. No
    step is drained before the last. backends: makes that of each rank, by its number.
    """
    own = job.micro_batches // (nodes * ranks)
    planned = PlanChoices().changed(micro_batches=own, ranks=ranks, replicas=nodes, **choices)

    def work(collectives: ThreadExchange) -> tuple[list[tuple[float, float]], dict]:
        backend = backends(collectives.rank) if backends else None
        run = open_rank(job, planned, collectives, backend)
        applied: list[AppliedStep] = []
        try:
            for step in range(1, job.steps + 1):
                batches = job.batches(job.micro_batches, seed=step)
                run.engine.train_step(step, batches, RATE, applied.append)
            run.engine.drain()
            shards = shards_of(run)
        except BaseException:
            collectives.abort()  # else lanes of other ranks would wait for this one
            with contextlib.suppress(Exception):
                run.engine.drain()
            raise
        finally:
            run.close()
        return [(each.loss, each.grad_norm) for each in applied], shards

    found = on_ranks(nodes * ranks, work, nodes)
    of_nodes = [joined(found[first : first + ranks]) for first in range(0, len(found), ranks)]
    for other in of_nodes[1:]:
        assert other.steps == of_nodes[0].steps
        other.assert_same_bits(of_nodes[0])
    return of_nodes[0]


def joined(found: Sequence[tuple[list[tuple[float, float]], dict]]) -> Trained:
    """Returns what all ranks have together, which must agree on losses and norms to the bit."""
    steps = found[0][0]
    assert all(each == steps for each, _ in found), "ranks disagree"
    parts = [shards for _, shards in found]
    return Trained(steps, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})

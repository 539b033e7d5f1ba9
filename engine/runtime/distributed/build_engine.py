"""The engines of all ranks of a run are built here, over planes that the ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.config.adapters import Adapters
from engine.config.optimizers import OptimizerSettings
from engine.config.settings import ModelConfig, OptimConfig
from engine.config.trained_parts import Parts
from engine.model.build.units import StreamedModel
from engine.planning.fit.chosen import Chosen
from engine.runtime.collectives.process_groups import CollectiveError
from engine.runtime.device.backend import Backend
from engine.runtime.distributed.codec import config_text
from engine.runtime.distributed.messages import (
    Build,
    CloseEngine,
    Done,
    MakePlanes,
    PlanesMade,
    PlanesSpec,
    RequestPlanes,
)
from engine.runtime.distributed.plane_copies import send_planes
from engine.runtime.distributed.rank_zero_engine import RankZeroEngine
from engine.runtime.distributed.remote_shards import RemoteNodes
from engine.runtime.distributed.versions import RankZeroVersion
from engine.runtime.distributed.worker_group import WorkerGroup
from engine.runtime.host.cross_node_planes import Nodes
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates, Sharing
from engine.runtime.host.shared_memory import SharedPlanes
from engine.runtime.step.engine_settings import EngineSettings


@dataclass(frozen=True)
class RankZeroComponents:
    """The engine of rank 0 is built from these parts."""

    model: StreamedModel
    host_states: HostStates
    backend: Backend
    optimizer: HostOptimizer


def engine_settings(chosen: Chosen, tokens: int, train: OptimConfig) -> EngineSettings:
    """Returns the settings of a run's engine. Its largest micro-batch has `tokens` positions."""
    return EngineSettings(
        chosen.choices,
        tokens,
        chosen.loss_chunk,
        train.max_grad_norm,
        train.seed,
        regularization=train.regularization,
    )


def sharing_with(workers: WorkerGroup, units: Sequence[str], nodes_per_replica: int = 1) -> Sharing:
    """Returns how host states of these `units` share their planes with all ranks. They are divided
    among `nodes_per_replica` nodes.
    """
    place, nodes = workers.place, None
    if nodes_per_replica > 1:
        others = RemoteNodes(workers.shards, place)
        nodes = Nodes(nodes_per_replica, place.world_size, others=others)
    workers.shards.reach(nodes_per_replica * place.local_world_size)
    version = RankZeroVersion(units, workers.go, workers.wait_for_applied)
    return Sharing(workers.memory, nodes, workers.shards, version)


def build_engines(
    workers: WorkerGroup,
    parts: RankZeroComponents,
    model: ModelConfig,
    optimizer: OptimizerSettings,
    settings: EngineSettings,
) -> RankZeroEngine:
    """Builds the engine of every rank, and returns that of this one. The planes must be allocated
    already. The other ranks build the model and the optimizer by the settings `model` and
    `optimizer`. Raises RankError where one cannot build its engine, and what a `StreamingEngine`
    raises where this rank cannot.
    """
    assert parts.host_states.allocated is not None  # the planes are allocated
    blocks = [unit.name for unit in parts.model.blocks]
    # The other ranks open the planes where they are now.
    parts.host_states.placement.arrange(
        settings.choices.placement.gpu_resident(blocks), parts.backend
    )
    # Files of the model need not be on other nodes, and a run may change what they say.
    config, trained = parts.model.config, parts.model.parts
    nodes_per_replica = settings.choices.sharding.nodes_per_replica
    held = PlanesSpec(
        model,
        config_text(config),
        trained if isinstance(trained, Parts) else None,
        trained if isinstance(trained, Adapters) else None,
        *parts.host_states.allocated,
        tuple(parts.host_states.placement.gpu_resident),
        nodes_per_replica,
    )
    planes = _planes_of_nodes(workers, held)

    def message(rank: int) -> Build:
        return Build(
            held,
            planes[workers.place.of(rank).node_rank],
            optimizer,
            settings.choices,
            settings.tokens,
            settings.loss_chunk,
            settings.max_grad_norm,
            settings.seed,
            settings.regularization,
            torch.get_num_threads(),
        )

    workers.send(message)
    if settings.choices.sharding.replicas > 1:
        try:
            send_planes(parts.host_states, workers.collectives, parts.backend.device)
        except CollectiveError as error:
            raise workers.explained(error) from error
    own = replace(settings, collectives=workers.collectives.spanning(nodes_per_replica))
    try:
        engine = RankZeroEngine(
            workers, parts.model, parts.host_states, parts.backend, own, parts.optimizer
        )
    except BaseException:
        workers.collect(Done)
        workers.ask(CloseEngine())  # they may be asked to build another
        raise
    workers.collect(Done)
    return engine


def _planes_of_nodes(workers: WorkerGroup, held: PlanesSpec) -> list[SharedPlanes]:
    """Returns where the planes of each node are. Copies on the other nodes are made now; parts of
    planes are there.
    """
    place = workers.place
    firsts = [place.of(node * place.local_world_size) for node in range(1, place.nodes)]
    workers.send_to(
        [each.rank for each in firsts],
        RequestPlanes() if held.nodes_per_replica > 1 else MakePlanes(held),
    )
    answers = workers.collect_from([each.rank for each in firsts], PlanesMade)
    return [workers.memory.planes, *(answer.planes for answer in answers)]

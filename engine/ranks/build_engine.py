"""The engines of all ranks of a run are built here, over planes that the ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config.settings import ModelConfig, OptimConfig
from engine.host.host_adamw import AdamWSettings, HostAdamW
from engine.host.host_store import HostStore
from engine.model.units import StreamedModel
from engine.plan.choices import settled_of
from engine.ranks.crew import Crew
from engine.ranks.held_steps import LeadingHeld
from engine.ranks.leading_engine import LeadingEngine
from engine.ranks.messages import Build, CloseEngine, Done
from engine.runtime.backend import Backend
from engine.runtime.engine_settings import EngineSettings


@dataclass(frozen=True)
class LeadersParts:
    """The engine of the process that leads is built from these parts."""

    model: StreamedModel
    store: HostStore
    backend: Backend
    adamw: HostAdamW


def adamw_settings(train: OptimConfig) -> AdamWSettings:
    """Returns the settings of AdamW in a run."""
    return AdamWSettings(train.beta1, train.beta2, train.eps, train.weight_decay, train.seed)


def lead(store: HostStore, crew: Crew) -> None:
    """Makes the planes of a store, before any is allocated, ones that all ranks change."""
    store.share(crew.memory)
    lead_shared(store, crew)


def lead_shared(store: HostStore, crew: Crew) -> None:
    """Makes planes in memory that the ranks share ones that they change. None may live on the
    device.
    """
    store.divide(crew.shards)
    store.hold_by(LeadingHeld(list(store.layouts), crew.go, crew.wait_for_applied))


def build_engines(
    crew: Crew,
    parts: LeadersParts,
    sources: tuple[ModelConfig, AdamWSettings],
    settings: EngineSettings,
) -> LeadingEngine:
    """Builds the engine of every rank, and returns that of this one. The planes must be allocated
    already. sources: the settings of the model and those of AdamW. Raises RankError where another
    rank cannot build its engine, and what a `StreamingEngine` raises where this one cannot.
    """
    model, adamw = sources
    assert parts.store.states is not None  # the planes are allocated
    blocks = [unit.name for unit in parts.model.blocks]
    # The other ranks open the planes where they are now.
    parts.store.settle(settled_of(blocks, settings.choices), parts.backend)
    optimizer, has_gradients = parts.store.states
    message = Build(
        model,
        crew.memory.planes,
        optimizer,
        has_gradients,
        tuple(parts.store.settled),
        adamw,
        settings.choices,
        settings.tokens,
        settings.loss_chunk,
        settings.max_grad_norm,
        settings.seed,
        torch.get_num_threads(),
    )
    crew.send(lambda _: message)
    own = replace(settings, exchange=crew.exchange)
    try:
        engine = LeadingEngine(parts.model, parts.store, parts.backend, own, parts.adamw)
    except BaseException:
        crew.collect(Done)
        crew.ask(CloseEngine())  # they may be asked to build another
        raise
    engine.lead(crew)
    crew.collect(Done)
    return engine

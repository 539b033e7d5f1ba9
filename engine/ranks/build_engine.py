"""The engines of all ranks of a run are built here, over planes that the ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig, OptimConfig
from engine.config.trained_parts import Parts
from engine.exchange.exchange import ExchangeError
from engine.fit.planner import Chosen
from engine.host.divided_planes import Hosts
from engine.host.host_adamw import AdamWSettings, HostAdamW
from engine.host.host_store import HostStore
from engine.host.shared_memory import SharedPlanes
from engine.model.units import StreamedModel
from engine.plan.choices import settled_of
from engine.ranks.codec import config_text
from engine.ranks.crew import Crew
from engine.ranks.held_steps import LeadingHeld
from engine.ranks.leading_engine import LeadingEngine
from engine.ranks.messages import Build, CloseEngine, Done, Held, Hold, Holds, TellPlanes
from engine.ranks.plane_copies import send_planes
from engine.ranks.remote_shards import RemoteHosts
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


def engine_settings(chosen: Chosen, tokens: int, train: OptimConfig) -> EngineSettings:
    """Returns the settings of a run's engine. Its largest micro-batch has `tokens` positions."""
    return EngineSettings(
        chosen.choices,
        tokens,
        chosen.loss_chunk,
        train.max_grad_norm,
        train.seed,
        regularisation=train.regularisation,
    )


def lead(store: HostStore, crew: Crew, span: int = 1) -> None:
    """Makes the planes of a store, before any is allocated, ones that all ranks change. They are
    divided among `span` hosts.
    """
    store.share(crew.memory)
    if span > 1:
        others = RemoteHosts(crew.shards, crew.place)
        store.divide_among_hosts(crew.place.all_ranks, Hosts(span, others=others))
    lead_shared(store, crew, span)


def lead_shared(store: HostStore, crew: Crew, span: int = 1) -> None:
    """Makes planes in memory that the ranks share ones that they change. None may live on the
    device.
    """
    crew.shards.reach(span * crew.place.ranks)
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
    # Files of the model need not be on other hosts, and a run may change what they say.
    config, trained = parts.model.config, parts.model.parts
    span = settings.choices.span
    held = Held(
        model,
        config_text(config),
        trained if isinstance(trained, Parts) else None,
        trained if isinstance(trained, Adapters) else None,
        *parts.store.states,
        tuple(parts.store.settled),
        span,
    )
    planes = _planes_of_hosts(crew, held)

    def message(rank: int) -> Build:
        return Build(
            held,
            planes[crew.place.of(rank).host],
            adamw,
            settings.choices,
            settings.tokens,
            settings.loss_chunk,
            settings.max_grad_norm,
            settings.seed,
            settings.regularisation,
            torch.get_num_threads(),
        )

    crew.send(message)
    if settings.choices.hosts > 1:
        try:
            send_planes(parts.store, crew.exchange, parts.backend.device)
        except ExchangeError as error:
            raise crew.explained(error) from error
    own = replace(settings, exchange=crew.exchange.spanning(span))
    try:
        engine = LeadingEngine(parts.model, parts.store, parts.backend, own, parts.adamw)
    except BaseException:
        crew.collect(Done)
        crew.ask(CloseEngine())  # they may be asked to build another
        raise
    engine.lead(crew)
    crew.collect(Done)
    return engine


def _planes_of_hosts(crew: Crew, held: Held) -> list[SharedPlanes]:
    """Returns where the planes of each host are. Copies on the other hosts are made now; parts of
    planes are there.
    """
    place = crew.place
    firsts = [place.of(host * place.ranks) for host in range(1, place.hosts)]
    crew.send_to([each.rank for each in firsts], TellPlanes() if held.span > 1 else Hold(held))
    answers = crew.collect_from([each.rank for each in firsts], Holds)
    return [crew.memory.planes, *(answer.planes for answer in answers)]

"""Messages between ranks, sent through the codec and built again."""

from __future__ import annotations

from engine.config.optimizers import OptimizerSettings
from engine.config.settings import ModelConfig
from engine.runtime.distributed.build_engine import RankZeroComponents, build_engines
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.step.engine_settings import EngineSettings
from tests.support.worker_groups import StartedGroup


def rebuilt(workers: StartedGroup) -> None:
    """Builds the engines of all ranks once more, as a run does that is planned anew."""
    settings, how = (
        OptimizerSettings(eps=1e-5),
        ModelConfig(source=str(workers.source), dtype="float32"),
    )
    workers.engine = build_engines(
        workers.workers,
        RankZeroComponents(
            workers.model,
            workers.host_states,
            workers.engine.backend,
            host_optimizer(workers.host_states, settings),
        ),
        how,
        settings,
        EngineSettings(workers.engine.choices, 24, 7, 1.0, 0),
    )

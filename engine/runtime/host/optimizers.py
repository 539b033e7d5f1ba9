"""The class that updates host states with each optimizer is named here."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.optimizers import Optimizer
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import HostOptimizer, OptimizerSettings
from engine.runtime.host.host_states import HostStates

_CLASSES: dict[Optimizer, Callable[[HostStates, OptimizerSettings, int | None], HostOptimizer]] = {
    "adamw": HostAdamW,
    "adamw_bf16": HostAdamW,
    "adamw_8bit": HostAdamW,
}


def host_optimizer(
    states: HostStates, settings: OptimizerSettings, threads: int | None = None
) -> HostOptimizer:
    """Returns the optimizer of host states. It has so many `threads`, by default all cores but
    two.
    """
    return _CLASSES[states.optimizer](states, settings, threads)

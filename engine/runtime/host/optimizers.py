"""What updates units with each optimizer, on the host and on the device, is named here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.config.optimizers import Optimizer, OptimizerSettings
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_muon import HostMuon
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.device_optimizer import DeviceAdamW, DeviceOptimizer
from engine.runtime.optimizer.muon import DeviceMuon


class _Classes(NamedTuple):
    on_host: Callable[[HostStates, OptimizerSettings, int | None], HostOptimizer]
    on_device: Callable[[Optimizer, torch.device], DeviceOptimizer]


_ADAMW = _Classes(HostAdamW, DeviceAdamW)
_CLASSES: dict[Optimizer, _Classes] = {
    "adamw": _ADAMW,
    "adamw_bf16": _ADAMW,
    "adamw_8bit": _ADAMW,
    "muon": _Classes(HostMuon, lambda _optimizer, _device: DeviceMuon()),
}


def host_optimizer(
    states: HostStates, settings: OptimizerSettings, threads: int | None = None
) -> HostOptimizer:
    """Returns what updates host states, with so many `threads`, by default all cores but two."""
    return _CLASSES[states.optimizer].on_host(states, settings, threads)


def device_optimizer(optimizer: Optimizer, device: torch.device) -> DeviceOptimizer:
    """Returns what updates chunks on a device."""
    return _CLASSES[optimizer].on_device(optimizer, device)

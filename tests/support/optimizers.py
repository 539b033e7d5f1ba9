"""The optimizers under test. Who adds one gives its oracle here, and adds it to `KINDS` if it is of
another kind; tests of parity, planes, checkpoints and resumes then have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer, OptimizerSettings
from engine.planning.layout.layout import UnitLayout

SETTINGS = OptimizerSettings(eps=1e-5, weight_decay=0.1)
"""Those of `tests.support.tiny.streamed`."""
ALL = list(OPTIMIZERS)
ROUNDED = [name for name, described in OPTIMIZERS.items() if described.is_rounded]
KINDS = ["adamw", "adamw_8bit"]
"""One of each kind: states element by element, and in blocks. Tests that take long have these."""
RESUMED = [
    (kept, asked)
    for kept in OPTIMIZERS
    for asked, described in OPTIMIZERS.items()
    if kept != asked and kept in described.resumes
]
"""Optimizers of a checkpoint, each with another one that a resume may ask for."""

Parameters = Mapping[str, torch.nn.Parameter]
"""Parameters by their names."""
Oracle = Callable[[Parameters, Collection[str], float, OptimizerSettings], torch.optim.Optimizer]
"""Takes parameters, the names of those with weight decay, the rate and the hyperparameters."""


def _adamw(
    parameters: Parameters, decayed: Collection[str], rate: float, settings: OptimizerSettings
) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [p for name, p in parameters.items() if (name in decayed) is decays],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    betas = settings.beta1, settings.beta2
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=settings.eps)


ORACLES: dict[Optimizer, Oracle] = {ADAMW: _adamw}
"""What streamed training must equal in float32. Optimizers that round their states are compared
with these from afar; `tests/support/blockwise.py` has references of their own.
"""


def torch_optimizer(
    parameters: Parameters,
    decayed: Collection[str],
    optimizer: Optimizer = ADAMW,
    rate: float = 3e-3,
    settings: OptimizerSettings = SETTINGS,
) -> torch.optim.Optimizer:
    """Returns the oracle of an optimizer."""
    return ORACLES[optimizer](parameters, decayed, rate, settings)


def decayed_in(layouts: Collection[UnitLayout]) -> set[str]:
    """Returns the full names of the parameters that weight decay applies to."""
    return {spec.full_name for layout in layouts for spec in layout.parameters if spec.decay}

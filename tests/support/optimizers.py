"""The optimizers under test. Who adds one gives its oracle here, and adds it to `KINDS` if it is of
another kind; tests of parity, planes, checkpoints and resumes then have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.optim import _muon as _muon_of_torch

from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer, OptimizerSettings
from engine.planning.layout.layout import UnitLayout
from engine.runtime.optimizer import muon

SETTINGS = OptimizerSettings(eps=1e-5, weight_decay=0.1)
"""Those of `tests.support.tiny.streamed`."""
ALL = list(OPTIMIZERS)
IN_CHUNKS = [name for name, described in OPTIMIZERS.items() if described.grain is not None]
"""Those that update a unit in chunks, as states on a disk are."""
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


class _Both(torch.optim.Optimizer):
    """Two optimizers of different parameters, as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._optimizers = optimizers

    def step(self) -> None:
        for each in self._optimizers:
            each.step()
            self.state.update(each.state)


def _muon(
    parameters: Parameters, decayed: Collection[str], rate: float, settings: OptimizerSettings
) -> torch.optim.Optimizer:
    # The blocks of a model are numbered.
    matrices = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.ndim == 2 and re.search(r"\.\d+\.", name)
    }
    others = {name: each for name, each in parameters.items() if name not in matrices}
    groups = [
        {
            "params": [p for name, p in matrices.items() if (name in decayed) is decays],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    of_matrices = torch.optim.Muon(groups, lr=rate, adjust_lr_fn="match_rms_adamw")
    return _Both(of_matrices, _adamw(others, decayed, rate, settings))


ORACLES: dict[Optimizer, Oracle] = {ADAMW: _adamw, "muon": _muon}
"""What streamed training must equal in float32. Optimizers that round their states are compared
with these from afar; `tests/support/blockwise.py` has references of their own.
"""


class _Exact(torch.Tensor):
    """A tensor that stays in float32."""

    def bfloat16(self) -> torch.Tensor:
        return self.clone()


@contextmanager
def exact_products() -> Iterator[None]:
    """Lets Muon multiply matrices in float32, here and in torch. In bf16, sums in another order are
    now and then rounded to another number, which training amplifies.
    """
    multiply = _muon_of_torch._zeropower_via_newtonschulz

    def multiply_exactly(matrix: torch.Tensor, *settings) -> torch.Tensor:
        return multiply(matrix.as_subclass(_Exact), *settings).as_subclass(torch.Tensor)

    with (
        patch.object(_muon_of_torch, multiply.__name__, multiply_exactly),
        patch.object(muon, "PRODUCTS", torch.float32),
    ):
        yield


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

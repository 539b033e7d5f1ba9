"""Adapters (LoRA) that a run trains beside the weights of a model, which are unchanged.

No torch is imported. `engine.model.lora` finds the layers of a model that are meant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import Meta

from engine.config.limits import check_limits
from engine.errors import ConfigError

TARGETS, SAVE_MODULES = "train.lora_targets", "train.lora_save_modules"
TARGET_PARAMETERS = "train.lora_target_parameters"
ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer of every block."""


@dataclass(frozen=True)
class Adapters:
    """Which adapters are trained. The whole model is frozen but for them, and for the modules that
    are named here.
    """

    rank: int = 16
    """Width of the factors of an adapter."""
    alpha: float = 32.0
    dropout: float = 0.0
    """Fraction of the input of an adapter that is dropped in training."""
    rslora: bool = False
    """Whether the result is divided by the root of the rank instead of the rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of the names, or a pattern of the names, of linear layers that get an adapter."""
    save_modules: tuple[str, ...] = ()
    """Ends of the names of modules that are trained as a whole."""
    target_parameters: tuple[str, ...] = ()
    """Ends of the names, or a pattern of the names, of parameters with the stacked weights of
    experts that get adapters.
    """

    @property
    def scaling(self) -> float:
        """Factor of the result of an adapter."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def is_plain(self) -> bool:
        """Whether every linear layer has an adapter, without dropout, and nothing is trained beside
        these adapters. Shapes with such adapters are known of all models of the catalog.
        """
        is_more = self.save_modules or self.target_parameters or self.dropout
        return self.targets == (ALL_LINEAR,) and not is_more

    def check(self) -> None:
        """Raises ConfigError for the first setting that is wrong."""
        check_limits("train.lora_rank", self.rank, Meta(ge=1))
        if not self.alpha > 0 or not math.isfinite(self.alpha):
            raise ConfigError(
                "train.lora_alpha",
                f"{self.alpha} is not a positive number; twice the rank is usual.",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                "train.lora_dropout", f"{self.dropout} is outside 0 to 1 (1 excluded)."
            )
        if not (self.targets or self.target_parameters):
            raise ConfigError(
                TARGETS, f"no layers are named; give {ALL_LINEAR}, or names of layers."
            )
        named = {
            TARGETS: self.targets,
            SAVE_MODULES: self.save_modules,
            TARGET_PARAMETERS: self.target_parameters,
        }
        for field, names in named.items():
            if any(not name.strip() for name in names):
                raise ConfigError(field, "a name is empty; leave it out.")
        if self.target_parameters and self.dropout:
            raise ConfigError(
                "train.lora_dropout",
                f"{self.dropout} is given, and adapters of stacked experts have none, as in PEFT; "
                f"set it to 0, or leave {TARGET_PARAMETERS} empty.",
            )
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigError(
                TARGETS, f"{ALL_LINEAR} stands for all layers; give it alone, or leave it out."
            )

"""Changes of a run's settings while it goes on: asked for at any time, made before the next step
that is submitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError

CHANGE = "change"
"""The word in the control file and in the record."""
CHANGEABLE = ("train.learning_rate", "train.steps")


@dataclass(frozen=True)
class Change:
    """New values by dotted name, of `CHANGEABLE`; at least one."""

    values: Mapping[str, Any]

    @classmethod
    def from_dict(cls, values: Any) -> Change:
        """Raises RunError where `values` is not an object of settings that can be changed."""
        if not isinstance(values, dict) or not values:
            raise RunError(f"A change names what to change: {' or '.join(CHANGEABLE)}.")
        for name, value in values.items():
            if name not in CHANGEABLE:
                raise RunError(
                    f"{name!r} cannot be changed while a run goes on; {' and '.join(CHANGEABLE)} "
                    "can."
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RunError(f"{name}: {value!r} is not a number.")
        return cls(dict(values))

    def applied(self, config: TrainConfig, step: int) -> TrainConfig:
        """`config` with the new values; `step`: of the last step that was submitted. Raises
        RunError where the values are out of range, or less steps are asked for than are done.
        """
        steps = self.values.get("train.steps")
        if steps is not None and steps < step:
            raise RunError(
                f"train.steps: {steps:,} are fewer than the {step:,} steps that are done; stop the "
                "run instead."
            )
        changes = dict(self.values) | ({} if steps is None else {"train.epochs": None})
        try:
            return config.with_values(changes)
        except ConfigError as error:
            raise RunError(str(error)) from None

    def in_words(self, before: TrainConfig, after: TrainConfig, total_steps: int) -> str:
        """What changes: `train.steps` from `total_steps`, where the settings gave epochs or
        nothing.
        """
        told = []
        for name in self.values:
            section, _, key = name.partition(".")
            old, new = (getattr(getattr(config, section), key) for config in (before, after))
            told.append(
                f"{name} {total_steps if name == 'train.steps' else old:,} → {new:,}"
                if name == "train.steps"
                else f"{name} {old:g} → {new:g}"
            )
        return ", ".join(told)

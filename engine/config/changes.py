"""The few settings that can change during a run. A change can be requested at any time, and takes
effect before the next step is submitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError

CHANGE = "change"
"""Word for a change in the control file and in the record."""
CHANGEABLE = ("train.learning_rate", "train.steps")


@dataclass(frozen=True)
class Change:
    """One or more new values, named as in `CHANGEABLE`."""

    values: Mapping[str, Any]

    @classmethod
    def from_dict(cls, values: Any) -> Change:
        """Returns the change from a JSON object. Raises RunError if `values` is not an object of
        settings that can be changed.
        """
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
        """Returns `config` with the new values. `step` is the last step that was submitted. Raises
        RunError if a value is out of range, or if fewer steps are requested than are done.
        """
        values = dict(self.values)
        steps = values.get("train.steps")
        if steps is not None:
            if steps < step:
                raise RunError(
                    f"train.steps: {steps:,} are fewer than the {step:,} steps that are done; stop "
                    "the run instead."
                )
            values["train.epochs"] = None  # only one of the two may be given
        try:
            return config.with_values(values)
        except ConfigError as error:
            raise RunError(str(error)) from None

    def as_text(self, before: TrainConfig, after: TrainConfig, total_steps: int) -> str:
        """Returns the change as text. The old value shown for `train.steps` is `total_steps`,
        because the settings may have had epochs or neither.
        """
        sentences = []
        for name in self.values:
            old, new = _value(before, name), _value(after, name)
            if name == "train.steps":
                sentences.append(f"{name} {total_steps:,} → {new:,}")
            else:
                sentences.append(f"{name} {old:g} → {new:g}")
        text = ", ".join(sentences)
        steps = self.values.get("train.steps")
        if steps is not None and after.train.schedule != "constant":
            text += f"; the learning rate falls until step {steps:,}"
        return text


def _value(config: TrainConfig, dotted: str) -> Any:
    section, _, key = dotted.partition(".")
    return getattr(getattr(config, section), key)

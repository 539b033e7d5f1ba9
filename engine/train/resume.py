"""What a resume needs beside the planes, and whether the settings are still those of the session
before.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import RunError

ORDER = ("train.batch_size", "train.seed", "data.shuffle")
"""Settings that say which rows a step reads: with others, rows would be left out and others read
twice.
"""
_OTHERS = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "max_grad_norm",
)


def resume_state(
    config: TrainConfig, fingerprint: str, rounding: dict[str, Any], total_steps: int
) -> dict[str, Any]:
    """Kept in every checkpoint. Order, dropout and schedule are functions of seed and step: there
    is no random state to keep. fingerprint: of the data; rounding: `Chosen.rounding`.
    """
    return {
        "data": fingerprint,
        "rounding": rounding,
        "total_steps": total_steps,
        "settings": _settings(config),
    }


def changed_settings(
    config: TrainConfig, run_id: str, state: dict[str, Any], step: int, total_steps: int
) -> list[str]:
    """Sentences on settings that differ from those of the checkpoint of `step`, whose state is
    `state`, and that a person may have changed on purpose. Raises RunError where the run cannot go
    on from there.
    """
    before, now = state.get("settings") or {}, _settings(config)
    told = []
    for name, value in now.items():
        if name not in before or before[name] == value:
            continue
        if name in ORDER:
            raise RunError(
                f"{name} of run {run_id} was {before[name]} up to step {step:,} and is {value} "
                "now, which changes the rows that its steps read; set it back in config.yaml, or "
                "start a new run."
            )
        told.append(f"{name} was {before[name]} up to step {step:,} and is {value} from here on.")
    if total_steps < step:
        raise RunError(
            f"Run {run_id} has done {step:,} steps, more than the {total_steps:,} that its "
            "settings ask for; raise train.steps in its config.yaml, or start a new run."
        )
    if state.get("total_steps", total_steps) != total_steps:
        told.append(
            f"The run was to have {state['total_steps']:,} steps and has {total_steps:,} now."
        )
    return told


def _settings(config: TrainConfig) -> dict[str, Any]:
    train = asdict(config.train)
    return {
        "train.batch_size": train["batch_size"],
        "train.seed": train["seed"],
        "data.shuffle": config.data.shuffle,
        **{f"train.{name}": train[name] for name in _OTHERS},
    }

"""A checkpoint keeps, in addition to the planes, the state that a resume needs.

A resume compares its settings with those of the previous session.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import RunError

ORDER = ("train.batch_size", "train.seed", "data.shuffle")
"""These settings decide which rows a step reads. If they changed, some rows would be skipped and
others read twice.
"""
_COMPARED = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "max_grad_norm",
)
"""A person may change these settings of `train` on purpose; a resume reports that they differ."""


def resume_state(
    config: TrainConfig, fingerprint: str, rounding: dict[str, Any], total_steps: int
) -> dict[str, Any]:
    """Returns the state that every checkpoint keeps.

    It contains no random state, since the order of the rows, dropout and the schedule are functions
    of the seed and the step. `fingerprint` is that of the data; `rounding` is `Chosen.rounding`.
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
    """Returns sentences about settings that a person may have changed on purpose.

    These settings differ from those of the checkpoint of `step`, whose resume state is `state`.
    Raises RunError if the run cannot continue from that checkpoint.
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
        **{f"train.{name}": train[name] for name in _COMPARED},
    }

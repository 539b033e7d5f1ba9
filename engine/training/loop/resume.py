"""The state that a checkpoint keeps for a resume, in addition to the planes.

A resume compares its settings with those of the session that wrote the checkpoint:

- Settings of how a step is computed, what it costs and what is written are taken as they are now,
  and recorded. Where sums are then in another order, that is recorded.
- Settings that make another run of it are refused by name: other rows, another length, another
  precision. Such a run can start from the weights of this one (`model.start_from`).
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.optimizers import OPTIMIZERS
from engine.config.preference_settings import OBJECTIVE
from engine.config.rope_settings import ROPE_FACTOR, ROPE_SCALING
from engine.config.settings import AUTO, TrainConfig
from engine.errors import RunError
from engine.paths import program_command
from engine.text import counted

ORDER = ("train.batch_size", "train.seed", "data.shuffle")
"""Settings that decide which rows a step reads. If they changed, some rows would be skipped and
others read twice.
"""
PLAN = ("train.micro_batch_size", "engine.rounds", "engine.gpus", "engine.kernels")
"""Settings that decide in which order sums are rounded."""
_CHANGED_BY = {
    "model.dtype": "the planes",
    "model.source": "the model",
    "train.optimizer": "what is kept of earlier gradients",
    ROPE_SCALING: "what the model computes",
    ROPE_FACTOR: "what the model computes",
    OBJECTIVE: "what is learned",
}
_COMPARED = (
    "Evaluations without answers to validation prompts are not compared with later ones, so "
    "weights that were kept for their loss make way for those of the next evaluation."
)
_OF_ADAPTERS = (
    "train.lora_rank",
    "train.lora_alpha",
    "train.lora_rslora",
    "train.lora_targets",
    "train.lora_save_modules",
    "train.lora_target_parameters",
)
"""Settings that decide which adapters a run trains, and what they mean."""
_MOST_QUOTED = 200
"""Number of characters of a setting's value that are quoted, at most."""
_NOT_COMPARED = ("train.steps", "train.epochs", "model.init", "model.start_from")
"""Settings that are not compared. The number of steps is compared as it is counted; the others mean
nothing to a resume.
"""


def resume_state(
    config: TrainConfig,
    fingerprint: str,
    rounding: dict[str, Any],
    total_steps: int,
    skipped: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns the state that every checkpoint keeps.

    It contains no random state, since the order of the rows, dropout and the schedule are functions
    of the seed and the step. `fingerprint` is that of the data; `rounding` is `Chosen.rounding`;
    `skipped` are the steps without an update.
    """
    return {
        "data": fingerprint,
        "rounding": rounding,
        "total_steps": total_steps,
        "skipped": list(skipped),
        "settings": _settings(config),
    }


def kept_rounding(config: TrainConfig, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the choices that the planner must keep so that the run continues bit for bit.

    They are empty if a person has changed a setting of `PLAN`: the plan is then made anew.
    """
    rounding = state.get("rounding") or {}
    return {} if plan_changes(config, state) else dict(rounding)


def plan_changes(config: TrainConfig, state: Mapping[str, Any]) -> list[str]:
    """Returns the settings of `PLAN` that ask for something else than the checkpoint's session did.

    A run that ran out of memory has a smaller plan than its settings ask for. That is no change.
    """
    rounding = state.get("rounding") or {}
    if not rounding:
        return []
    had = {
        "train.micro_batch_size": rounding["micro_batch_size"],
        "engine.rounds": rounding["rounds"],
        "engine.gpus": rounding["ranks"] // rounding["nodes_per_replica"],
        "engine.kernels": "compiled" if rounding["compiled"] else "eager",
    }
    before, now = state.get("settings") or {}, _settings(config)
    return [name for name in PLAN if now[name] != had[name] and now[name] != before.get(name, AUTO)]


def refuse_other_data(
    config: TrainConfig, run_id: str, state: Mapping[str, Any], step: int, fingerprint: str
) -> None:
    """Raises RunError if the rows are no longer those of the checkpoint of `step`.

    `fingerprint` is that of the data now. The sentence names the settings that changed, or else the
    file.
    """
    if "data" not in state:
        raise RunError(
            f"The checkpoint of step {step:,} of run {run_id} does not say which rows it was "
            f"trained on; {train_on_text(run_id)}."
        )
    if state["data"] == fingerprint:
        return
    before, now = _before(state), _settings(config)
    for name, value in now.items():
        # The seed draws the validation rows, and the objective decides whether pairs are read.
        decides = name.startswith("data.") or name in ("train.seed", OBJECTIVE)
        if decides and name in before and before[name] != value:
            raise RunError(
                f"{name} of run {run_id} was {_quoted(before[name])} up to step {step:,} and is "
                f"{_quoted(value)} now, which makes other rows of the data; leave it as it was, or "
                f"{train_on_text(run_id)}."
            )
    raise RunError(
        f"The data of run {run_id} is no longer what it was trained on; restore "
        f"{config.data.title}, or {train_on_text(run_id)}."
    )


def changed_settings(
    config: TrainConfig, run_id: str, state: dict[str, Any], step: int, total_steps: int
) -> list[str]:
    """Returns sentences about settings that a person may have changed on purpose.

    These settings differ from those of the checkpoint of `step`, whose resume state is `state`.
    Raises RunError if the run cannot continue from that checkpoint.
    """
    before, now = _before(state), _settings(config)
    if before and _parts(before) != _parts(now):
        raise RunError(
            f"Run {run_id} trained {_parts_text(before)} up to step {step:,} and is to train "
            f"{_parts_text(now)} now; leave train.method and the settings of what is trained "
            f"as they were, or {train_on_text(run_id)}."
        )
    sentences = []
    for name, value in now.items():
        if name not in before or before[name] == value:
            continue
        was, is_ = _quoted(before[name]), _quoted(value)
        if _makes_another_run(name, before[name], value):
            what = _CHANGED_BY.get(name, "the rows that its steps read")
            raise RunError(
                f"{name} of run {run_id} was {was} up to step {step:,} and is {is_} now, which "
                f"changes {what}; leave it as it was, or {train_on_text(run_id)}."
            )
        sentences.append(f"{name} was {was} up to step {step:,} and is {is_} from here on.")
        if name == "train.optimizer":
            sentences.append(OPTIMIZERS[value].on_resume)
        if name == "output.keep_best" and value == "exact_match":
            sentences.append(_COMPARED)
    anew = plan_changes(config, state)
    if anew:
        sentences.append(
            f"The step is planned anew, since {' and '.join(anew)} changed: sums are rounded in "
            f"another order from step {step + 1:,} on."
        )
    if total_steps < step:
        raise RunError(
            f"Run {run_id} has done {step:,} steps, more than the {total_steps:,} that its "
            "settings ask for; raise train.steps in its config.yaml, or start a new run."
        )
    if state.get("total_steps", total_steps) != total_steps:
        sentences.append(
            f"The run was to have {state['total_steps']:,} steps and has {total_steps:,} now."
        )
    return sentences


def _makes_another_run(name: str, was: Any, is_: Any) -> bool:
    """Returns whether a run cannot be resumed with another value of a setting."""
    match name:
        case "model.source":  # a model that was only moved has the same name in another place
            return Path(str(was)).name != Path(str(is_)).name
        case "train.optimizer":
            return was not in OPTIMIZERS[is_].resumes
    return name in ORDER or name in _CHANGED_BY


def _before(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the session that wrote a checkpoint; empty where it keeps none."""
    return dict(state.get("settings") or {})


def _parts(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the parameters that these settings train, in a comparable form."""
    method = settings.get("train.method", "full")
    if method == "full":
        return ()
    if method == "lora":
        return tuple((name, settings[name]) for name in _OF_ADAPTERS)
    return sorted(settings["train.part_names"]), settings["train.last_blocks"]


def _parts_text(settings: Mapping[str, Any]) -> str:
    """Returns the parameters that these settings train, as text."""
    if not _parts(settings):
        return "the whole model"
    if settings["train.method"] == "lora":
        sentences = [
            f"{name.removeprefix('train.')} {_quoted(value)}" for name, value in _parts(settings)
        ]
        return f"adapters with {', '.join(sentences)}"
    names, blocks = _parts(settings)
    parts = [f"the last {counted(blocks, 'block')}"] if blocks else []
    return " and ".join([*parts, *names])


def lost_steps(saved: int, finished: int) -> str:
    """Returns a sentence on the steps after `saved`, up to `finished`, that an earlier session of a
    run has trained and not saved.
    """
    if finished == saved + 1:
        return f"Step {finished:,} was trained before and not saved; it is trained again."
    return (
        f"Steps {saved + 1:,} to {finished:,} were trained before and not saved; they are trained "
        "again."
    )


def train_on_text(run_id: str) -> str:
    """Returns a clause on how a new run starts from these weights."""
    return (
        "train on from its weights in a new run (Continue training in the app's Runs, or "
        f"{program_command()} train --from {run_id})"
    )


def _quoted(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return textwrap.shorten(text, _MOST_QUOTED) if len(text) > _MOST_QUOTED else text


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns all settings that are compared, by dotted name, as they look after JSON."""
    tree = json.loads(json.dumps(config.to_dict()))
    del tree["name"]
    found = {
        f"{section}.{name}": value
        for section, values in tree.items()
        for name, value in values.items()
    }
    if config.model.rope_scaling == "none":
        del found[ROPE_FACTOR]  # it changes nothing then
    return {name: value for name, value in found.items() if name not in _NOT_COMPARED}

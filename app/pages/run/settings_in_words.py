"""The settings of a run in words, for its view Settings: those that matter most, and those that
were changed from their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from app.form import settings_form
from app.form.settings_form import CHOICE_LABELS
from app.labels import METHOD_LABELS, in_digits
from engine.config.settings import OptimConfig, TrainConfig
from engine.config.tree import by_dotted_name
from engine.errors import RamstreamError
from engine.runs.record.run_folder import RunFolder
from engine.text import counted

SHOWN_FIRST = (
    *("name", "model.source", "data.source", "train.method", "train.lora_rank"),
    *("train.learning_rate", "train.batch_size", "train.steps", "train.epochs"),
    *("train.schedule", "data.max_seq_len", "model.dtype"),
)
"""Settings that are not repeated among those that were changed."""


def settings_in_words(
    folder: RunFolder, total_steps: int, data: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns `main`, pairs of a name and a text, and `changed`, rows of a label, the dotted name,
    the value and the default. Both are empty if the settings cannot be read. `total_steps` is the
    length of the run, or 0 while it is not known; `data` is what its record says of its rows.
    """
    try:
        config = folder.config
    except (RamstreamError, OSError):
        return {"main": [], "changed": []}
    return {"main": _main(config, total_steps, data), "changed": _changed(config)}


def _main(config: TrainConfig, total_steps: int, data: Mapping[str, Any]) -> list[list[str]]:
    train = config.train
    method = METHOD_LABELS[train.method]
    if train.method == "lora":
        method += f", rank {train.lora_rank}"
    return [
        ["Model", config.model.source],
        ["Data", config.data.title],
        *_rows(data),
        ["Trained", method[0].upper() + method[1:]],
        ["Learning rate", in_digits(train.learning_rate)],
        ["Schedule", _schedule(train, total_steps)],
        ["Batch size", counted(train.batch_size, "row")],
        ["Length", _length(train, total_steps, data)],
        ["Sequence length", counted(config.data.max_seq_len, "token")],
        ["Precision", config.model.dtype],
    ]


def _rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Returns how many rows are trained on and evaluated, where that is known."""
    trained, kept = data.get("train_examples"), data.get("eval_examples")
    if not isinstance(trained, int) or not isinstance(kept, int):
        return []
    return [["Rows", f"{trained:,} to train on, {kept:,} for validation"]]


def _length(train: OptimConfig, total_steps: int, data: Mapping[str, Any]) -> str:
    """Returns the length in steps and in passes."""
    rows = data.get("train_rows")
    if train.steps:
        steps = counted(train.steps, "step")
        if not isinstance(rows, int) or rows < 1:
            return steps
        return f"{steps} · {_passes(train.steps * train.batch_size / rows)}"
    passes = _passes(train.epochs or 1)
    return f"{passes} · {counted(total_steps, 'step')}" if total_steps else passes


def _passes(passes: float) -> str:
    count = f"{float(f'{passes:.3g}'):,g}"
    return f"{count} {'pass' if count == '1' else 'passes'}"


def _schedule(train: OptimConfig, total_steps: int) -> str:
    """Returns the schedule, and the step until which the rate falls, since a change of the length
    moves it.
    """
    name = train.schedule.replace("_", " ").capitalize()
    if train.schedule == "constant" or not total_steps:
        return name
    return f"{name}, falls until step {total_steps:,}"


def _changed(config: TrainConfig) -> list[dict[str, str]]:
    given = by_dotted_name(config.to_dict())
    source = {"model": {"source": "any"}, "data": {"source": "any"}}
    usual = by_dotted_name(TrainConfig.from_dict(source).to_dict())
    labels = {setting.dotted: setting.label for setting in settings_form.settings()}
    return [
        {
            "label": labels.get(name, name),
            "title": name,
            "value": _text(name, value),
            "default": _text(name, usual.get(name)),
        }
        for name, value in given.items()
        if value != usual.get(name) and name not in SHOWN_FIRST
    ]


def _text(name: str, value: Any) -> str:
    if value is None or value in ("", [], ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return in_digits(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value)
    return CHOICE_LABELS.get(name, {}).get(str(value), str(value))

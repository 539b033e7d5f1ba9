"""The settings of a run in words, for its view Settings: those that matter most, and those that
were changed from their defaults.
"""

from __future__ import annotations

from typing import Any

from app.form import settings_form
from app.form.settings_form import CHOICE_LABELS
from app.labels import METHOD_LABELS, in_digits
from engine.config.settings import TrainConfig
from engine.config.tree import by_dotted_name
from engine.errors import RamstreamError
from engine.runs.record.run_folder import RunFolder
from engine.text import counted

SHOWN_FIRST = (
    *("name", "model.source", "data.source", "train.method", "train.lora_rank"),
    *("train.learning_rate", "train.batch_size", "train.steps", "train.epochs"),
    *("data.max_seq_len", "model.dtype"),
)
"""Settings that are not repeated among those that were changed."""


def settings_in_words(folder: RunFolder) -> dict[str, Any]:
    """Returns `main`, pairs of a name and a text, and `changed`, rows of a label, the dotted name,
    the value and the default. Both are empty if the settings cannot be read.
    """
    try:
        config = folder.config
    except (RamstreamError, OSError):
        return {"main": [], "changed": []}
    return {"main": _main(config), "changed": _changed(config)}


def _main(config: TrainConfig) -> list[list[str]]:
    train = config.train
    method = METHOD_LABELS[train.method]
    if train.method == "lora":
        method += f", rank {train.lora_rank}"
    return [
        ["Model", config.model.source],
        ["Data", config.data.title],
        ["Trained", method[0].upper() + method[1:]],
        ["Learning rate", in_digits(train.learning_rate)],
        ["Batch size", counted(train.batch_size, "row")],
        ["Length", _length(train.steps, train.epochs)],
        ["Sequence length", counted(config.data.max_seq_len, "token")],
        ["Precision", config.model.dtype],
    ]


def _length(steps: int | None, epochs: float | None) -> str:
    if steps:
        return counted(steps, "step")
    passes = f"{epochs or 1:g}"
    return f"{passes} {'pass' if passes == '1' else 'passes'} over the data"


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

"""The settings in which runs differ, as texts. All functions are pure.

The form's labels name them; a setting that the form does not know has its dotted name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.form import settings_form
from app.labels import METHOD_LABELS, in_digits
from app.session.uploads import UPLOADS_FOLDER
from engine.config.tree import by_dotted_name
from engine.text import counted

SHOWN_DIFFERENCES = 6
"""Largest number of settings in an entry of the queue."""
METHOD = "train.method"
STEPS, EPOCHS = "train.steps", "train.epochs"
_SHOWN_ELSEWHERE = ("name", "model.source", "data.source", "data.title")
"""Settings that an entry of the queue shows anyway."""


def differing_settings(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each setting in which runs differ: its label, its dotted name as `title`,
    and a text for each run. `runs` are their settings by dotted name; a run whose settings are
    empty is not compared and has an en dash. The name of a run is not compared.
    """
    known = [settings for settings in runs if settings]
    names: dict[str, None] = {}  # keys in the order in which they were first seen
    for settings in known:
        names |= dict.fromkeys(settings)
    names.pop("name", None)
    if STEPS in names:  # one of the two says how long a run is
        names.pop(EPOCHS, None)
    rows = []
    for name in names:
        is_shared = len({_setting(settings, name) for settings in known}) == 1
        texts = [_setting(settings, name) for settings in runs]
        if not is_shared:
            rows.append({"name": _label(name), "title": name, "texts": texts})
    return rows


def queued_differences(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a text for each entry of a queue: the settings in which it differs from another one,
    but for those that it shows anyway. `configs` are the nested settings of the entries.
    """
    found = differing_settings([by_dotted_name(config) for config in configs])
    rows = [row for row in found if row["title"] not in _SHOWN_ELSEWHERE]
    texts = []
    for index in range(len(configs)):
        parts = [_in_words(row, row["texts"][index]) for row in rows[:SHOWN_DIFFERENCES]]
        left = len(rows) - len(parts)
        texts.append(" · ".join(parts) + (f" · and {left} more" if left else ""))
    return texts


def _label(name: str) -> str:
    labels = {setting.dotted: setting.label for setting in settings_form.settings()}
    return labels.get(name, name)


def _in_words(row: dict[str, Any], text: str) -> str:
    """Returns a setting of a queued run as in "LoRA" or "learning rate 0.005"."""
    if row["title"] == METHOD:
        return METHOD_LABELS.get(text, text)
    label = row["name"]
    return f"{label[0].lower()}{label[1:]} {text}"


def _setting(settings: dict[str, Any], name: str) -> str:
    """Returns the value of a setting as a preset writes it, but the length of a run in words and an
    upload by the name of its file. A setting without a value has an en dash.
    """
    value = settings.get(name)
    if name == STEPS and settings:
        return _length(value, settings.get(EPOCHS))
    if value is None:
        return "–"
    if isinstance(value, str):
        return Path(value).name if UPLOADS_FOLDER in Path(value).parts else value
    if isinstance(value, float):
        return in_digits(value)
    return json.dumps(value, ensure_ascii=False)


def _length(steps: int | None, epochs: float | None) -> str:
    if steps:
        return counted(steps, "step")
    passes = f"{epochs or 1:g}"  # without either, a run makes one pass
    return f"{passes} {'pass' if passes == '1' else 'passes'}"

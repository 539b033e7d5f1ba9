"""Defaults of settings that follow from other settings. When a person changes one, those that
belonged to the value before are replaced, so that the form stays valid.

All functions are pure, but that the configuration of a model in a folder is read. Values are those
of the form's components by dotted name (`settings_form`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from app.form.own_precision import own_precision
from app.form.settings_form import shown_changes, shown_values
from app.form.source_names import run_name
from engine.config.preference_settings import OBJECTIVE
from engine.config.settings import OptimConfig, TrainConfig
from engine.planning.shape.catalog import catalog

Shown = Mapping[str, Any]
OF_THE_DATA = ("data.format", "data.split")
"""Settings of one data set. With another they go back to their defaults; the columns are cleared
when the preview of the new data arrives.
"""
LENGTH = {"train.epochs": "3", "train.steps": ""}
"""Length of a run on a person's own data, whatever that of a preset on its own is."""
HIGHEST_OF_ADAPTERS, LOWEST_OF_ADAPTERS = 1e-3, 1e-4
"""Usual rates of adapters, which are about ten times those of whole models."""


@dataclass(frozen=True)
class DerivedDefaults:
    """Changes of other settings that follow from a change, and the notes about them."""

    changes: dict[str, Any]
    notes: tuple[str, ...]


def derived_defaults(before: Shown, after: Shown, names: Collection[str]) -> DerivedDefaults:
    """Returns what follows from the changes between two states of the form. names: these are of
    presets, so no person has given them to a run.
    """
    changed = {name for name in after if after[name] != before.get(name)}
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if "train.batch_size" in changed and "train.micro_batch_size" not in changed:
        _derive_micro_batch(after, changes, notes)
    if "model.source" in changed and "model.dtype" not in changed:
        changes["model.dtype"] = own_precision(str(after["model.source"] or ""))
    if "model.source" in changed and "train.learning_rate" not in changed:
        _derive_rate_of_model(after, changes)
    if "data.source" in changed:
        defaults = default_values()
        changes |= {name: defaults[name] for name in OF_THE_DATA if name not in changed}
        if not changed & set(LENGTH):
            changes |= LENGTH
        if after[OBJECTIVE] == "dpo":  # which data without pairs would refuse
            changes[OBJECTIVE] = "sft"
    if "train.method" in changed and "train.learning_rate" not in changed:
        _derive_rate(before, after, changes)
    if "data.source" in changed and "name" not in changed and not _is_given(before, names):
        changes["name"] = run_name(after["data.source"]) or before["name"]
    changes = {name: value for name, value in changes.items() if value != after.get(name)}
    return DerivedDefaults(changes, tuple(notes))


def _is_given(before: Shown, names: Collection[str]) -> bool:
    """Returns whether a person gave its name to a run: it is no preset's, nor that of its data,
    which has a number in a repeat.
    """
    name = str(before.get("name") or "").strip()
    if not name or name in names:
        return False
    of_data = run_name(before.get("data.source"))
    return re.fullmatch(rf"{re.escape(of_data)}( \d+)?", name) is None


def _derive_micro_batch(after: Shown, changes: dict[str, Any], notes: list[str]) -> None:
    micro = str(after["train.micro_batch_size"] or "")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        rows = int(after["train.batch_size"])
        if rows > 0 and rows % int(micro):
            changes["train.micro_batch_size"] = ""
            notes.append(
                f"Micro-batches of {micro} rows do not divide the batch, so their size is chosen "
                "automatically."
            )


def _derive_rate_of_model(after: Shown, changes: dict[str, Any]) -> None:
    """A published model forgets all it knows at the rate of a tiny one."""
    known = {name for entry in catalog() for name in (entry.id, *entry.also)}
    with contextlib.suppress(ValueError, TypeError):
        too_high = float(after["train.learning_rate"]) > HIGHEST_OF_ADAPTERS
        if too_high and str(after["model.source"]).strip() in known:
            usual = OptimConfig().learning_rate
            rate = rate_of_adapters(usual) if after["train.method"] == "lora" else usual
            changes |= shown_changes({"train.learning_rate": rate})


def _derive_rate(before: Shown, after: Shown, changes: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError, TypeError):
        rate = float(after["train.learning_rate"])
        if after["train.method"] == "lora":
            rate = rate_of_adapters(rate)
        elif before["train.method"] == "lora" and rate <= HIGHEST_OF_ADAPTERS:
            rate /= 10
        changes |= shown_changes({"train.learning_rate": rate})


def rate_of_adapters(rate: float) -> float:
    """Returns the learning rate of adapters in place of all weights, which had `rate`."""
    if rate >= HIGHEST_OF_ADAPTERS:
        return rate
    return min(HIGHEST_OF_ADAPTERS, max(LOWEST_OF_ADAPTERS, 10 * rate))


def default_values() -> dict[str, Any]:
    """Returns the component values of all settings as they are without a preset."""
    plain = {"model": {"source": "model"}, "data": {"source": "data"}, "train": {"epochs": 1}}
    return shown_values(TrainConfig.from_dict(plain))


def with_even_rows(shown: Shown) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the values, with the size of micro-batches automatic where it does not divide the
    batch, and a sentence on that. A person who types another batch size meets no error.
    """
    changes: dict[str, Any] = {}
    notes: list[str] = []
    _derive_micro_batch(shown, changes, notes)
    return {**shown, **changes}, tuple(notes)

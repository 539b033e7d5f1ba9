"""Defaults of settings that follow from other settings. When a person changes one, those that
belonged to the value before are replaced, so that the form stays valid.

All functions are pure, but that the configuration of a model in a folder is read. Values are those
of the form's components by dotted name (`settings_form`).
"""

from __future__ import annotations

import contextlib
import math
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
RATE = "train.learning_rate"
START = "model.start_from"
HIGHEST_OF_ADAPTERS, LOWEST_OF_ADAPTERS = 1e-3, 1e-4
"""Usual rates of adapters, which are about ten times those of whole models."""


@dataclass(frozen=True)
class DerivedDefaults:
    """Changes of other settings that follow from a change, and the notes about them."""

    changes: dict[str, Any]
    notes: tuple[str, ...]


def derived_defaults(
    before: Shown, after: Shown, names: Collection[str], preset: Shown | None = None
) -> DerivedDefaults:
    """Returns what follows from the changes between two states of the form. names: these are of
    presets, so no person has given them to a run. preset: the values that the form began with. Its
    precision and its rate follow the model and the method; others were typed, and stay with another
    model.
    """
    changed = {name for name in after if after[name] != before.get(name)}
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if "train.batch_size" in changed and "train.micro_batch_size" not in changed:
        _derive_micro_batch(after, changes, notes)
    follows = preset is None or before["model.dtype"] == _precision(before, preset)
    if "model.source" in changed and "model.dtype" not in changed and follows:
        changes["model.dtype"] = _precision(after, preset)
    if "model.source" in changed and START not in changed and after[START]:
        changes[START] = ""
        notes.append("This model starts from its own weights: those of a run fit the run's model.")
    if "data.source" in changed:
        defaults = default_values()
        changes |= {name: defaults[name] for name in OF_THE_DATA if name not in changed}
        if not changed & set(LENGTH):
            changes |= LENGTH
        if after[OBJECTIVE] == "dpo":  # which data without pairs would refuse
            changes[OBJECTIVE] = "sft"
    if changed & {"model.source", "train.method"} and RATE not in changed:
        _derive_rate(before, after, preset, changes)
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
                f"Micro-batch size {micro} does not divide the batch size, so it is chosen "
                "automatically."
            )


def _precision(shown: Shown, preset: Shown | None) -> str:
    """Returns the precision of the form's model where no person has chosen one."""
    source = str(shown["model.source"] or "")
    if preset is not None and source.strip() == preset["model.source"]:
        return str(preset["model.dtype"])
    return own_precision(source)


def _derive_rate(
    before: Shown, after: Shown, preset: Shown | None, changes: dict[str, Any]
) -> None:
    with contextlib.suppress(ValueError, TypeError):
        start, is_typed = before, False
        if preset is not None:
            is_typed = not math.isclose(float(before[RATE]), _rate_from(preset, before))
            start = before if is_typed else preset
        rate = _rate_of_method(start, after) if is_typed else _rate_from(start, after)
        changes |= shown_changes({RATE: rate})


def _rate_from(start: Shown, shown: Shown) -> float:
    """Returns the rate that follows from that of `start` with the model and the method of `shown`.
    A published model forgets all it knows at the rate of a tiny one.
    """
    source, rate = str(shown["model.source"]).strip(), _rate_of_method(start, shown)
    known = {name for entry in catalog() for name in (entry.id, *entry.also)}
    if source == start["model.source"] or source not in known or rate <= HIGHEST_OF_ADAPTERS:
        return rate
    usual = OptimConfig().learning_rate
    return rate_of_adapters(usual) if shown["train.method"] == "lora" else usual


def _rate_of_method(start: Shown, shown: Shown) -> float:
    rate = float(start[RATE])
    methods = (start["train.method"], shown["train.method"])
    if methods[0] == methods[1]:
        return rate
    if methods[1] == "lora":
        return rate_of_adapters(rate)
    return rate / 10 if methods[0] == "lora" and rate <= HIGHEST_OF_ADAPTERS else rate


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

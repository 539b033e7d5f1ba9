"""What one click does about a warning, or a job that does not fit. All functions are pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from app.form.derived_defaults import rate_of_adapters
from app.form.settings_form import as_labeled, shown_changes
from app.labels import in_bytes, in_digits
from app.pages.new.run_length import RunLength
from engine.config.setting_warnings import HIGHEST_RATE, SettingWarning
from engine.config.settings import TrainConfig
from engine.planning.fit.exactness import Exactness
from engine.planning.fit.report import FitReport
from engine.planning.fit.requirements import PART_WORDS
from engine.planning.fit.suggestion_options import METHOD
from engine.planning.fit.suggestions import Suggestion

SHOWN = 2
"""Largest number of suggestions on the page."""
USUAL_PASSES = 3
RATE = "train.learning_rate"
USUAL_RATES = {"full": 1e-5, "parts": 1e-5, "lora": 1e-4}
HIGH_RATE = 1e-3
"""Rate that takes the place of one that is far too high: usual for tiny models."""
WHOLE = "output.export_form"
FREE = {Exactness.SAME_BITS, Exactness.OTHER_ORDER}
"""What changes no result but for rounding."""
RESULTS = {
    Exactness.SAME_BITS: "Results stay the same",
    Exactness.OTHER_ORDER: "Results stay the same but for rounding",
    Exactness.ROUNDED_GRADIENTS: "Results change slightly",
    Exactness.ROUNDED_MOMENTS: "Results change slightly",
    Exactness.LOWER_PRECISION: "Results change slightly",
    Exactness.FEWER_TOKENS: "Each step sees fewer tokens",
    Exactness.ADAPTERS_ALONE: "The model itself stays as it is",
}
ADD_ON = "Train an add-on (LoRA)"
ADAPTERS = re.compile(r"train adapters \(LoRA\) of rank \d+ instead of all weights")
"""What the engine calls it in a sentence."""
UNFIXABLE = ("model.source",)
"""Settings that no value is known for that would be better."""


# ------------------------------------------------------------------ warnings


def fix_of(warning: SettingWarning, config: TrainConfig) -> dict[str, Any] | None:
    """Returns the `label` and the `changes` (component values) of a button that ends a warning, or
    None where no better value is known.
    """
    field, train = warning.field, config.train
    if field in UNFIXABLE:
        return None
    if field == RATE:
        rate = HIGH_RATE if train.learning_rate > HIGHEST_RATE else USUAL_RATES[train.method]
        return _fix(f"Use {in_digits(rate)}", {RATE: rate})
    steps = train.steps or 1
    if field == "train.warmup_steps":
        return _fix(f"Warm up for {steps // 10}", {field: steps // 10})
    if field == "output.eval_every":
        every = max(1, steps // 4)
        return _fix(f"Evaluate every {every}", {field: every})
    if field == WHOLE:
        return _fix("Export the whole model", {field: "model"})
    return _fix("Reset it", {field: _usual(field)})


def fix_of_passes(found: RunLength) -> dict[str, Any]:
    """Returns the button that makes a run of many passes a usual one."""
    steps = max(1, round(USUAL_PASSES * found.steps / found.passes))
    changes = {"train.epochs": float(USUAL_PASSES), "train.steps": None}
    return _fix(f"Use {USUAL_PASSES} passes ({steps:,} steps)", changes)


def _fix(label: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "changes": shown_changes(changes)}


def _usual(dotted: str) -> Any:
    section, _, name = dotted.rpartition(".")
    sections = {each.name: each for each in dataclasses.fields(TrainConfig)}
    made: Any = sections[section].default_factory
    return getattr(made(), name)


# ------------------------------------------------------------------ a job that does not fit


def best_suggestions(suggestions: Sequence[Suggestion]) -> tuple[Suggestion, ...]:
    """Returns the suggestions to show, the recommended one first: what changes no result, then
    adapters, then what rounds. Rows that are fewer or shorter come last.
    """
    return tuple(sorted(suggestions, key=_cost)[:SHOWN])


def _cost(suggestion: Suggestion) -> int:
    kinds = set(suggestion.exactness)
    if Exactness.FEWER_TOKENS in kinds:
        return 3
    if METHOD in suggestion.changes:
        return 1
    is_free = kinds <= FREE
    return 0 if is_free and "engine.disk" not in suggestion.changes else 2


def suggestion_card(suggestion: Suggestion, report: FitReport, rate: float) -> dict[str, Any]:
    """Returns a suggestion for the page: its `title`, a `note` on time and results, what happens to
    results exactly (`about`), the memory before and after as `bars`, and the component values that
    it `changes`. rate: learning rate of the draft, which is another one with adapters
    (`derived_defaults`).
    """
    title = as_labeled(suggestion.title)
    changing = [kind for kind in suggestion.exactness if kind not in FREE]
    told = changing or suggestion.exactness[-1:]
    results = dict.fromkeys(RESULTS[kind] for kind in told)
    notes = [suggestion.time_text, suggestion.places, *results]
    if METHOD in suggestion.changes:
        title = "Train an add-on instead (LoRA)"
        then = rate_of_adapters(rate)
        sets = f"Sets the learning rate to {in_digits(then)}." if then != rate else ""
        notes = [suggestion.time_text, sets]
    note = " ".join(f"{text[0].upper()}{text[1:].rstrip('.')}." for text in notes if text)
    return {
        "title": title,
        "note": note,
        "about": suggestion.exactness_text,
        "bars": [_before_and_after(name, after, report) for name, after in suggestion.after],
        "changes": shown_changes(suggestion.changes),
        "exactness": [kind.value for kind in suggestion.exactness],
        "seconds": suggestion.seconds,
    }


def in_words_of_page(reason: str) -> str:
    """Returns a reason of the engine against a job in the words of the page."""
    return ADAPTERS.sub(f"{ADD_ON[0].lower()}{ADD_ON[1:]}", as_labeled(reason))


def fixes_of_nearest(report: FitReport) -> dict[str, Any]:
    """Returns the button for the change with which a job lacks least, by its sentence; none where
    there is no such change.
    """
    nearest = report.nearest
    if nearest is None:
        return {}
    title = nearest.title[1:]
    sentence = next(reason for reason in report.reasons if title in reason)
    label = ADD_ON if METHOD in nearest.changes else as_labeled(nearest.title)
    return {in_words_of_page(sentence): _fix(label, nearest.changes)}


def _before_and_after(name: Any, after: int, report: FitReport) -> dict[str, Any]:
    part = getattr(report, name)
    limit = max(1, part.limit or 1)
    whole, words = max(part.total, after, limit), PART_WORDS[name]
    return {
        "text": f"{words[:1].upper()}{words[1:]} {in_bytes(part.total)} → {in_bytes(after)}",
        "before": round(part.total / whole, 4),
        "after": round(after / whole, 4),
        "limit": round(limit / whole, 4),
    }

"""What the Train tab says about a draft before it is started: whether it is valid, whether it fits,
what its data look like. Plain data for `train.js`; nothing here raises for what a person typed.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from app.form.settings_form import as_labelled, describe_error, read_config, settings
from app.pages.draft import Draft
from app.session.session import Session
from app.view.data_figures import lengths_figure, lengths_words
from app.view.fit_figures import fit_figure, item_colour, item_words
from app.words import in_bytes, in_count
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RamstreamError
from engine.fit.memory_items import PartName
from engine.fit.needs import Part, Verdict
from engine.fit.report import HOST_WATTS, FitReport
from engine.machine.read_machine import Machine, read_machine
from engine.words import counted, in_hours, in_seconds

MACHINE_SECONDS = 10
"""Free memory is read again after this long; estimates are made anew where it has changed."""
VERDICTS = {
    Verdict.FITS: ("good", "It fits this machine."),
    Verdict.TIGHT: ("warn", "It fits, but only just."),
    Verdict.DOES_NOT_FIT: ("bad", "It does not fit this machine."),
}
BARS = ((PartName.HOST, "Host memory"), (PartName.GPU, "GPU memory"), (PartName.DISK, "Disk"))
HELP = {
    Verdict.FITS: "",
    Verdict.TIGHT: "One click leaves more room:",
    Verdict.DOES_NOT_FIT: "One click makes it fit:",
}
"""What stands above the remedies."""
REMEDIES_SHOWN = 3
PREVIEW_ROWS = 5
PREVIEW_CHARACTERS = 1200
"""Of each row."""


class Checker:
    """Answers for one session's drafts, of which it keeps the last; estimates and previews are
    remembered by what they depend on. There is one, so that whatever asks finds what was worked out
    before.
    """

    def __init__(self, session: Session):
        self.draft = Draft(session.runs_dir)
        self._session = session
        self._read: tuple[float, Machine | None] = (0.0, None)
        self._estimate = functools.lru_cache(maxsize=128)(self._estimate_now)
        self._preview = functools.lru_cache(maxsize=16)(self._preview_now)

    def check(self, preset: str | None, shown: dict[str, Any], keep: bool) -> dict[str, Any]:
        """The verdict of a draft, which is kept where that is asked for."""
        if keep:
            self.draft.remember(preset, shown)
        return self.verdict(shown)

    def verdict(self, shown: dict[str, Any]) -> dict[str, Any]:
        """`tone`, `headline`, `reasons`, `bars`, `time`, `remedies` (the component values that each
        changes) and `help` above them, `size`, `can_start`, `why_not`, and, when a field is wrong,
        its component's id as `field`.
        """
        verdict = {
            "tone": "bad",
            "headline": "",
            "reasons": [],
            "bars": [],
            "time": [],
            "remedies": [],
            "help": "",
            "size": "",
            "field": None,
            "can_start": False,
            "can_queue": False,
            "why_not": "",
        }
        try:
            report = self._estimate(read_config(shown), self._machine())
        except ConfigError as error:
            sentence = as_labelled(describe_error(error))
            return verdict | {
                "headline": "A setting needs your attention.",
                "reasons": [sentence],
                "why_not": sentence,
                "field": _element_of(error.field),
            }
        except RamstreamError as error:
            sentence = as_labelled(str(error))
            return verdict | {
                "headline": "This cannot be checked yet.",
                "reasons": [sentence],
                "why_not": sentence,
            }
        tone, headline = VERDICTS[report.verdict]
        busy = self._session.why_not_start()
        fits = report.verdict != Verdict.DOES_NOT_FIT
        why_not = busy if fits else "It would not fit, so it cannot be started."
        bars = [
            _bar(name, label, getattr(report, name))
            for name, label in BARS
            if getattr(report, name) is not None
        ]
        remedies = [
            {"text": as_labelled(remedy.text), "changes": _as_shown(remedy.changes)}
            for remedy in report.remedies[:REMEDIES_SHOWN]
        ]
        return verdict | {
            "tone": tone,
            "headline": headline,
            "reasons": [as_labelled(reason) for reason in report.reasons],
            "bars": bars,
            "time": _time_rows(report) if fits else [],
            "remedies": remedies,
            "help": HELP[report.verdict] if remedies else "",
            "can_start": fits and not busy,
            # What the run under way takes now is free when the queue comes to this one.
            "can_queue": busy is not None,
            "size": _size_words(report),
            "why_not": why_not or "",
        }

    def preview(self, shown: dict[str, Any]) -> dict[str, Any]:
        """The first rows with what is trained marked, and how the data were understood; or `error`.
        With them the settings that it goes by, as they were shown: `given`.
        """
        given = {
            name: value
            for name, value in shown.items()
            if name == "model.source" or name.startswith("data.")
        }
        try:
            config = read_config(shown)
            found = self._preview(config.model.source, config.data)
            if "error" in found or (found["mapping"] or {}).get("refused"):
                self._preview.cache_clear()  # whoever mends the file wants it to be read again
            return found | {"given": given}
        except ConfigError as error:
            return {"error": as_labelled(describe_error(error)), "given": given}
        except RamstreamError as error:
            return {"error": as_labelled(str(error)), "given": given}

    def _machine(self) -> Machine:
        """As it was read last, `MACHINE_SECONDS` ago at most."""
        read_at, machine = self._read
        if machine is None or time.monotonic() - read_at >= MACHINE_SECONDS:
            machine = read_machine(self._session.runs_dir)
            self._read = (time.monotonic(), machine)
        return machine

    def _estimate_now(self, config: TrainConfig, machine: Machine) -> FitReport:
        return self._session.engine.estimate(config, machine)

    def _preview_now(self, model: str, data: Any) -> dict[str, Any]:
        engine = self._session.engine
        found = engine.preview(data, engine.load_tokenizer(model), rows=PREVIEW_ROWS)
        mapping = _as_in_form(found.get("mapping"))
        if "error" in found:
            return {"error": as_labelled(found["error"]), "mapping": mapping}
        return {
            name: found[name]
            for name in (
                "source",
                "format",
                "format_detected",
                "rows_measured",
                "rows_cut",
                "rows_skipped",
                "percent_trained",
                "warnings",
            )
        } | {
            "mapping": mapping,
            "columns": [
                [str(name), str(meaning)] for name, meaning in dict(found["columns"]).items()
            ],
            "rows": [_shortened(row) for row in found["rows"]],
            "lengths": lengths_figure(found),
            "said": lengths_words(found),
        }


def _as_in_form(mapping: dict[str, Any] | None) -> dict[str, Any] | None:
    """What can be chosen of the columns, each with what its settings show when it is chosen
    (`shown`).
    """
    if mapping is None:
        return None
    setting = next(setting for setting in settings() if setting.dotted == "data.columns.prompt")
    return mapping | {
        "why": as_labelled(mapping["why"]),
        "columns": [
            column | {"shown": setting.show(column["name"])} for column in mapping["columns"]
        ],
    }


def _as_shown(changes: dict[str, Any]) -> dict[str, Any]:
    """Component values of config values, both by dotted name."""
    return {
        setting.dotted: setting.show(changes[setting.dotted])
        for setting in settings()
        if setting.dotted in changes
    }


def _element_of(field: str) -> str | None:
    name = field.partition("[")[0]  # a list stands in one component
    return next((setting.elem_id for setting in settings() if setting.dotted == name), None)


def _size_words(report: FitReport) -> str:
    model, tokens = report.model, report.time["tokens_per_step"]
    return (
        f"{in_count(model['parameters'])} parameters ({model['model_type']}, {model['blocks']} "
        f"blocks), up to {tokens:,} tokens a step"
    )


def _time_rows(report: FitReport) -> list[dict[str, str]]:
    """Rows of `name`, `text` and `note`: a step, the whole run, and what its electricity comes to."""
    t, cpu = report.time, report.choices["device"] == "cpu"
    if not t["step_seconds"]:
        note = "This card's rates are measured when a run starts."
        if cpu and report.model["dtype"] == "float32":
            note = "Measure, on the Hardware tab, makes the times of this CPU known."
        elif cpu:
            note = "On a CPU, times are predicted in float32 only."
        return [{"name": "Time", "text": "not known yet", "note": note}]
    how = (
        "estimated from the card's specification"
        if t["estimated"]
        else "predicted from measured rates"
    )
    rate = float(f"{t['tokens_per_second']:.3g}")
    rows = [
        {
            "name": "A step",
            "text": f"about {in_seconds(t['step_seconds'])}, {rate:,.0f} tokens/s",
            "note": how,
        }
    ]
    if not t["run_seconds"]:
        return [
            *rows,
            {
                "name": "The run",
                "text": "known once the data are read",
                "note": "Epochs set its length, not steps.",
            },
        ]
    rows.append(
        {
            "name": "The run",
            "text": f"{counted(t['steps'], 'step')}: about {in_hours(max(1, t['run_seconds']))}",
            "note": "",
        }
    )
    if t["energy_kwh"] is not None:
        cost = t["cost"]
        rows.append(
            {
                "name": "Electricity",
                "text": f"{_at_least_a_hundredth(t['energy_kwh'], '.2g')} kWh"
                + ("" if cost is None else f", which cost {_at_least_a_hundredth(cost, '.2f')}"),
                "note": f"estimated at {t['watts']:,.0f} W all run long: the card at its rated power, the rest of the "
                f"machine at {HOST_WATTS:.0f} W"
                + ("; a price is set under Output" if cost is None else ""),
            }
        )
    return rows


def _at_least_a_hundredth(value: float, form: str) -> str:
    return f"about {value:,{form}}" if value >= 0.01 else "less than 0.01"


def _bar(name: PartName, label: str, part: Part) -> dict[str, Any]:
    """Host memory, GPU memory or disk: its figure, what it says in words, and its items."""
    items = [
        {
            "name": item_words(item),
            "text": in_bytes(item.bytes),
            "note": item.note,
            "colour": item_colour(item.kind),
        }
        for item in part.items
        if item.bytes
    ]
    total, limit = part.total, part.limit
    text = in_bytes(total) + (
        f" of {in_bytes(limit)} free" if limit is not None else ", free space not known"
    )
    if limit is not None and total > limit:
        text += f": {in_bytes(total - limit)} short"
    note = (
        ""
        if part.least is None or part.verdict != Verdict.FITS
        else (f"The plan fills free memory to be faster; {in_bytes(part.least)} would do.")
    )
    largest = max(part.items, key=lambda item: item.bytes)
    return {
        "name": name.value,
        "label": label,
        "text": text,
        "tone": VERDICTS[part.verdict][0],
        "items": items,
        "note": note,
        "said": f"{label}: {text}, most of it {item_words(largest)} ({in_bytes(largest.bytes)}).",
        "figure": fit_figure(part),
    }


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its documents joined, and cut after `PREVIEW_CHARACTERS`."""
    pieces, left = [], PREVIEW_CHARACTERS
    for document in row["documents"]:
        for piece in document:
            if left > 0:
                pieces.append({"text": piece["text"][:left], "trained": piece["trained"]})
            left -= len(piece["text"])
    if left < 0:
        pieces.append({"text": " …", "trained": False})
    return {
        "where": row["where"],
        "tokens": row["tokens"],
        "trained_tokens": row["trained_tokens"],
        "cut": row["cut"],
        "skipped": row["skipped"],
        "pieces": pieces,
    }

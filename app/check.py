"""What the Train tab says about a draft before it is started: whether it is valid, whether it fits, what its data look
like. Plain data for `train.js`; nothing here raises for what a person typed."""

from __future__ import annotations

import functools
import time
from typing import Any

from app.form import Setting, describe_error, read_config, settings
from app.session import Session
from app.words import in_bytes, in_count
from engine.config import TrainConfig
from engine.errors import ConfigError, RamstreamError
from engine.fit import TIGHT
from engine.machine import Machine, read_machine

MACHINE_SECONDS = 10
"""Free memory is read again after this long, and estimates with it."""

VERDICTS = {"fits": ("good", "It fits this machine."), "tight": ("warn", "It fits, but only just."),
            "does_not_fit": ("bad", "It does not fit this machine.")}
BARS = (("host", "Host memory"), ("gpu", "GPU memory"), ("disk", "Disk"))
REMEDIES_SHOWN = 3
PREVIEW_ROWS = 5
PREVIEW_CHARACTERS = 1200
"""Of each row."""


class Checker:
    """Answers for one session's drafts; estimates and previews are remembered by what they depend on."""

    def __init__(self, session: Session):
        self._session = session
        self._estimate = functools.lru_cache(maxsize=128)(self._estimate_now)
        self._preview = functools.lru_cache(maxsize=16)(self._preview_now)

    def check(self, shown: dict[str, Any]) -> dict[str, Any]:
        """`tone`, `headline`, `reasons`, `bars`, `remedies`, `size`, `can_start`, `why_not` and, when a field is wrong,
        its component's id as `field`."""
        verdict = {"tone": "bad", "headline": "", "reasons": [], "bars": [], "remedies": [], "size": "", "field": None,
                   "can_start": False, "why_not": ""}
        try:
            report = self._estimate(read_config(shown), int(time.monotonic() / MACHINE_SECONDS))
        except ConfigError as error:
            sentence = describe_error(error)
            return verdict | {"headline": "A setting needs your attention.", "reasons": [sentence], "why_not": sentence,
                              "field": _element_of(error.field)}
        except RamstreamError as error:
            return verdict | {"headline": "This cannot be checked yet.", "reasons": [str(error)], "why_not": str(error)}
        tone, headline = VERDICTS[report["verdict"]]
        busy = self._session.why_not_start()
        fits = report["verdict"] != "does_not_fit"
        why_not = busy if fits else "It would not fit, so it cannot be started."
        bars = [_bar(label, report[name]) for name, label in BARS if report[name] is not None]
        return verdict | {"tone": tone, "headline": headline, "reasons": report["reasons"], "bars": bars,
                          "remedies": report["remedies"][:REMEDIES_SHOWN], "can_start": fits and not busy,
                          "size": _size_words(report), "why_not": why_not or ""}

    def preview(self, shown: dict[str, Any]) -> dict[str, Any]:
        """The first rows with what is trained marked, and how the data were understood; or `error`."""
        try:
            config = read_config(shown)
            return self._preview(config.model.source, config.data)
        except ConfigError as error:
            return {"error": describe_error(error)}
        except RamstreamError as error:
            return {"error": str(error)}

    def _estimate_now(self, config: TrainConfig, _tick: int) -> dict[str, Any]:
        return self._session.engine.estimate(config, read_machine(self._session.runs_dir)).to_dict()

    def _preview_now(self, model: str, data: Any) -> dict[str, Any]:
        engine = self._session.engine
        found = engine.preview(data, engine.load_tokenizer(model), rows=PREVIEW_ROWS)
        return {name: found[name] for name in ("source", "format", "format_detected", "rows_measured", "rows_cut",
                                               "rows_skipped", "percent_trained", "warnings")} | {
            "columns": [[str(name), str(meaning)] for name, meaning in dict(found["columns"]).items()],
            "rows": [_shortened(row) for row in found["rows"]]}


def machine_words(machine: Machine) -> str:
    """This machine in a line."""
    cores = f"{machine.cpu_cores} CPU core{'s' if machine.cpu_cores > 1 else ''}"
    gpus = ", ".join(f"{gpu.name} ({in_bytes(gpu.total)})" for gpu in machine.gpus)
    return (f"{cores} · {in_bytes(machine.ram_limit)} of RAM · {gpus or 'no GPU, so blocks compute on the CPU'} · "
            f"{in_bytes(machine.disk_free)} of disk free")


def apply_remedy(shown: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Component values with a remedy's dotted fields replaced."""
    by_name: dict[str, Setting] = {setting.dotted: setting for setting in settings()}
    return shown | {dotted: by_name[dotted].show(value) for dotted, value in changes.items()}


def _element_of(field: str) -> str | None:
    name = field.partition("[")[0]  # a list stands in one component
    return next((setting.elem_id for setting in settings() if setting.dotted == name), None)


def _size_words(report: dict[str, Any]) -> str:
    model, tokens = report["model"], report["time"]["tokens_per_step"]
    return (f"{in_count(model['parameters'])} parameters ({model['model_type']}, {model['blocks']} blocks), "
            f"up to {tokens:,} tokens a step")


def _bar(label: str, part: dict[str, Any]) -> dict[str, Any]:
    """A report's host, gpu or disk as a bar: each item's share of what is free, and what it says."""
    total, limit = part["total"], part["limit"]
    scale = max(total, limit or 0, 1)
    items = [{"name": item["name"].replace("_", " "), "text": in_bytes(item["bytes"]), "note": item["note"],
              "share": item["bytes"] / scale} for item in part["items"] if item["bytes"]]
    if limit is None:
        return {"label": label, "text": in_bytes(total), "tone": "good", "items": items, "limit_share": 1.0}
    tone = "bad" if total > limit else "warn" if total > TIGHT * limit else "good"
    return {"label": label, "text": f"{in_bytes(total)} of {in_bytes(limit)} free", "tone": tone, "items": items,
            "limit_share": limit / scale}


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
    return {"where": row["where"], "tokens": row["tokens"], "trained_tokens": row["trained_tokens"], "cut": row["cut"],
            "skipped": row["skipped"], "pieces": pieces}

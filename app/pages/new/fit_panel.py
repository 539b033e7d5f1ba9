"""Texts and figures of the fit panel, from the estimate of a draft.

A fit panel is plain data for `train.js`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.labels import in_bytes, in_count, in_predicted_time
from app.pages.new.fixes import (
    best_suggestions,
    fixes_of_nearest,
    in_words_of_page,
    suggestion_card,
)
from app.pages.new.known_models import card_id, model_title
from app.pages.new.receipt import TO_MEASURE, clock, queue_text
from app.pages.new.run_length import RunLength
from app.shared.pool_labels import (
    FREE,
    cost_in_a_sentence,
    held_text,
    places_text,
    pool_bar,
)
from engine.planning.fit.memory_items import Item, PartName
from engine.planning.fit.pool import Held, PoolPart, Share, held_by
from engine.planning.fit.pool_costs import Costs
from engine.planning.fit.report import HOST_WATTS, FitReport
from engine.planning.fit.requirements import FitStatus, Part
from engine.planning.shape.catalog import CatalogEntry
from engine.text import counted, in_seconds

HEADLINES = {
    FitStatus.FITS: ("good", "Fits this machine"),
    FitStatus.TIGHT: ("warn", "Fits, but only just"),
    FitStatus.DOES_NOT_FIT: ("bad", "Does not fit"),
}
"""Tone and headline for each status."""
LACKS = "Fits. {}"
"""Headline of a run that fits and lacks something, with what that is."""
TO_DOWNLOAD = "Fits · {} to download"
NO_MODEL = "The model is not downloaded"
NO_FOLDER = "The folder for runs cannot be used"
ONE_TO_CONFIRM = "1 thing to confirm"
TRY_AGAIN = {"label": "Try again", "changes": {}}
"""Button for what may be there the next time, such as a connection."""
HELP = {
    FitStatus.FITS: "",
    FitStatus.TIGHT: "To leave more room",
    FitStatus.DOES_NOT_FIT: "Make it fit",
}
"""Sentence above the suggestions."""
BARS = {PartName.GPU: "GPU memory", PartName.HOST: "RAM", PartName.DISK: "Disk"}
SHORT_LABELS = BARS | {PartName.GPU: "GPU"}


def unchecked(headline: str, sentence: str, wrong: str | None = None) -> dict[str, Any]:
    """Returns the fit panel of a draft that has no estimate; `sentence` is the reason.

    `wrong` is the id of the component with the invalid value. The keys are those of `fit_panel`.
    """
    return {
        "tone": "bad",
        "headline": headline,
        "reasons": [sentence],
        "fixes": {},
        "job": [],
        "clock": clock(None, ""),
        "lives": "",
        "lives_more": "",
        "bars": [],
        "time": [],
        "answers": [],
        "suggestions": [],
        "to_be_timed": False,
        "help": "",
        "size": "",
        "run_length": "",
        "length": None,
        "smaller": [],
        "model": None,
        "free": "",
        "field": wrong,
        "can_start": False,
        "can_queue": False,
        "queue_text": "",
        "why_not": sentence,
    }


@dataclass(frozen=True)
class Beside:
    """Parts of the fit panel besides the estimate."""

    remarks: Sequence[str] = ()
    """Sentences that a person should read before a start."""
    fixes: Mapping[str, Any] = field(default_factory=dict)
    """By sentence, the button that ends what it is about."""
    tracked: Sequence[str] = ()
    """Where curves also go, in sentences."""
    job: Sequence[str] = ()
    """The run in lines: its model and method, its data and length."""
    rate: float = 0.0
    """The learning rate of the draft."""
    run_length: str = ""
    """What the length of the run means."""
    length: RunLength | None = None
    """The length of the run, where it is known."""
    run_seconds: float | None = None
    """Seconds of the run; None where they are not known."""
    pace: str = ""
    """What is counted in there of earlier runs."""
    waiting: int = 0
    """Number of runs in the queue."""
    begins: float | None = 0.0
    """When the run can begin, as for `clock`."""
    smaller: Sequence[CatalogEntry] = ()
    """Models that would fit instead."""
    has_more: bool = False
    """Whether a fit panel that is timed says more about these settings."""
    costs: Costs | None = None
    """Costs of where units live, in a fit panel that is timed."""
    to_download: str = ""
    """Size of the weights that a run would download first; empty where there are none."""
    download: int = 0
    """Bytes of it on the disk that runs have."""
    disk_free: int = 0
    """Bytes that are free on that disk before a download."""
    lacks: str = ""
    """What the run needs and lacks now, memory apart."""
    lacking: str = ""
    """The same in a few words."""
    remedy: str = ""
    """What to do about it."""
    asks: Mapping[str, Any] = field(default_factory=dict)
    """What a person should confirm before a start, with the button that does."""
    free: str = ""
    """What is free on this machine."""


def fit_panel(report: FitReport, busy: str | None, beside: Beside) -> dict[str, Any]:
    """Returns the fit panel of a draft whose estimate is `report`.

    `busy` is why nothing can be started now, or None. `suggestions` are texts with the component
    values that each changes, and `help` is shown above them. `to_be_timed`: whether a fit panel
    with their times, with costs, and with smaller models would show more. `why_not` is why Start is
    disabled.
    """
    tone, headline = HEADLINES[report.status]
    if beside.remarks and report.status == FitStatus.FITS:
        tone, headline = "warn", f"Fits, with {counted(len(beside.remarks), 'warning')}"
    fits = report.status != FitStatus.DOES_NOT_FIT
    why_not = busy if fits else "Does not fit. Pick a fix above."
    if beside.to_download and report.status == FitStatus.FITS:
        tone, headline = "warn", TO_DOWNLOAD.format(beside.to_download)
    if beside.lacks:
        why_not = beside.lacks
        # What is only not downloaded yet is no fault of the run.
        tone = "warn" if fits and beside.lacking == NO_MODEL else "bad"
        headline = LACKS.format(beside.lacking) if fits else headline
    elif beside.asks:
        why_not = next(iter(beside.asks)) if fits else why_not
        tone, headline = ("warn", ONE_TO_CONFIRM) if fits else (tone, headline)
    shown = best_suggestions(report.suggestions)
    suggestions = [
        suggestion_card(suggestion, report, beside.rate)
        | {"is_recommended": number == 0 and not fits}
        for number, suggestion in enumerate(shown)
    ]
    on_gpu = report.choices["device"] != "cpu"
    has_times = bool(report.time["step_seconds"])
    has_costs = fits and has_times and on_gpu
    lives, more = places_text(report.pool.units, on_gpu, fits)
    # A drive wears: a person should know by how much before a start.
    on_disk = report.disk_offload.sentences() if fits and report.disk_offload is not None else ()
    is_timed = all(suggestion.seconds is not None for suggestion in shown)
    is_timed = is_timed and (beside.costs is not None or not has_costs)
    return {
        "tone": tone,
        "headline": headline,
        "reasons": [
            *filter(None, (beside.lacks, beside.remedy if fits else "")),
            *beside.asks,
            *map(in_words_of_page, report.reasons[_failing(report) :]),
            # What is told of a run matters once it fits.
            *((*beside.remarks, *on_disk, *beside.tracked) if fits else ()),
        ],
        "job": list(beside.job),
        "clock": _clock(report, beside) if fits else clock(None, ""),
        "fixes": {
            **beside.fixes,
            **beside.asks,
            **fixes_of_nearest(report),
            **({beside.lacks: TRY_AGAIN} if beside.lacks else {}),
        },
        "lives": lives,
        "lives_more": more,
        "bars": _bars(report, beside, has_costs),
        "time": _time_rows(report) if fits else [],
        "answers": _answer_rows(report),
        "suggestions": suggestions,
        "to_be_timed": (has_times and not is_timed) or not fits or beside.has_more,
        "help": HELP[report.status] if suggestions else "",
        "size": _size_text(report),
        "run_length": beside.run_length,
        "length": None if beside.length is None else asdict(beside.length),
        "smaller": [_instead(entry) for entry in beside.smaller],
        # Of a model that does not fit, the page offers to look for machines that train it.
        "model": None if fits else report.model["source"],
        "free": beside.free,
        "field": None,
        "can_start": fits and not busy and not beside.lacks and not beside.asks,
        # This includes drafts that do not fit: the memory that the active run takes now will be
        # free when this run's turn comes.
        "can_queue": busy is not None and not beside.lacks and not beside.asks,
        "queue_text": queue_text(beside.waiting),
        "why_not": why_not or "",
    }


def _instead(entry: CatalogEntry) -> dict[str, str]:
    return {"id": card_id(entry), "title": model_title(card_id(entry))}


def _failing(report: FitReport) -> int:
    """Returns the number of parts that do not fit: so many reasons say what the bars show."""
    parts = (report.host, report.gpu, report.disk)
    return sum(part is not None and part.status == FitStatus.DOES_NOT_FIT for part in parts)


def _size_text(report: FitReport) -> str:
    model = report.model
    trained = ""
    if model["trained_parameters"] != model["parameters"]:
        trained = f", {in_count(model['trained_parameters'])} of them trained"
    return (
        f"{in_count(model['parameters'])} parameters{trained} · {model['blocks']} layers · up to "
        f"{report.time['tokens_per_step']:,} tokens a step"
    )


# ------------------------------------------------------------------ time


def _answer_rows(report: FitReport) -> list[dict[str, str]]:
    """Returns a row for each kind of answers that the run draws."""
    return [] if report.answers is None else [_row(*r) for r in report.answers.rows(in_bytes)]


def _row(name: str, text: str, note: str = "") -> dict[str, str]:
    return {"name": name, "text": text, "note": note}


def _time_rows(report: FitReport) -> list[dict[str, str]]:
    """Returns rows of `name`, `text` and `note`: a step, the whole run, and electricity."""
    time = report.time
    if not time["step_seconds"]:
        return [_row("Time", "not known yet", _why_no_time(report))]
    rows = [_step_row(time)]
    if not time["run_seconds"]:
        note = "Passes set its length, not steps."
        return [*rows, _row("The run", "known once the data are read", note)]
    length = in_predicted_time(time["run_seconds"])
    rows.append(_row("The run", f"{counted(time['steps'], 'step')} · {length}"))
    if time["energy_kwh"] is not None:
        rows.append(_electricity_row(time))
    return rows


def _clock(report: FitReport, beside: Beside) -> dict[str, Any]:
    return clock(beside.run_seconds, _why_no_time(report), beside.pace, beside.begins)


def _why_no_time(report: FitReport) -> str:
    if report.time["step_seconds"]:
        return "Known once the data are read."
    if report.choices["device"] != "cpu":
        return "This card's rates are measured when a run starts."
    if report.model["dtype"] == "float32":
        return TO_MEASURE
    return "On a CPU, times are predicted in float32 only."


def _step_row(time: Mapping[str, Any]) -> dict[str, str]:
    rate = float(f"{time['tokens_per_second']:.3g}")
    text = f"about {in_seconds(time['step_seconds'])}, {rate:,.0f} tokens/s"
    if time["estimated"]:
        return _row("A step", text, "estimated from the card's specification")
    return _row("A step", text, "predicted from measured rates")


def _electricity_row(time: Mapping[str, Any]) -> dict[str, str]:
    cost = time["cost"]
    text = f"{_at_least_a_hundredth(time['energy_kwh'], '.2g')} kWh"
    note = (
        f"estimated at {time['watts']:,.0f} W all run long: the card at its rated power, the rest "
        f"of the machine at {HOST_WATTS:.0f} W"
    )
    if cost is None:
        note += "; a price is set under Output"
    else:
        text += f", which cost {_at_least_a_hundredth(cost, '.2f')}"
    return _row("Electricity", text, note)


def _at_least_a_hundredth(value: float, form: str) -> str:
    return f"about {value:,{form}}" if value >= 0.01 else "less than 0.01"


# ------------------------------------------------------------------ memory


def _bars(report: FitReport, beside: Beside, has_costs: bool) -> list[dict[str, Any]]:
    """Returns a bar for each part of the pool. The `cost` of a bar that has one is None until costs
    are known.
    """
    bars, costs = [], beside.costs
    for pooled in report.pool.parts:
        label, ranks = BARS[pooled.name], report.chosen.choices.sharding.ranks
        if pooled.name == PartName.GPU and ranks > 1:
            label += f" of each of {ranks} GPUs"
        download = beside.download if pooled.name == PartName.DISK else 0
        bar = _bar(
            label,
            _with_download(pooled, beside) if download else pooled,
            getattr(report, pooled.name),
            download,
        )
        cost: str | None = ""
        if has_costs and report.pool.living_in(pooled.name):
            cost = None if costs is None else cost_in_a_sentence(report.pool, pooled.name, costs)
        bars.append(bar | {"cost": cost})
    return bars


def _with_download(disk: PoolPart, beside: Beside) -> PoolPart:
    """Returns the disk before the download; the estimate is of what is left of it then."""
    shares = (*disk.shares, Share(Held.FILES, beside.download))
    return replace(disk, limit=beside.disk_free, shares=shares)


def _bar(label: str, pooled: PoolPart, part: Part, download: int) -> dict[str, Any]:
    """Returns one bar, for GPU memory, RAM or disk: what it holds of the pool, the same as text,
    and its items, each with what it is for (`held`), whose color it has in the bar. download: bytes
    of the pool that are none of the part's items.
    """
    items = [_item(item) for item in part.items if item.bytes]
    if download:
        text, held = in_bytes(download), Held.FILES.value
        items.append({"name": "Download", "text": text, "note": "", "held": held})
    if pooled.free is not None and pooled.free > 0:
        free = in_bytes(pooled.free)
        items.append({"name": FREE.capitalize(), "text": free, "note": "", "held": FREE})
    return {
        "name": pooled.name.value,
        "label": label,
        "short": SHORT_LABELS[pooled.name],
        "share": 0.0 if pooled.limit is None else min(1.0, pooled.total / max(1, pooled.limit)),
        "text": _need_text(pooled, download),
        "tone": HEADLINES[part.status][0],
        "pool": pool_bar(pooled),
        "held": f"{label}: {held_text(pooled)}.",
        "items": items,
        "note": _part_note(part),
    }


def _item(item: Item) -> dict[str, Any]:
    return {
        "name": item.words,
        "text": in_bytes(item.bytes),
        "note": _item_note(item),
        "held": held_by(item.kind).value,
    }


def _item_note(item: Item) -> str:
    """Returns the note on an item without a beginning that says its name again."""
    if item.note.lower().startswith(f"{item.words.lower()} "):
        return item.note[len(item.words) + 1 :]
    first, _, rest = item.note.partition(", ")
    said = (text.strip().lower().removesuffix("s") for text in (first, item.words))
    return rest if len(set(said)) == 1 else item.note


def _need_text(pooled: PoolPart, download: int) -> str:
    total, limit = pooled.total, pooled.limit
    needs = f"needs {in_bytes(total)}"
    if download:
        needs += f" ({in_bytes(download)} download)"
    if limit is None:
        return needs
    only = "only " if total > limit else ""
    return f"{needs} · {only}{in_bytes(limit)} free"


def _part_note(part: Part) -> str:
    """Returns a note that explains a full bar when a plan of less memory would fit as well."""
    if part.least is None or part.status != FitStatus.FITS:
        return ""
    return f"The plan fills free memory to be faster; {in_bytes(part.least)} would do."

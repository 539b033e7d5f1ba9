"""A row of Runs describes one run of the list, and an entry of the sidebar one of the latest. Both
are plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.labels import (
    STATE_TONES,
    in_bytes,
    in_digits,
    in_loss,
    in_share,
    in_time,
    state_label,
    state_tone,
)
from app.shared.run_bar import actions_in
from app.verdict.findings import Tone
from app.verdict.outcome import WRONG, Outcome
from engine.runs.summaries.evaluation_figures import Figure
from engine.runs.summaries.evaluation_summary import NOT_EVALUATED, EvaluationSummary
from engine.runs.summaries.listing import RunSummary
from engine.runs.summaries.sparkline import NO_SPARKLINE, Sparkline
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps


@dataclass(frozen=True)
class Weights:
    """Which weights of a run there are."""

    can_chat: bool = False
    """Whether there are weights for a chat: a checkpoint, the best, an export or a paused run."""
    saved: SavedSteps = NOTHING_SAVED
    """Weights of the run on the disk."""
    has_export: bool = False
    """Whether the run's own folder holds an exported model or adapters."""


NO_WEIGHTS = Weights()


@dataclass(frozen=True)
class RunScan:
    """What the server finds out about a run after it was listed."""

    sparkline: Sparkline = NO_SPARKLINE
    folder_bytes: int | None = None
    """Bytes of the files in the run's folder; None if they were not counted yet."""
    evaluation: EvaluationSummary = NOT_EVALUATED
    outcome: Outcome | None = None
    """What came of a run that has finished, as on its page; None where that is not known."""


NOT_SCANNED = RunScan()
RECENT = 6
"""Number of runs in the sidebar, besides all that continue."""


def recent_runs(runs: Sequence[RunSummary], served_id: str | None) -> list[RunSummary]:
    """Returns the runs of the sidebar: those that continue, the latest ones, and the one that is
    served. `runs` are all runs, the newest first.
    """
    going = [run for run in runs if _goes_on(run)]
    over = [run for run in runs if not _goes_on(run)]
    room = max(0, RECENT - len(going))
    return [*going, *over[:room], *(run for run in over[room:] if run.id == served_id)]


def recent_row(
    run: RunSummary, scan: RunScan = NOT_SCANNED, served_id: str | None = None
) -> dict[str, Any]:
    """Returns the entry of a run in the sidebar, of which one may be served. A run that has
    finished has no word until it is known what came of it, so that its color does not change.
    """
    is_awaited = run.state == "finished" and scan is NOT_SCANNED
    return {
        "id": run.id,
        "name": run.name,
        "word": "" if is_awaited else shown_word(run, scan),
        "tone": _tone(run, scan),
        "progress": round(min(1.0, run.step / run.total_steps), 4) if run.total_steps else 0.0,
        "continues": _goes_on(run),
        "served": run.id == served_id,
    }


def _goes_on(run: RunSummary) -> bool:
    return STATE_TONES[run.state] == "busy" or run.state == "paused"


def run_row(
    run: RunSummary,
    weights: Weights = NO_WEIGHTS,
    scan: RunScan = NOT_SCANNED,
    is_busy: bool = False,
) -> dict[str, Any]:
    """Returns one row. A run that cannot be shown gets a row that marks it as unreadable, so that
    the other runs are still listed. While the server `is_busy` with a run or a queue, a run that
    can be resumed can only be queued for that.
    """
    try:
        return _run_row(run, weights, scan, is_busy)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        unreadable = replace(
            run,
            state="unreadable",
            step=0,
            total_steps=0,
            loss=None,
            seconds=0.0,
            reason=f"What its record says cannot be shown ({type(error).__name__}: {error}).",
        )
        return _run_row(unreadable, NO_WEIGHTS, NOT_SCANNED, is_busy)


def _run_row(run: RunSummary, weights: Weights, scan: RunScan, is_busy: bool) -> dict[str, Any]:
    sparkline = scan.sparkline
    is_over = run.step >= run.total_steps
    steps = f"{run.step:,}" if is_over else f"{run.step:,} of {run.total_steps:,}"
    return {
        "id": run.id,
        "name": run.name,
        "note": run.note,
        "state": run.state,
        "word": shown_word(run, scan),
        # As on its page: a run is as green as its verdict.
        "tone": _tone(run, scan),
        "steps": steps,
        "loss": in_loss(run.loss),
        "curve": [float(f"{loss:.4g}") for loss in sparkline.losses],
        "curve_tone": _curve_tone(scan),
        "validation": in_loss(sparkline.validation_loss),
        "before": _before(sparkline),
        "worse": _worse(sparkline),
        "accuracy": _answered(sparkline),
        "evaluated": _evaluated(scan.evaluation),
        "size": "" if scan.folder_bytes is None else in_bytes(scan.folder_bytes),
        "bytes": scan.folder_bytes,
        "has_export": weights.has_export,
        "tags": list(run.tags),
        "model": run.model,
        "data": run.data,
        "created": run.created,
        "at_work": in_time(run.seconds),
        # The row names the folder, so what is in it needs no path.
        "reason": run.reason.removeprefix(f"{run.path}/"),
        "actions": _row_actions(run, weights, is_busy),
        "begins_anew": weights.saved.newest is None,
    }


def _outcome(run: RunSummary, scan: RunScan) -> Outcome | None:
    if run.state != "finished":
        return None
    if scan.outcome is None and _leaves_worse(scan.sparkline):
        return Outcome(WRONG["worse than before training"], "bad")
    return scan.outcome


def shown_word(run: RunSummary, scan: RunScan) -> str:
    """Returns the word that `app.shared.run_bar.shown_word` gives to the whole record."""
    found = _outcome(run, scan)
    label = state_label(run.state, run.export_failed)
    return label if found is None or run.export_failed else found.word


def _tone(run: RunSummary, scan: RunScan) -> str:
    """Returns the tone that `app.shared.run_bar.shown_tone` gives to the whole record."""
    tone, found = state_tone(run.state, run.export_failed), _outcome(run, scan)
    return (
        tone
        if found is None or (run.export_failed and found.tone in ("good", "calm"))
        else found.tone
    )


def _curve_tone(scan: RunScan) -> Tone:
    if _leaves_worse(scan.sparkline):
        return "bad"
    return "good" if scan.outcome is None else scan.outcome.tone


def _before(sparkline: Sparkline) -> str:
    return "" if sparkline.before is None else f"{in_loss(sparkline.before)} before training"


def _answered(sparkline: Sparkline) -> dict[str, str]:
    """Returns the share of validation prompts answered as expected, and how many those are."""
    if sparkline.accuracy is None:
        return {"share": "–", "count": "not tested yet"}
    count = f"{sparkline.correct:,} of {sparkline.total:,} answers right"
    return {"share": in_share(sparkline.accuracy), "count": count}


def _evaluated(found: EvaluationSummary) -> dict[str, str]:
    """Returns the loss, the right answers and the results of tasks, of the base model and the
    trained one, as in 6.073 → 0.111.
    """
    tasks = [f"{one.name.partition(':')[0]} {_both(one, in_digits)}" for one in found.tasks]
    return {
        "loss": _both(found.loss, in_loss),
        "right": _both(found.right, in_share),
        "tasks": ", ".join(tasks),
    }


def _both(figure: Figure | None, as_text: Callable[[float], str]) -> str:
    if figure is None or figure.trained is None:
        return "–"
    before = "" if figure.base is None else f"{as_text(figure.base)} → "
    return before + as_text(figure.trained)


def _leaves_worse(sparkline: Sparkline) -> bool:
    """Returns whether a run is worse than before training, as its verdict says."""
    worse = sparkline.worse
    return worse is not None and not (sparkline.leaves_better and worse.of == "validation")


def _worse(sparkline: Sparkline) -> str:
    worse = sparkline.worse
    if worse is None or not _leaves_worse(sparkline):
        return ""
    now, before = in_loss(worse.now), in_loss(worse.before)
    return f"Worse than before training: {worse.of} loss {before} → {now}."


def _row_actions(run: RunSummary, weights: Weights, is_busy: bool) -> list[str]:
    """Returns the actions of a row, in the order of its buttons."""
    asked = actions_in(run.state, weights.saved)
    is_readable = run.state != "unreadable"
    # A paused run is resumed in the run bar, which also offers its other actions.
    can_resume = "resume" in asked and run.state != "paused"
    can_delete = "stop" not in asked and STATE_TONES[run.state] != "busy"
    offers = [
        ("open", is_readable),
        ("resume", can_resume and not is_busy),
        ("queue", can_resume and is_busy and weights.saved.full is not None),
        ("chat", weights.can_chat and is_readable),
        ("evaluate", weights.can_chat and is_readable),
        ("export", is_readable and weights.saved.trained_on is not None),
        ("details", True),
        ("draft", is_readable),
        ("train-on", is_readable and can_delete and weights.saved.trained_on is not None),
        ("compare", is_readable),
        ("delete", can_delete),
    ]
    return [action for action, is_offered in offers if is_offered]

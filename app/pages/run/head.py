"""The head of a run's page: what the run is doing before its first step, then how it goes, and in
the end what came of it. All functions are pure.
"""

from __future__ import annotations

from typing import Any

from app.form.settings_form import as_labeled
from app.pages.run.answers import right_samples
from app.pages.run.best import best_of
from app.pages.run.facts import facts
from app.pages.run.result import result
from app.pages.run.stage import stage
from app.shared.run_bar import TRANSIENT_LABELS, job_sentence
from app.verdict.findings import Finding, Verdict
from engine.config.export_choice import ExportFrom
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import SavedSteps

FACTS_SHOWN = 2


def head(
    snapshot: RunSnapshot,
    state: str,
    saved: SavedSteps,
    judged: Verdict,
    export_from: ExportFrom = "best",
) -> dict[str, Any]:
    """Returns the head: its title, one sentence, the steps before the first one while they last,
    the numbers that matter most, and the names of its buttons. `phase` is `preparing`, `going` or
    `over`.
    """
    before = stage(snapshot, state, saved)
    if before is not None:
        phase = "preparing" if before["steps"] else "over"
        return {"phase": phase, "facts": []} | before
    over = result(snapshot, state, saved, judged, export_from)
    if over is not None:
        # Of a run that was never evaluated, nobody knows whether it learned.
        is_known = bool(len(snapshot.evals)) or judged.main.tone != "good"
        return {
            "phase": "over",
            "tone": judged.tone if is_known else "calm",
            "steps": [],
        } | (over | {"facts": over["facts"][:FACTS_SHOWN]})
    main = _main(judged)
    is_calm = main.tone == "good" and (_rests(snapshot, state) or _has_none_right(snapshot))
    return {
        "phase": "going",
        "title": _title(snapshot, state, main),
        "text": _text(snapshot, state, main, judged),
        "tone": "calm" if is_calm or judged.tone == "calm" else main.tone,
        "steps": [],
        "facts": facts(snapshot, None, best_of(snapshot))[:FACTS_SHOWN],
        "actions": [],
    }


def _main(judged: Verdict) -> Finding:
    """Returns the finding of the head, which is of learning where only the speed is not good."""
    found = (judged.main, *judged.also)
    learns = next((each for each in found if each.rule in ("doing well", "too early")), None)
    return learns if learns is not None and judged.main.rule == "speed" else judged.main


def _rests(snapshot: RunSnapshot, state: str) -> bool:
    """Returns whether the title says that no step is computed, in place of the verdict."""
    return state == "preparing" or (state == "paused" and not snapshot.lacks_space_for)


def _title(snapshot: RunSnapshot, state: str, main: Finding) -> str:
    if _rests(snapshot, state):
        what = "Paused at" if state == "paused" else "Resuming from"
        return f"{what} step {snapshot.step:,}"
    # The numbers beside it say the rest.
    if main.rule != "doing well":
        return main.text
    return (
        "The loss falls, no answer is right yet" if _has_none_right(snapshot) else "Learning well"
    )


def _has_none_right(snapshot: RunSnapshot) -> bool:
    """Returns whether none of the latest sample answers is right, where it is known what is."""
    samples = right_samples(snapshot)
    return samples is not None and not samples[0]


def _text(snapshot: RunSnapshot, state: str, main: Finding, judged: Verdict) -> str:
    if snapshot.job is not None:
        return job_sentence(snapshot.job)
    if state == "paused" and not snapshot.lacks_space_for:
        return "Resume continues at once."
    if state in TRANSIENT_LABELS:
        return TRANSIENT_LABELS[state]
    if main is not judged.main:
        return as_labeled(judged.main.text)
    few = [each.text for each in judged.also if each.rule == "few rows"]
    return as_labeled(" ".join([*few, main.advice]).rstrip())

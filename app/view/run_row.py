"""A row of the Runs tab describes one run of the list, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from app.view.run_bar import actions_in
from app.words import STATE_TONES, STATE_WORDS, in_digits, in_time
from engine.checkpoints.saved_steps import NOTHING_SAVED, SavedSteps
from engine.runs.listing import RunSummary


@dataclass(frozen=True)
class Weights:
    """`Weights` says which weights of a run there are."""

    can_talk: bool = False
    """There are weights to talk to: a checkpoint, an export, or those of a paused run."""
    saved: SavedSteps = NOTHING_SAVED
    """These checkpoints of the run are on the disk."""


NO_WEIGHTS = Weights()


def run_row(run: RunSummary, weights: Weights = NO_WEIGHTS) -> dict[str, Any]:
    """Returns one row. A run that cannot be shown gets a row that says it is unreadable, so that
    the other runs are still listed.
    """
    try:
        return _run_row(run, weights)
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
        return _run_row(unreadable, NO_WEIGHTS)


def _run_row(run: RunSummary, weights: Weights) -> dict[str, Any]:
    steps = f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}"
    return {
        "id": run.id,
        "name": run.name,
        "note": run.note,
        "state": run.state,
        "word": STATE_WORDS[run.state],
        "tone": STATE_TONES[run.state],
        "steps": steps,
        "loss": in_digits(run.loss),
        "model": run.model,
        "data": run.data,
        "created": run.created,
        "at_work": in_time(run.seconds),
        "reason": run.reason,
        "actions": _row_actions(run, weights),
        "begins_anew": weights.saved.newest is None,
        "export_folder": f"exports/{run.id}",
    }


def _row_actions(run: RunSummary, weights: Weights) -> list[str]:
    """Returns the actions of a row, in the order of its buttons."""
    asked = actions_in(run.state, weights.saved)
    is_readable = run.state != "unreadable"
    # A paused run is resumed in the run bar, which also offers its other actions.
    can_resume = "resume" in asked and run.state != "paused"
    can_delete = "stop" not in asked and STATE_TONES[run.state] != "busy"
    offers = [
        ("open", is_readable),
        ("resume", can_resume),
        ("talk", weights.can_talk and is_readable),
        ("export", is_readable and weights.saved.newest is not None),
        ("details", True),
        ("draft", is_readable),
        ("train-on", is_readable and can_delete and weights.saved.newest is not None),
        ("compare", is_readable),
        ("delete", can_delete),
    ]
    return [action for action, is_offered in offers if is_offered]

"""What a run is doing before its first step, as a row of steps, or why it ended before it. Until a
step is finished there is nothing to judge, so the head of the page shows this. All functions are
pure.
"""

from __future__ import annotations

from typing import Any

from app.labels import STATE_LABELS, STATE_TONES, in_count, in_loss, in_share
from app.shared.run_bar import JOB_LABELS
from app.verdict.outcome import how_it_can_go_on, how_it_ended
from engine.runs.record.snapshot import OVER_STATES, RunSnapshot
from engine.text import counted
from engine.training.checkpoints.saved_on_disk import SavedSteps

TITLES = {
    "preparing": "Starting",
    "running": "First step",
    "pausing": "Pausing before the first step",
    "paused": "Paused before the first step",
    "stopping": "Stopping before the first step",
    "saving": "Saving before the first step",
}
COMPILING = "Compiling takes a while, once."
WHAT_IT_IS = {
    "download": "Later runs find it on this machine.",
    "tokenize": "Turning every row into tokens.",
    "load_model": "Weights are read from the disk into RAM.",
    "allocate": "RAM is reserved for weights, gradients and optimizer states.",
    "dry_run": "Testing the largest step, so memory problems show now.",
    "evaluate": "Measuring the validation loss before training, to compare with later.",
    "reference": "Measuring how likely the answers are before training.",
    "sample": "Answering validation prompts before training, to compare with later.",
    "prompts": "Answering the sample prompts before training, to compare with later.",
}
DOWNLOAD, DATA, MODEL, TEST, BEFORE = STEPS = (
    "Download model",
    "Read data",
    "Load model",
    "Test step",
    "Before training",
)
STEP_OF_JOB = {
    "download": DOWNLOAD,
    "tokenize": DATA,
    "allocate": MODEL,
    "load_model": MODEL,
    "dry_run": TEST,
    "reference": BEFORE,
    "evaluate": BEFORE,
    "sample": BEFORE,
    "prompts": BEFORE,
}


def stage(snapshot: RunSnapshot, state: str, saved: SavedSteps) -> dict[str, Any] | None:
    """Returns what is shown of a run without a finished step, or None once there is one. `steps`
    are those before the first step of training, each with its label, whether it is done, and a
    note; they are empty where the run is over.
    """
    if len(snapshot.steps):
        return None
    if state in OVER_STATES or state == "interrupted":
        return {
            "title": f"{STATE_LABELS[state]} before the first step",
            "text": _why(snapshot, state, saved),
            "tone": STATE_TONES[state],
            "steps": [],
            "actions": ["draft"],
        }
    return {
        "title": _title(snapshot, state),
        "text": _text(snapshot, state),
        "tone": STATE_TONES[state],
        "steps": _steps(snapshot, state),
        "actions": [],
    }


def _title(snapshot: RunSnapshot, state: str) -> str:
    if snapshot.job is None or state in ("paused", "pausing"):
        return TITLES[state]
    return JOB_LABELS.get(snapshot.job.job, TITLES[state])


def _text(snapshot: RunSnapshot, state: str) -> str:
    job = snapshot.job
    if job is None or state in ("paused", "pausing"):
        compiles = state == "running" and snapshot.plan_choices.get("compiled")
        return snapshot.reason or f"{TITLES[state]}. {COMPILING if compiles else ''}".rstrip()
    message = f"{job.message.rstrip('.')}." if job.message else ""
    return f"{message} {WHAT_IT_IS.get(job.job, '')}".strip()


def _why(snapshot: RunSnapshot, state: str, saved: SavedSteps) -> str:
    ended = how_it_ended(snapshot, state)
    if state == "discarded":
        return ended
    continues = how_it_can_go_on(state, saved)
    return ended if continues in ended else f"{ended} {continues}"


# ------------------------------------------------------------------ the steps before the first one


def _steps(snapshot: RunSnapshot, state: str) -> list[dict[str, Any]]:
    now = _now(snapshot, state)
    names = STEPS if now == DOWNLOAD else STEPS[1:]
    at = names.index(now) if now in names else len(names)
    notes = {DATA: _data_note(snapshot), MODEL: _model_note(snapshot), BEFORE: _before(snapshot)}
    steps = []
    for place, name in enumerate(names):
        step: dict[str, Any] = {"label": name, "state": "next", "share": None}
        step["note"] = notes.get(name, "")
        if place < at:
            step["state"] = "done"
        elif place == at:
            step |= {"state": "now", "share": _share(snapshot)}
            step["note"] = step["note"] or _share_text(snapshot)
        steps.append(step)
    return steps


def _now(snapshot: RunSnapshot, state: str) -> str:
    """Returns the step that is under way; empty if all are done."""
    if snapshot.job is not None and snapshot.job.job in STEP_OF_JOB:
        return STEP_OF_JOB[snapshot.job.job]
    if state != "preparing":
        return ""
    if not snapshot.data:
        return DATA
    return TEST if snapshot.is_started else MODEL


def _share(snapshot: RunSnapshot) -> float | None:
    """Returns how much of the job is done, or None where that is not known."""
    job = snapshot.job
    if job is None or not job.total:
        return None
    return round(min(1.0, job.done / job.total), 4)


def _share_text(snapshot: RunSnapshot) -> str:
    share = _share(snapshot)
    return "" if share is None else in_share(share)


def _data_note(snapshot: RunSnapshot) -> str:
    rows, trained = snapshot.data.get("rows"), snapshot.data.get("trained_tokens")
    notes = [counted(rows, "row")] if isinstance(rows, int) else []
    if isinstance(trained, int):
        notes.append(f"{in_count(trained)} tokens")
    return " · ".join(notes)


def _model_note(snapshot: RunSnapshot) -> str:
    if not snapshot.parameters:
        return ""
    size = f"{in_count(snapshot.parameters)} parameters"
    if snapshot.trained_parameters is None:
        return size
    return f"{size}, {in_count(snapshot.trained_parameters)} trained"


def _before(snapshot: RunSnapshot) -> str:
    """Returns what is known of the weights before training."""
    right = [f"{match.correct} of {match.total} right" for match in snapshot.exact_matches[:1]]
    if not len(snapshot.evals):
        return "".join(right)
    return " · ".join([f"validation loss {in_loss(snapshot.evals.loss[0])}", *right])

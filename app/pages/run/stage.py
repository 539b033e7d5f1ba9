"""What a run is doing before its first step, or why it ended before it, as text. Until a step is
finished there is nothing to draw, so the page shows this in the place of its charts. All functions
are pure.
"""

from __future__ import annotations

from typing import Any

from app.labels import STATE_LABELS, STATE_TONES, in_bytes, in_count, in_digits
from app.shared.run_bar import JOB_LABELS
from app.verdict.outcome import how_it_can_go_on, how_it_ended
from engine.runs.record.snapshot import OVER_STATES, RunSnapshot
from engine.text import counted
from engine.training.checkpoints.saved_on_disk import SavedSteps

TITLES = {
    "preparing": "Getting ready",
    "running": "The first step is under way",
    "pausing": "Pausing before the first step",
    "paused": "Paused before the first step",
    "stopping": "Stopping before the first step",
    "saving": "Saving before the first step",
}
COMPILING = "Its blocks are compiled in it, which takes a while once."
WHAT_IT_IS = {
    "download": "The model comes from the hub, once; it is kept for later runs.",
    "tokenize": "Every row is read once and becomes tokens.",
    "load_model": "Weights are read from the disk into host RAM.",
    "allocate": "Weights, gradients and optimizer states get their places in host RAM.",
    "dry_run": "A step of the longest rows shows now, not after hours, whether memory is enough.",
    "evaluate": "The loss on validation rows before training, to compare with later.",
    "reference": "What the answers are compared with is found once: how likely they are now.",
    "sample": "Validation prompts are answered before training, to compare with later.",
    "prompts": "The sample prompts are answered before training, to compare with later.",
}


def stage(snapshot: RunSnapshot, state: str, saved: SavedSteps) -> dict[str, Any] | None:
    """Returns what is shown of a run without a finished step, or None once there is one."""
    if len(snapshot.steps):
        return None
    is_over = state in OVER_STATES or state == "interrupted"
    return {
        "title": f"{STATE_LABELS[state]} before the first step"
        if is_over
        else _title(snapshot, state),
        "text": _why(snapshot, state, saved) if is_over else _text(snapshot, state),
        "tone": STATE_TONES[state],
        "share": None if is_over else _share(snapshot),
        "done": _done(snapshot),
        "actions": ["draft"] if is_over else [],
    }


def _title(snapshot: RunSnapshot, state: str) -> str:
    if snapshot.job is None or state in ("paused", "pausing"):
        return TITLES[state]
    return JOB_LABELS.get(snapshot.job.job, TITLES[state])


def _text(snapshot: RunSnapshot, state: str) -> str:
    job = snapshot.job
    if job is None:
        compiles = state == "running" and snapshot.plan_choices.get("compiled")
        return snapshot.reason or (COMPILING if compiles else "")
    message = f"{job.message.rstrip('.')}." if job.message else ""
    return f"{WHAT_IT_IS.get(job.job, '')} {message}".strip()


def _why(snapshot: RunSnapshot, state: str, saved: SavedSteps) -> str:
    ended = how_it_ended(snapshot, state)
    if state == "discarded":
        return ended
    continues = how_it_can_go_on(state, saved)
    return ended if continues in ended else f"{ended} {continues}"


def _share(snapshot: RunSnapshot) -> float | None:
    """Returns how much of the job is done, or None where that is not known."""
    job = snapshot.job
    if job is None or not job.total:
        return None
    return round(min(1.0, job.done / job.total), 4)


def _done(snapshot: RunSnapshot) -> list[str]:
    """Returns what is known already, one sentence each."""
    done = []
    rows = snapshot.data.get("rows")
    if isinstance(rows, int):
        trained = snapshot.data.get("trained_tokens")
        tokens = f", {in_count(trained)} tokens to train on" if isinstance(trained, int) else ""
        done.append(f"The data are read: {counted(rows, 'row')}{tokens}.")
    if snapshot.parameters:
        units = counted(len(snapshot.units), "unit")
        trained = ""
        if snapshot.trained_parameters is not None:
            trained = f", of which {in_count(snapshot.trained_parameters)} are trained"
        size = in_count(snapshot.parameters)
        done.append(f"The model has {size} parameters in {units}{trained}.")
    memory = snapshot.memory
    if len(memory):
        done.append(f"The process takes {in_bytes(memory.host_rss[-1])} of host memory.")
    if len(snapshot.evals):
        done.append(f"Before training the validation loss is {in_digits(snapshot.evals.loss[0])}.")
    for match in snapshot.exact_matches[:1]:
        right = f"{match.correct} of {counted(match.total, 'validation prompt')}"
        done.append(f"Before training {right} are answered exactly as expected.")
    return done

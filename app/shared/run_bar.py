"""The run bar, which is the line over a run: how a run is doing, or how it ended, and which
requests are possible, as plain data. All functions are pure and need neither Plotly nor Gradio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.labels import (
    STATE_LABELS,
    in_rough_time,
    in_share,
    state_label,
    state_tone,
)
from app.verdict.findings import Verdict
from app.verdict.judge import verdict
from app.verdict.outcome import (
    Outcome,
    how_it_can_go_on,
    how_it_ended,
    how_its_export_failed,
    outcome,
)
from engine.runs.record.run_folder import shown_state
from engine.runs.record.snapshot import OVER_STATES, RECENT_STEPS, Job, RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps

JOB_LABELS = {
    "download": "Downloading the model",
    "load_model": "Loading the model",
    "tokenize": "Reading the data",
    "allocate": "Reserving RAM",
    "checkpoint": "Writing a checkpoint",
    "export": "Exporting",
    "evaluate": "Evaluating on validation rows",
    "reference": "Answers before training",
    "sample": "Validation prompts",
    "prompts": "Sample prompts",
    "dry_run": "Testing the largest step",
}
PENDING_LABELS = {
    "stop": "Stop requested: finishing the step, then saving.",
    "discard": "Discard requested: finishing the step.",
    "pause": "Pause requested: finishing the step.",
    "resume": "Resuming.",
    "save": "Save requested: finishing the step.",
    "change": "Edit requested: used from the next step on.",
}
TRANSIENT_LABELS = {
    "preparing": "Preparing.",
    "pausing": "Finishing the step, then pausing.",
    "stopping": "Finishing the step, then saving.",
    "saving": "Saving.",
}
"""Labels of the states that a run leaves after a short time."""
STARTING = "Its process is starting."
ACTIONS = {
    "preparing": ("stop", "discard"),
    "running": ("pause", "save", "change", "stop", "discard"),
    "pausing": ("stop", "discard"),
    "paused": ("resume", "save", "change", "stop", "discard"),
    "stopped": ("resume",),
    "failed": ("resume",),
    "interrupted": ("resume",),
}
"""Actions that a person can request in each state."""
ACTIONS_ON_A_FULL_DISK = {
    "record": ("stop", "discard"),
    "checkpoint": ("save", "stop", "discard"),
    "stop": ("save", "stop", "discard"),
}
"""Actions that a person can request while a run waits for disk space, by what the run cannot write.
The run continues automatically once there is space, so there is no resume.
"""
MARKS = {"good": "✓", "bad": "✗", "warn": "‖", "calm": "■"}
"""Marks with which the title of a browser's tab begins, by the tone of the state."""


@dataclass(frozen=True)
class ShownRun:
    """What the bar shows about a run that is not in the run's record."""

    run_id: str
    name: str
    is_running: bool
    """Whether a process holds the run's lock."""
    pending: str | None = None
    """Command that was requested and has not been taken yet."""
    learning_rate: float | None = None
    """Peak learning rate in the settings, or None if they cannot be read."""
    saved: SavedSteps = NOTHING_SAVED
    """Checkpoints of the run on the disk."""
    saves: bool = True
    """Whether the run writes checkpoints."""
    is_lost: bool = False
    """Whether the run's folder is gone, so that nothing can be requested."""
    is_constant: bool = False
    """Whether the learning rate does not fall toward the end of the run."""
    is_starting: bool = False
    """Whether the run has a process of its own, which has written nothing yet."""

    def state(self, recorded: str) -> str:
        """Returns the state to show of a run that has `recorded` another."""
        return "preparing" if self.is_starting else shown_state(recorded, self.is_running)


def run_bar(snapshot: RunSnapshot, run: ShownRun, judged: Verdict | None = None) -> dict[str, Any]:
    """Returns the texts and numbers of the bar, and the possible requests to the run. `judged` is
    the verdict, where it is known already.
    """
    state = run.state(snapshot.state)
    tone = shown_tone(snapshot, state, judged)
    seconds = snapshot.steps.seconds
    lacks_space_for = snapshot.lacks_space_for if state == "paused" else ""
    # A run that cannot write its record cannot report that it has taken a request. Its actions stay
    # available in that case.
    pending = None if lacks_space_for == "record" else run.pending
    actions = ACTIONS_ON_A_FULL_DISK.get(lacks_space_for) or actions_in(state, run.saved)
    if run.is_lost:
        actions = ()
    shown = STARTING if run.is_starting else sentence(snapshot, state, run.saved, judged)
    stop_saves = run.saves and lacks_space_for not in ("record", "stop")
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": state,
        "word": state_label(state, snapshot.export_failed),
        "outcome": shown_word(snapshot, state, judged),
        "tone": tone,
        "progress": round(snapshot.progress, 4),
        "step": f"{snapshot.step:,} of {snapshot.total_steps:,}" if snapshot.total_steps else "–",
        "left": _time_left(snapshot, state),
        "sentence": _pending(pending, stop_saves) or shown,
        "actions": [each for each in actions if not pending and (run.saves or each != "save")],
        "pending": pending,
        "offers": [] if run.is_lost else _offers(state, run.saved),
        "waits": bool(lacks_space_for),
        "begins_anew": run.saved.newest is None and state != "paused",
        "stop_saves": stop_saves,
        "settings": {
            "learning_rate": run.learning_rate,
            "steps": snapshot.total_steps,
            "done": snapshot.step,
            "falls": not run.is_constant,
        },
        "title": f"{_mark(snapshot, state, tone)} {run.name} · Ramstream",
        "step_seconds": recent_median(seconds) if seconds else None,
    }


def actions_in(state: str, saved: SavedSteps) -> tuple[str, ...]:
    """Returns the requests that a person can make to a run in `state`. A run of which weights alone
    are kept is not resumed. Nor is a failed one with nothing saved: with the same settings it would
    fail again.
    """
    actions = ACTIONS.get(state, ())
    is_hopeless = state == "failed" and saved.newest is None
    if is_hopeless or (saved.is_weights_alone and state != "paused"):
        return tuple(action for action in actions if action != "resume")
    return actions


def _offers(state: str, saved: SavedSteps) -> list[str]:
    """Returns what can be done with a run whatever it is asked for, as in the list of runs."""
    is_over = state in OVER_STATES or state == "interrupted"
    trains_on = ["train-on"] if is_over and saved.trained_on is not None else []
    return ["rename", "draft", *trains_on, *(["delete"] if is_over else [])]


def recent_median(values: Sequence[float]) -> float:
    """Returns the median of the latest steps."""
    return float(np.median(values[-RECENT_STEPS:]))


def shown_tone(snapshot: RunSnapshot, state: str, judged: Verdict | None = None) -> str:
    """Returns the tone of a state, or of the outcome of a run that has finished, where that is
    known. `judged` is the verdict, where it is known already.
    """
    tone = state_tone(state, snapshot.export_failed)
    found = _outcome(snapshot, state, judged)
    if found is None or (snapshot.export_failed and found.tone in ("good", "calm")):
        return tone
    return found.tone


def shown_word(snapshot: RunSnapshot, state: str, judged: Verdict | None = None) -> str:
    """Returns the state as a word, or the outcome of a run that has finished, where that is known.
    `judged` is the verdict, where it is known already.
    """
    found = _outcome(snapshot, state, judged)
    label = state_label(state, snapshot.export_failed)
    return label if found is None or snapshot.export_failed else found.word


def _outcome(snapshot: RunSnapshot, state: str, judged: Verdict | None) -> Outcome | None:
    if state != "finished":
        return None
    return outcome(snapshot, judged or verdict(snapshot, state))


def _mark(snapshot: RunSnapshot, state: str, tone: str) -> str:
    """Returns the beginning of the tab's title, which stays visible when the browser truncates the
    title.
    """
    if state == "running":
        return f"{100 * snapshot.progress:.0f} %"
    if state == "finished" and tone == "warn":
        return "!"
    return MARKS.get(tone, STATE_LABELS[state])


def _time_left(snapshot: RunSnapshot, state: str) -> str:
    if state in ("running", "paused", "pausing") and snapshot.seconds_left is not None:
        return in_rough_time(snapshot.seconds_left)
    return "–"


# ------------------------------------------------------------------ the sentence


def _pending(command: str | None, stop_saves: bool) -> str:
    """Returns the text while a request waits to be taken; it is empty if none does."""
    if command == "stop" and not stop_saves:
        return "Stop requested: finishing the step."
    return PENDING_LABELS[command] if command else ""


def sentence(
    snapshot: RunSnapshot,
    state: str,
    saved: SavedSteps = NOTHING_SAVED,
    judged: Verdict | None = None,
) -> str:
    """Returns one sentence on how the run is doing, or how it ended. `saved` are its checkpoints on
    the disk. `judged` is the verdict, where it is known already.
    """
    if state in OVER_STATES or state == "interrupted":
        return _over_sentence(snapshot, state, saved, judged)
    if snapshot.job is not None:
        return job_sentence(snapshot.job)
    if state == "paused":
        if snapshot.lacks_space_for:
            return snapshot.reason
        return f"Paused at step {snapshot.step:,}: Resume continues at once."
    if state == "running":
        return (judged or verdict(snapshot, state)).main.text
    return snapshot.reason or TRANSIENT_LABELS[state]


def _over_sentence(
    snapshot: RunSnapshot, state: str, saved: SavedSteps, judged: Verdict | None
) -> str:
    if state == "finished" and judged is not None and judged.main.is_alarm:
        # The line is no greener than the verdict.
        return f"{judged.main.text} {how_its_export_failed(snapshot)}".rstrip()
    ended = how_it_ended(snapshot, state)
    # A recorded reason, which an interrupted run lacks, says by itself what can be done.
    has_whole_reason = snapshot.reason and state != "interrupted"
    return ended if has_whole_reason else f"{ended} {how_it_can_go_on(state, saved)}".rstrip()


def job_sentence(job: Job) -> str:
    """Returns what is being done, and how far it is."""
    text = JOB_LABELS.get(job.job, job.job.replace("_", " ").capitalize())
    if job.total:
        text += f" {in_share(job.done / job.total)}"
    if job.message:
        text += f": {job.message[0].lower()}{job.message[1:].rstrip('.')}"
    return f"{text}."

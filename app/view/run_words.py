"""`RunSnapshot` to what the screens say and draw, as plain data: pure functions, no Plotly, no
Gradio.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from app.view.diagnosis import diagnosis
from app.words import (
    STATE_TONES,
    STATE_WORDS,
    in_bytes,
    in_count,
    in_digits,
    in_share,
    in_short_time,
    in_step_time,
    in_time,
)
from engine.fit.predicted import QUANTITIES
from engine.runs.folder import shown_state
from engine.runs.listing import RunSummary
from engine.runs.snapshot import RECENT_STEPS, RunSnapshot
from engine.words import counted

EXCESS_SHOWN = 0.05
"""Share above a prediction from which what was measured is marked."""
LOG_LINES_SHOWN = 200
SAMPLES_SHOWN = 5
SAMPLES_LOOKED_AT = 20
JOB_WORDS = {
    "download": "Downloading the model",
    "load_model": "Loading the model",
    "tokenise": "Reading the data",
    "allocate": "Reserving host memory",
    "checkpoint": "Writing a checkpoint",
    "export": "Exporting",
    "evaluate": "Evaluating on held-out rows",
    "sample": "Held-out prompts",
    "prompts": "Sample prompts",
    "dry_run": "Trying a step",
}
PENDING_WORDS = {
    "stop": "Stop requested: finishing the step, then saving.",
    "discard": "Discard requested: finishing the step.",
    "pause": "Pause requested: finishing the step.",
    "resume": "Resuming.",
    "save": "Save requested: finishing the step.",
    "change": "Change requested: made before the next step.",
}
ACTIONS = {
    "preparing": ("stop", "discard"),
    "running": ("pause", "save", "change", "stop", "discard"),
    "pausing": ("stop", "discard"),
    "paused": ("resume", "save", "change", "stop", "discard"),
    "stopped": ("resume",),
    "failed": ("resume",),
    "interrupted": ("resume",),
}
"""What a person can ask for in each state."""
ACTIONS_ON_A_FULL_DISK = {
    "record": ("stop", "discard"),
    "checkpoint": ("save", "stop", "discard"),
    "stop": ("save", "stop", "discard"),
}
"""The same for a run that waits for space, by what it cannot write: it goes on by itself."""


# ------------------------------------------------------------------ the run bar


def run_bar(
    snapshot: RunSnapshot,
    run_id: str,
    name: str,
    is_running: bool,
    pending: str | None = None,
    learning_rate: float | None = None,
) -> dict[str, Any]:
    """What the bar above the tabs shows; `pending` is a command that was asked for and not yet
    taken, `learning_rate` the peak of the settings.
    """
    state = shown_state(snapshot.state, is_running)
    word, percent = STATE_WORDS[state], f"{100 * snapshot.progress:.0f} %"
    marks = {"good": "✓", "bad": "✗", "warn": "‖", "calm": "■"}
    mark = marks.get(STATE_TONES[state]) or (percent if state == "running" else word)
    rates = snapshot.steps.tokens_per_second
    lacks_space_for = snapshot.lacks_space_for if state == "paused" else ""
    if lacks_space_for == "record":
        # it cannot tell that it has taken a request: what can be asked of it stays on offer
        pending = None
    actions = ACTIONS_ON_A_FULL_DISK.get(lacks_space_for) or ACTIONS.get(state, ())
    return {
        "run_id": run_id,
        "name": name,
        "state": state,
        "word": word,
        "tone": STATE_TONES[state],
        "progress": round(snapshot.progress, 4),
        "step": f"{snapshot.step:,} of {snapshot.total_steps:,}" if snapshot.total_steps else "–",
        "left": _time_left(snapshot, state),
        "rate": in_count(_recent_median(rates)) if rates else "–",
        "sentence": PENDING_WORDS[pending] if pending else sentence(snapshot, state),
        "actions": [] if pending else list(actions),
        "pending": pending,
        "waits": bool(lacks_space_for),
        "stop_saves": lacks_space_for not in ("record", "stop"),
        "settings": {
            "learning_rate": learning_rate,
            "steps": snapshot.total_steps,
            "done": snapshot.step,
        },
        "title": f"{mark} {name} · Ramstream",
        "step_seconds": _recent_median(snapshot.steps.seconds) if snapshot.steps.seconds else None,
    }


def sentence(snapshot: RunSnapshot, state: str) -> str:
    """One sentence: how the run is doing, or how it ended."""
    at = f"step {snapshot.step:,}"
    if state == "interrupted":
        saved = snapshot.checkpoints[-1].step if snapshot.checkpoints else None
        then = (
            f"goes on from the checkpoint of step {saved:,}."
            if saved
            else "starts anew, as nothing was saved yet."
        )
        return f"The run was interrupted at {at}, when its program ended; Resume {then}"
    if state == "finished":
        return _how_it_finished(snapshot)
    if state == "stopped":
        return snapshot.reason or f"Stopped at {at} and saved: Resume continues there."
    if state == "discarded":
        return snapshot.reason or f"Discarded at {at}."
    if state == "failed":
        return snapshot.reason or "The run failed."
    if snapshot.job is not None:
        return _job_sentence(snapshot)
    if state == "paused":
        return (
            snapshot.reason
            if snapshot.lacks_space_for
            else f"Paused at {at}: Resume continues at once."
        )
    if state == "running":
        return diagnosis(snapshot).text
    return (
        snapshot.reason
        or {
            "preparing": "Getting ready.",
            "pausing": "Finishing the step, then pausing.",
            "stopping": "Finishing the step, then saving.",
            "saving": "Saving.",
        }[state]
    )


def _how_it_finished(snapshot: RunSnapshot) -> str:
    text = f"Finished {snapshot.step:,} steps in {in_time(snapshot.seconds)}"
    scores = {match.moment: match for match in snapshot.exact_matches if match.total}
    if "after" in scores:
        shown = [
            in_share(scores[m].correct / scores[m].total)
            for m in ("before", "after")
            if m in scores
        ]
        text += f"; held-out exact match {' → '.join(shown)}"
    elif snapshot.evals.loss:
        text += f"; held-out loss {in_digits(snapshot.evals.loss[-1])}"
    return text + "."


def _job_sentence(snapshot: RunSnapshot) -> str:
    job = snapshot.job
    words = JOB_WORDS.get(job.job, job.job.replace("_", " ").capitalize())
    share = f" {in_share(job.done / job.total)}" if job.total else ""
    return f"{words}{share}" + (
        f": {job.message[0].lower()}{job.message[1:].rstrip('.')}." if job.message else "."
    )


def _time_left(snapshot: RunSnapshot, state: str) -> str:
    if state in ("running", "paused", "pausing") and snapshot.seconds_left is not None:
        return in_time(snapshot.seconds_left)
    return "–"


def _recent_median(values: list[float]) -> float:
    return float(np.median(values[-RECENT_STEPS:]))


# ------------------------------------------------------------------ numbers now, and what is known


def tiles(snapshot: RunSnapshot) -> list[dict[str, str]]:
    """The latest numbers: label, value, and a note below."""
    steps, memory, evals = snapshot.steps, snapshot.memory, snapshot.evals
    latest = {
        name: getattr(steps, name)[-1] if len(steps) else None
        for name in ("loss", "learning_rate", "grad_norm", "seconds")
    }
    rate = in_count(_recent_median(steps.tokens_per_second)) if len(steps) else "–"
    flops = in_digits(_recent_median(steps.tflops)) if len(steps) else "–"
    shown = [
        _tile(
            "Loss",
            in_digits(latest["loss"]),
            f"held out {in_digits(evals.loss[-1])}" if evals.loss else "",
        ),
        _tile("Learning rate", in_digits(latest["learning_rate"]), ""),
        _tile("Gradient norm", in_digits(latest["grad_norm"]), "before clipping"),
        _tile(
            "Tokens per second",
            rate,
            f"{in_step_time(latest['seconds'])} a step" if latest["seconds"] is not None else "",
        ),
        _tile("TFLOPS", flops, _ceiling_note(snapshot)),
        _tile(
            "Host memory",
            in_bytes(memory.host_rss[-1]) if len(memory) else "–",
            f"{in_bytes(memory.host_pinned[-1])} pinned"
            if len(memory) and memory.host_pinned[-1]
            else "",
        ),
    ]
    if len(memory) and memory.gpu_total[-1]:
        shown.append(
            _tile(
                "GPU memory",
                in_bytes(memory.gpu_peak[-1] or memory.gpu_allocated[-1]),
                f"peak, of {in_bytes(memory.gpu_total[-1])}",
            )
        )
    if any(memory.power[-SAMPLES_LOOKED_AT:]):
        shown.append(
            _tile(
                "Power", f"{memory.power[-1]:,.0f} W", f"{in_digits(memory.energy[-1])} Wh so far"
            )
        )
    return shown


def _ceiling_note(snapshot: RunSnapshot) -> str:
    if not snapshot.ceiling_tflops or not len(snapshot.steps):
        return "of model work"
    return (
        f"{in_share(_recent_median(snapshot.steps.tflops) / snapshot.ceiling_tflops)} of this "
        "machine's ceiling"
    )


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def details(snapshot: RunSnapshot) -> dict[str, Any]:
    """What is known of the run besides its curves: facts, held-out answers, files and the log."""
    return {
        "facts": _facts(snapshot),
        "data": _listed(snapshot.data),
        "plan": _listed(_short(snapshot.plan_choices)),
        "answers": _answers(snapshot),
        "files": _files(snapshot),
        "forecast": _forecast(snapshot),
        "log": [
            {"time": entry.time, "level": entry.level, "text": entry.text}
            for entry in list(snapshot.log)[-LOG_LINES_SHOWN:]
        ],
        "grid": snapshot.plan_grid,
        "formula": snapshot.flops_formula,
    }


def _facts(snapshot: RunSnapshot) -> list[list[str]]:
    facts = [
        ["Model", f"{in_count(snapshot.parameters)} parameters in {len(snapshot.units)} units"]
        if snapshot.parameters
        else None,
        ["Computes on", snapshot.device_name or snapshot.device.upper()]
        if snapshot.device
        else None,
        ["Sessions", f"{snapshot.sessions} (resumed at step {snapshot.resumed_step or 0:,})"]
        if snapshot.sessions > 1
        else None,
        [
            "Record",
            f"{counted(snapshot.damaged_lines, 'line')} could not be read, so a point of a curve "
            "may be missing; the log says which",
        ]
        if snapshot.damaged_lines
        else None,
        ["Program", snapshot.program_version] if snapshot.program_version else None,
    ]
    return [fact for fact in facts if fact is not None]


def _listed(values: dict[str, Any]) -> list[list[str]]:
    return [
        [name.replace("_", " ").capitalize(), _plain(value)]
        for name, value in values.items()
        if _plain(value)
    ]


def _short(choices: dict[str, Any]) -> dict[str, Any]:
    """A plan's choices, with long lists of units as their number."""
    return {
        name: f"{len(value)} units"
        if isinstance(value, (list, tuple)) and len(value) > 4
        else value
        for name, value in choices.items()
    }


def _plain(value: Any) -> str:
    """A value of the engine's summaries as text; nested ones as `name value` pairs."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return in_digits(value) if isinstance(value, float) else str(value)


MOMENT_WORDS = {
    "dry_run": "Measured in a dry run of one step, before the first.",
    "running": "Measured in the first steps; again when the run ends.",
    "end": "Measured over the whole session.",
}


def _forecast(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """What was predicted and what was measured, a row a quantity: words, both values, and how far
    off, as text and tone.
    """
    if snapshot.forecast is None:
        return None
    rows = []
    for name, pair in snapshot.forecast.quantities.items():
        predicted, measured, error = (
            pair.get(column) for column in ("predicted", "measured", "error")
        )
        words = in_step_time if name.endswith("_seconds") else in_bytes
        rows.append(
            {
                "name": QUANTITIES.get(name, name.replace("_", " ").capitalize()),
                "predicted": "–" if predicted is None else words(predicted),
                "measured": "–" if measured is None else words(measured),
                "error": "–" if error is None else _signed(100 * error),
                "tone": "warn" if error is not None and error > EXCESS_SHOWN else "",
            }
        )
    return {"rows": rows, "said": MOMENT_WORDS.get(snapshot.forecast.moment, "")}


def _signed(percent: float) -> str:
    """+3.2 %, −0.4 %, 0.0 %."""
    shown = f"{abs(percent):.1f} %"
    return shown if shown == "0.0 %" else f"{'+' if percent > 0 else '−'}{shown}"


def _answers(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Held-out prompts with the expected answer and the model's, before and after training."""
    by_moment = {match.moment: match for match in snapshot.exact_matches}
    if not by_moment:
        return None
    rows: dict[str, dict[str, str]] = {}
    for moment, match in by_moment.items():
        for sample in match.samples[:SAMPLES_SHOWN]:
            row = rows.setdefault(
                sample.get("prompt", ""), {"expected": sample.get("expected", "")}
            )
            row[moment] = sample.get("answer", "")
    scores = {
        moment: f"{match.correct} of {match.total} ({in_share(match.correct / match.total)})"
        for moment, match in by_moment.items()
        if match.total
    }
    return {"scores": scores, "rows": [{"prompt": prompt, **row} for prompt, row in rows.items()]}


def prompt_answers(snapshot: RunSnapshot) -> dict[str, Any]:
    """The sample prompts, the steps at which they were answered, and the answers by prompt and
    step; "" where a prompt was not asked at a step.
    """
    prompts = list(
        dict.fromkeys(pair["prompt"] for event in snapshot.prompt_answers for pair in event.answers)
    )
    by_step = [
        {pair["prompt"]: pair["answer"] for pair in event.answers}
        for event in snapshot.prompt_answers
    ]
    return {
        "steps": [event.step for event in snapshot.prompt_answers],
        "rows": [
            {"prompt": prompt, "answers": [answers.get(prompt, "") for answers in by_step]}
            for prompt in prompts
        ],
    }


def _files(snapshot: RunSnapshot) -> list[str]:
    written = [
        f"Checkpoint of step {c.step:,}: {in_bytes(c.bytes)} in {in_short_time(c.seconds)}"
        for c in snapshot.checkpoints
    ]
    return written + [
        f"Exported step {e.step:,} to {e.path} ({in_bytes(e.bytes)})" for e in snapshot.exports
    ]


# ------------------------------------------------------------------ the list of runs


def run_row(run: RunSummary, can_talk: bool = False) -> dict[str, Any]:
    """One row of the Runs tab. `can_talk`: whether it has weights to talk to. A run that cannot be
    shown is told as unreadable, so that it hides no other.
    """
    try:
        return _run_row(run, can_talk)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return _run_row(
            replace(
                run,
                state="unreadable",
                step=0,
                total_steps=0,
                loss=None,
                seconds=0.0,
                reason=f"What its record says cannot be shown ({type(error).__name__}: {error}).",
            ),
            False,
        )


def _run_row(run: RunSummary, can_talk: bool) -> dict[str, Any]:
    actions = ["open"] if run.state != "unreadable" else []
    actions += [
        action
        for action in ("resume",)
        if action in ACTIONS.get(run.state, ()) and run.state != "paused"
    ]
    if can_talk and run.state != "unreadable":
        actions.append("talk")
    if run.state not in ("unreadable", "preparing"):
        actions.append("export")
    actions.append("details")
    if run.state != "unreadable":
        actions += ["draft", "compare"]
    if "stop" not in ACTIONS.get(run.state, ()) and STATE_TONES[run.state] != "busy":
        actions.append("delete")
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
        "actions": actions,
        "export_folder": f"exports/{run.id}",
    }

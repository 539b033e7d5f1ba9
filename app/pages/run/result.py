"""The result card of a run that is over. Every number on it is of the weights that a person gets:
those that were exported, or else those of the newest checkpoint. All functions are pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from app.labels import STATE_LABELS, in_digits, in_share, in_time
from app.pages.run.best import best_of
from app.pages.run.preference_figure import ACCURACY, MARGIN
from app.verdict.outcome import how_its_export_failed
from app.verdict.validation import memorizes
from engine.config.export_choice import ExportFrom
from engine.runs.record.before_training import worse_than_before
from engine.runs.record.events import ExactMatchMeasured
from engine.runs.record.snapshot import OVER_STATES, RunSnapshot
from engine.runs.record.validation import Best
from engine.text import counted
from engine.training.checkpoints.saved_on_disk import SavedSteps

UNEVALUATED = (
    "No validation rows were evaluated, so nobody knows whether it learned more than its rows; "
    "data.eval_fraction holds some back."
)


def result(
    snapshot: RunSnapshot, state: str, saved: SavedSteps, export_from: ExportFrom = "best"
) -> dict[str, Any] | None:
    """Returns the card of a run that is over and has finished a step, or None for any other. An
    export by hand takes the weights that `export_from` names.
    """
    is_over = state in OVER_STATES or state == "interrupted"
    if not is_over or not len(snapshot.steps):
        return None
    exported = snapshot.exported_step
    step = exported if exported is not None else saved.exported(export_from)
    has_weights = step is not None and state != "discarded"
    best = best_of(snapshot)
    rows = _rows(snapshot, step, best) if step is not None and has_weights else []
    is_of_the_last = not has_weights or step == snapshot.step
    worse = worse_than_before(snapshot, is_over=True) if is_of_the_last else None
    but, tone = "", ""
    if snapshot.export_failed:
        but, tone = ", but its export failed", "warn"
    if worse is not None:
        but, tone = ": worse than before training", "bad"
    elif memorizes(snapshot):
        but, tone = ": it memorizes its rows", "warn"
    of = _of(snapshot, step if has_weights else None, _whose(step, saved, exported))
    return {
        "title": f"{_title(snapshot, state)}{but}",
        "tone": tone,
        "rows": rows,
        "of": f"{how_its_export_failed(snapshot)} {of}".lstrip(),
        "actions": _actions(state, saved, has_weights, bool(snapshot.export_failed)),
    }


def _title(snapshot: RunSnapshot, state: str) -> str:
    if state == "finished":
        return f"Finished {counted(snapshot.step, 'step')} in {in_time(snapshot.seconds)}"
    of = f" of {snapshot.total_steps:,}" if snapshot.total_steps else ""
    return f"{STATE_LABELS[state]} at step {snapshot.step:,}{of}, after {in_time(snapshot.seconds)}"


def _whose(step: int | None, saved: SavedSteps, exported: int | None) -> str:
    """Returns which weights those of `step` are, in a few words."""
    if exported is not None:
        return "which were exported"
    return "the best, which are kept" if step == saved.best else "the newest that were saved"


def _of(snapshot: RunSnapshot, step: int | None, whose: str) -> str:
    """Returns whose numbers these are."""
    if step is None:
        return "No weights are left of this run."
    text = f"All numbers are of the weights of step {step:,}, {whose}."
    return text if len(snapshot.evals) else f"{text} {UNEVALUATED}"


def _actions(
    state: str, saved: SavedSteps, has_weights: bool, has_export_failed: bool
) -> list[str]:
    """Returns the names of the buttons, in their order; the first one is what is done most."""
    can_export = has_weights and saved.trained_on is not None
    offers = [
        ("export-again", can_export and has_export_failed),
        ("chat", has_weights),
        ("export", can_export and not has_export_failed),
        ("train-on", can_export),
        ("again" if state == "finished" else "draft", True),
    ]
    return [name for name, is_offered in offers if is_offered and state != "unreadable"]


# ------------------------------------------------------------------ from, to, best


def _rows(snapshot: RunSnapshot, step: int, best: Best | None) -> list[dict[str, str]]:
    rows = [
        _validation(snapshot, step, best),
        _exact(snapshot, step, best),
        _preferred(snapshot, step),
        _training(snapshot, step),
    ]
    return [row for row in rows if row is not None]


def _validation(snapshot: RunSnapshot, step: int, best: Best | None) -> dict[str, str] | None:
    """Returns the validation loss of the first evaluation and of these weights."""
    evals = snapshot.evals
    if not len(evals):
        return None
    at = _at(evals.step, step)
    note = ""
    if best is not None and best.by == "loss":
        note = _best_note(snapshot, step, best, in_digits(best.loss))
    first = evals.step[0]
    if not note and not first and at is not None and evals.loss[at] >= evals.loss[0]:
        note = "no lower than before training"
    return {
        "label": "Validation loss",
        "from": in_digits(evals.loss[0]) if first != step else "",
        "since": "before training" if not first else f"at step {first:,}",
        "to": "not evaluated" if at is None else in_digits(evals.loss[at]),
        "note": note,
    }


def _best_note(snapshot: RunSnapshot, step: int, best: Best, value: str) -> str:
    """Returns where the best was, whose `value` this is, or that these weights are the best."""
    if best.step == step:
        return f"the best of {counted(len(snapshot.evals), 'evaluation')}"
    kept = "" if best.kept else ", whose weights are not kept"
    return f"best {value} at step {best.step:,}{kept}"


def _exact(snapshot: RunSnapshot, step: int, best: Best | None) -> dict[str, str] | None:
    """Returns the share of validation prompts answered exactly, before training and by these
    weights.
    """
    matches = [match for match in snapshot.exact_matches if match.total]
    if not matches:
        return None
    of_these = [match for match in matches if match.step == step]
    before = [match for match in matches if match.step < step]
    note = f"of {counted(matches[-1].total, 'validation prompt')}"
    if best is not None and best.share is not None:
        note += f"; {_best_note(snapshot, step, best, in_share(best.share))}"
    return {
        "label": "Answered exactly as expected",
        "from": _share(before[0]) if before else "",
        "since": "before training" if before and not before[0].step else "at first",
        "to": _share(of_these[-1]) if of_these else "not asked",
        "note": note,
    }


def _preferred(snapshot: RunSnapshot, step: int) -> dict[str, str] | None:
    """Returns the fraction of validation pairs whose chosen answer has the larger reward, at the
    first evaluation and for these weights. Before training, the rewards of DPO are all 0, which
    means nothing.
    """
    evals = snapshot.evals
    shares = evals.preference.get(ACCURACY)
    at = _at(evals.step, step)
    if not shares or at is None:
        return None
    margins = evals.preference[MARGIN]
    has_first = evals.step[0] != step and margins[0] != 0
    return {
        "label": "Validation pairs with the chosen answer ahead",
        "from": in_share(shares[0]) if has_first else "",
        "since": "before training" if not evals.step[0] else f"at step {evals.step[0]:,}",
        "to": in_share(shares[at]),
        "note": f"mean margin {in_digits(margins[at])}",
    }


def _share(match: ExactMatchMeasured) -> str:
    return in_share(match.correct / match.total)


def _training(snapshot: RunSnapshot, step: int) -> dict[str, str] | None:
    """Returns the training loss of the first step and of the step before these weights."""
    steps = snapshot.steps
    at = _at(steps.step, step)
    if at is None:
        return None
    return {
        "label": "Training loss",
        "from": in_digits(steps.loss[0]) if at else "",
        "since": f"at step {steps.step[0]:,}",
        "to": in_digits(steps.loss[at]),
        "note": "",
    }


def _at(steps: Any, step: int) -> int | None:
    """Returns the place of `step` in a column of steps, or None if it is not there."""
    found = np.flatnonzero(np.asarray(steps) == step)
    return int(found[-1]) if len(found) else None

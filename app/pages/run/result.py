"""What came of a run that is over, for the head of its page. Every number is of the weights that a
person gets: those that were exported, or else those of the newest checkpoint. All functions are
pure.
"""

from __future__ import annotations

from typing import Any

from app.form.settings_form import as_labeled
from app.labels import STATE_LABELS
from app.pages.run.best import best_of
from app.pages.run.facts import NOT_TESTED, facts
from app.verdict.findings import Verdict
from app.verdict.outcome import (
    MOST_RIGHT,
    has_learned,
    has_no_right_answer,
    how_it_can_go_on,
    how_it_ended,
    how_its_export_failed,
    how_long,
    right_shares,
)
from app.verdict.validation import best_is_kept, validation
from engine.config.export_choice import ExportFrom
from engine.runs.record.before_training import better_kept
from engine.runs.record.snapshot import OVER_STATES, RunSnapshot
from engine.training.checkpoints.saved_on_disk import SavedSteps

OUTCOMES = {
    "worse than before training": "Worse than before training",
    "no better": "No better than before training",
    "diverging": "It diverged",
    "memorizes": "It memorized its rows",
    "overfitting": "It overfits",
    "possibly overfitting": "It may overfit",
    "not learning": "It did not learn",
}
"""Title of a finished run by the rule of what is wrong with it."""
UNCERTAIN = {
    "no better": "Perhaps no better than before training",
    "memorizes": "It may have memorized its rows",
    "overfitting": "It may overfit",
    "not learning": "It may not have learned",
}
"""Title in place of that where few validation rows were asked."""
UNEVALUATED = "It was never evaluated, so it may only have memorized its rows."


def result(
    snapshot: RunSnapshot,
    state: str,
    saved: SavedSteps,
    judged: Verdict,
    export_from: ExportFrom = "best",
) -> dict[str, Any] | None:
    """Returns what came of a run that is over and has finished a step, or None for any other. An
    export by hand takes the weights that `export_from` names.
    """
    is_over = state in OVER_STATES or state == "interrupted"
    if not is_over or not len(snapshot.steps):
        return None
    exported = snapshot.exported_step
    step = exported if exported is not None else saved.exported(export_from)
    has_weights = step is not None and state != "discarded"
    best = best_of(snapshot)
    numbers = facts(snapshot, step, best) if has_weights else []
    if any(number["label"] == "Validation loss" for number in numbers):
        # One pair of losses is enough here: the chart below has the other.
        numbers = [number for number in numbers if number["label"] != "Training loss"]
    title, first = _title(snapshot, state, numbers, judged)
    told = [text for text in _told(snapshot, state, saved, judged) if text != f"{title}."]
    if step is not None and has_weights:
        is_best = step == saved.best or (best is not None and step == best.step)
        told.append(_whose(step, is_best, exported))
    elif not any("Nothing was saved." in sentence for sentence in told):
        told.append("No weights are left of this run.")
    return {
        "title": title,
        "text": " ".join(told),
        "facts": [number for number in numbers if number is not first],
        "actions": _actions(state, saved, has_weights, bool(snapshot.export_failed), judged),
    }


def _title(
    snapshot: RunSnapshot, state: str, numbers: list[dict[str, str]], judged: Verdict
) -> tuple[str, dict[str, str] | None]:
    """Returns the outcome in a few words, and the number that it names."""
    if state != "finished":
        of = f" of {snapshot.total_steps:,}" if snapshot.total_steps else ""
        return f"{STATE_LABELS[state]} at step {snapshot.step:,}{of}", None
    if snapshot.export_failed and not judged.main.is_alarm:
        return "Finished, but its export failed", None
    if judged.main.rule in OUTCOMES:
        return _title_of_wrong(snapshot, judged), None
    by_label = {number["label"]: number for number in numbers}
    right, loss = by_label.get("Answers right"), by_label.get("Validation loss")
    shares = right_shares(snapshot)
    if shares and right is not None and right["to"] != NOT_TESTED and shares[1] > shares[0]:
        learned = "It may have learned it" if judged.rests_on_few else "Learned it"
        words = learned if shares[1] >= MOST_RIGHT else "More answers right"
        before = f"{right['from']} right before, " if right["from"] else ""
        return f"{words}: {before}{right['to']} {'after' if before else 'right'}", right
    by_loss = "" if loss is None else _by_loss(snapshot, loss, judged)
    if by_loss:
        return by_loss, loss
    return how_long(snapshot), None


def _title_of_wrong(snapshot: RunSnapshot, judged: Verdict) -> str:
    """Returns the outcome of a finished run with which something is wrong."""
    kept = better_kept(snapshot)
    if kept is not None and judged.main.rule in ("overfitting", "possibly overfitting"):
        return best_is_kept(kept)
    titles = OUTCOMES | UNCERTAIN if judged.rests_on_few else OUTCOMES
    return titles[judged.main.rule]


def _by_loss(snapshot: RunSnapshot, loss: dict[str, str], judged: Verdict) -> str:
    """Returns what the fall of the validation loss means, or an empty text if it did not fall."""
    if loss["from"] and has_learned(snapshot, judged):
        learned = "It may have learned" if judged.rests_on_few else "Learned"
        return f"{learned}: validation loss fell {_went(loss)}"
    went = validation(snapshot)
    has_fallen = loss["from"] and went is not None and went.last < went.first
    if has_fallen and has_no_right_answer(snapshot):
        return f"Validation loss fell {_went(loss)}, but no tested answer is right"
    return ""


def _went(number: dict[str, str]) -> str:
    return f"from {number['from']} to {number['to']}"


def _told(snapshot: RunSnapshot, state: str, saved: SavedSteps, judged: Verdict) -> list[str]:
    """Returns sentences on how the run ended, or what its outcome means."""
    if state == "finished" and snapshot.export_failed:
        return [how_its_export_failed(snapshot)]
    if state == "finished":
        found = (judged.main, *judged.also)
        small = [each.text for each in found if each.rule == "too small"]
        if judged.main.is_alarm:
            few = [each.text for each in found if each.rule == "few rows"]
            return [*small, *few, *filter(None, [as_labeled(judged.main.advice)])]
        took = f"{how_long(snapshot)}."
        better = [each.text for each in found if each.place == "beside"]
        return [*small, took if len(snapshot.evals) else UNEVALUATED, *better]
    why = [how_it_ended(snapshot, state)] if state == "failed" else []
    then = how_it_can_go_on(state, saved)
    is_all_kept = state == "interrupted" and saved.full == snapshot.step
    kept = ["Nothing is lost."] if is_all_kept else []
    return [*why, *kept, then] if then and then not in why else [*why, *kept]


def _whose(step: int, is_best: bool, exported: int | None) -> str:
    """Returns which weights those of `step` are."""
    if exported is not None:
        which = "Best model" if is_best else "Model"
        return f"{which}: step {step:,}, exported."
    which = "Best model" if is_best else "Newest saved model"
    return f"{which}: step {step:,}."


def _actions(
    state: str,
    saved: SavedSteps,
    has_weights: bool,
    has_export_failed: bool,
    judged: Verdict,
) -> list[str]:
    """Returns the names of the buttons, in their order; the first one is what is done most."""
    can_export = has_weights and saved.trained_on is not None
    is_small = any(each.rule == "too small" for each in (judged.main, *judged.also))
    offers = [
        ("export-again", can_export and has_export_failed),
        ("larger", is_small),
        ("chat", has_weights),
        ("export", can_export and not has_export_failed),
        ("train-on", can_export),
        ("draft", True),
    ]
    return [name for name, is_offered in offers if is_offered and state != "unreadable"]

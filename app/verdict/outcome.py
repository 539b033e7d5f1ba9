"""The end of a run as text, from its record: what it reached, or why and where it ended. All
functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.labels import in_loss, in_share, in_time
from app.verdict.findings import Rule, Tone, Verdict
from app.verdict.validation import validation
from engine.runs.record.snapshot import RunSnapshot
from engine.text import counted
from engine.training.checkpoints.saved_on_disk import SavedSteps

WRONG: dict[Rule, str] = {
    "worse than before training": "Worse",
    "no better": "No better",
    "diverging": "Diverged",
    "memorizes": "Memorized",
    "overfitting": "Overfits",
    "possibly overfitting": "May overfit",
    "not learning": "Not learned",
}
"""Outcome of a finished run by the rule of what is wrong with it."""
SURE: tuple[Rule, ...] = ("worse than before training", "diverging")
"""What few validation rows are enough for."""
CANNOT_TELL = "Cannot tell yet"
"""Outcome of a run that too few validation rows judge, as *Did it help?* has it, too."""
MOST_RIGHT = 0.5
"""Share of answers that are right from which a run has learned what it was to learn."""


PAUSE_TOLD = 1
"""Seconds of pauses from which they are told."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run that has finished, in a word and its tone."""

    word: str
    tone: Tone


def outcome(snapshot: RunSnapshot, judged: Verdict) -> Outcome | None:
    """Returns what came of a run that has finished, or None where that is not known."""
    main = judged.main
    if judged.rests_on_few and main.is_alarm and main.rule not in SURE:
        return Outcome(CANNOT_TELL, "calm")
    if main.is_alarm:
        return Outcome(WRONG.get(main.rule, "Finished"), judged.tone)
    shares = right_shares(snapshot)
    has_most = shares is not None and shares[1] > shares[0] and shares[1] >= MOST_RIGHT
    if not has_most and not (len(snapshot.evals) and has_learned(snapshot, judged)):
        return None
    if judged.rests_on_few:
        return Outcome(CANNOT_TELL, "calm")
    return Outcome("Learned", "good")


def has_learned(snapshot: RunSnapshot, judged: Verdict) -> bool:
    """Returns whether the losses of a finished run say that it has learned, and no answers say
    that it has not.
    """
    beside = [each.rule for each in judged.also if each.rule != "few rows"]
    only_slow = beside == ["rate too low"]
    learned = judged.main.tone == "good" or (judged.main.rule == "doing well" and only_slow)
    return learned and not has_no_right_answer(snapshot)


def how_long(snapshot: RunSnapshot) -> str:
    """Returns how many steps a run made in which time, and how long it paused besides."""
    text = f"Finished {counted(snapshot.step, 'step')} in {in_time(snapshot.seconds)}"
    paused = snapshot.paused_seconds
    return f"{text}, paused {in_time(paused)}" if paused >= PAUSE_TOLD else text


def right_shares(snapshot: RunSnapshot) -> tuple[float, float] | None:
    """Returns the shares of right answers before training, or 0 where nobody asked, and after it;
    or None if that is not known.
    """
    shares = {
        each.moment: each.correct / each.total for each in snapshot.exact_matches if each.total
    }
    return (shares.get("before", 0.0), shares["after"]) if "after" in shares else None


def how_it_ended(snapshot: RunSnapshot, state: str) -> str:
    """Returns one sentence for a run that is over or interrupted."""
    at = f"step {snapshot.step:,}"
    if state == "interrupted":
        return f"Interrupted at {at}, when its program ended."
    if state == "finished":
        return f"{_how_it_finished(snapshot)} {how_its_export_failed(snapshot)}".rstrip()
    texts = {
        "stopped": f"Stopped at {at}.",
        "discarded": f"Discarded at {at}.",
        "failed": f"The run failed at {at}.",
    }
    return snapshot.reason or texts[state]


def how_it_can_go_on(state: str, saved: SavedSteps) -> str:
    """Returns one sentence on what the run's button in the bar does, or what can be done where it
    has none; the text is empty for a run that is not over, or has all its steps.
    """
    if state not in ("stopped", "failed", "interrupted"):
        return ""
    if saved.full is not None:
        return f"Resume continues from step {saved.full:,}."
    if saved.newest is not None:
        return (
            f"It cannot be resumed. Continue training from here starts a new run from step "
            f"{saved.newest:,}."
        )
    if saved.best is not None:
        return (
            f"It cannot be resumed. Continue training from here starts a new run from step "
            f"{saved.best:,}, the best."
        )
    if state == "failed":
        return "Nothing was saved."
    return "Nothing was saved. Start again uses the same settings."


def how_its_export_failed(snapshot: RunSnapshot) -> str:
    """Returns why a run that has finished has no export; an empty text if that is not so."""
    if not snapshot.export_failed:
        return ""
    return f"The export failed: {snapshot.export_failed}"


def what_it_reached(snapshot: RunSnapshot, judged: str = "") -> str:
    """Returns one sentence with the steps, the losses and the exact matches of a finished run.
    `judged` is what is wrong with it in a few words, or empty.
    """
    parts = [f"Finished {counted(snapshot.step, 'step')}{judged}"]
    if snapshot.loss is not None:
        parts[0] += f": the last loss is {in_loss(snapshot.loss)}"
    found = validation(snapshot)
    if found is not None:
        text = f"validation loss {in_loss(found.first)} → {in_loss(found.last)}"
        if len(found.losses) == 1:
            text = f"validation loss {in_loss(found.last)}"
        elif found.best_step and found.place != len(found.losses) - 1:
            by_loss = snapshot.best is None or snapshot.best.by == "loss"
            lowest = "best" if by_loss else "lowest"
            text += f", {lowest} {in_loss(found.best)} at step {found.best_step:,}"
        parts.append(text)
    matched = _exact_match(snapshot)
    best = snapshot.best
    if best is not None and best.share is not None and best.step != snapshot.step:
        matched = f"{matched}, " if matched else "answers right "
        matched += f"best {in_share(best.share)} at step {best.step:,}"
    if matched:
        parts.append(matched)
    return f"{'; '.join(parts)}."


def has_no_right_answer(snapshot: RunSnapshot) -> bool:
    """Returns whether validation prompts were answered after training, and none exactly."""
    known = [match for match in snapshot.exact_matches if match.moment == "after" and match.total]
    return bool(known) and not known[-1].correct


def _how_it_finished(snapshot: RunSnapshot) -> str:
    text = how_long(snapshot)
    matched = _exact_match(snapshot)
    if matched:
        return f"{text}; {matched}."
    losses = snapshot.evals.loss
    if len(losses) > 1:
        text += f"; validation loss {in_loss(losses[0])} → {in_loss(losses[-1])}"
        best = snapshot.best
        if best is not None and best.by == "loss" and best.step != snapshot.evals.step[-1]:
            text += f", best {in_loss(best.loss)} at step {best.step:,}"
        return f"{text}."
    if len(losses):
        return f"{text}; validation loss {in_loss(losses[-1])}."
    return f"{text}."


def _exact_match(snapshot: RunSnapshot) -> str:
    """Returns the exact matches before and after training, or an empty text if those after it are
    not known.
    """
    scores = {match.moment: match for match in snapshot.exact_matches if match.total}
    if "after" not in scores:
        return ""
    shown = [
        in_share(scores[moment].correct / scores[moment].total)
        for moment in ("before", "after")
        if moment in scores
    ]
    return f"answers right {' → '.join(shown)}"

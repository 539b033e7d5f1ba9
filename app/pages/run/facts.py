"""The numbers by which a run is known, from before training to now: of its latest weights while it
goes on, and of the weights that a person gets once it is over. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.labels import in_loss, in_share
from app.pages.run.answers import right_samples
from app.pages.run.preference_figure import ACCURACY, MARGIN
from engine.runs.record.events import ExactMatchMeasured
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import Best

BEFORE = "before"
NOT_TESTED = "not tested yet"


def facts(snapshot: RunSnapshot, step: int | None, best: Best | None) -> list[dict[str, str]]:
    """Returns the numbers of the weights of `step`, or of the latest ones for None: each with its
    label, its first value `from` and what that is of, and its last value `to` and what that is of.
    """
    found = [
        validation_loss(snapshot, step, best),
        preferred(snapshot, step),
        answers(snapshot, step, best),
        training_loss(snapshot, step),
    ]
    return [fact for fact in found if fact is not None]


def validation_loss(
    snapshot: RunSnapshot, step: int | None, best: Best | None
) -> dict[str, str] | None:
    """Returns the validation loss of the first evaluation and of these weights."""
    evals = snapshot.evals
    if not len(evals):
        return None
    at = _at(evals.step, step)
    first = evals.step[0]
    of = step if at is None else evals.step[at]
    return {
        "label": "Validation loss",
        "from": in_loss(evals.loss[0]) if first != of else "",
        "since": _moment(first),
        "to": "not evaluated" if at is None else in_loss(evals.loss[at]),
        "at": _place(of, best, "loss"),
    }


def answers(snapshot: RunSnapshot, step: int | None, best: Best | None) -> dict[str, str] | None:
    """Returns the share of validation prompts answered exactly, before training and by these
    weights. Until they are tested, it is how many of their sample answers are right.
    """
    matches = [match for match in snapshot.exact_matches if match.total]
    if not matches:
        return None
    trained = [match for match in matches if match.step]
    of_these = trained if step is None else [match for match in matches if match.step == step]
    newest = of_these[-1] if of_these else None
    before = [match for match in matches if newest is None or match.step < newest.step]
    at = ""
    if newest is not None:
        at = f"of {newest.total:,}, {_place(newest.step, best, 'exact_match')}"
    to = NOT_TESTED if newest is None else _share(newest)
    samples = right_samples(snapshot) if newest is None else None
    if samples is not None and step in (None, samples[2]):
        right, asked, at_step = samples
        to, at = f"{right} of {asked}", _moment(at_step)
    return {
        "label": "Answers right",
        "from": _share(before[0]) if before else "",
        "since": _moment(before[0].step) if before else "",
        "to": to,
        "at": at,
    }


def preferred(snapshot: RunSnapshot, step: int | None) -> dict[str, str] | None:
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
    has_first = bool(at) and margins[0] != 0
    return {
        "label": "Chosen answer ahead",
        "from": in_share(shares[0]) if has_first else "",
        "since": _moment(evals.step[0]),
        "to": in_share(shares[at]),
        "at": f"mean margin {in_loss(margins[at])}",
    }


def training_loss(snapshot: RunSnapshot, step: int | None) -> dict[str, str] | None:
    """Returns the training loss of the first step and of the step before these weights."""
    steps = snapshot.steps
    at = _at(steps.step, step)
    if at is None:
        return None
    return {
        "label": "Training loss",
        "from": in_loss(steps.loss[0]) if at else "",
        "since": _moment(steps.step[0]),
        "to": in_loss(steps.loss[at]),
        "at": _moment(steps.step[at]),
    }


def _moment(step: int) -> str:
    return f"step {step:,}" if step else BEFORE


def _place(step: int | None, best: Best | None, by: str) -> str:
    """Returns of which step a number is, and that it is the best, or where that was."""
    if step is None or best is None or best.by != by:
        return "" if step is None else _moment(step)
    if best.step == step:
        return f"best (step {step:,})"
    value = in_loss(best.loss) if best.share is None else in_share(best.share)
    kept = "" if best.kept else ", not kept"
    return f"{_moment(step)}; best {value} (step {best.step:,}{kept})"


def _share(match: ExactMatchMeasured) -> str:
    return in_share(match.correct / match.total)


def _at(steps: Sequence[Any], step: int | None) -> int | None:
    """Returns the place of `step` in a column of steps, of the last one for None, or None if it is
    not there.
    """
    if step is None:
        return len(steps) - 1 if len(steps) else None
    found = np.flatnonzero(np.asarray(steps) == step)
    return int(found[-1]) if len(found) else None

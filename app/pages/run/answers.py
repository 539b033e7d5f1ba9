"""What the model answers: before training, at the latest evaluation, and in the end. All functions
are pure.
"""

from __future__ import annotations

from typing import Any

from app.labels import in_share
from engine.runs.record.events import ExactMatchMeasured
from engine.runs.record.snapshot import RunSnapshot

SHOWN_GOING, SHOWN_OVER = 3, 4
"""Number of prompts that are shown while a run goes on, and once it is over."""
ABOUT = "Answers take at most 2 % of the run’s time; where they would take more, they are left out."


def answers(
    snapshot: RunSnapshot, is_over: bool, is_awaited: bool = False, began_with: str = ""
) -> dict[str, Any]:
    """Returns a row for each prompt, with its answer before training and now; `is_right` is None
    where the expected answer is not known. It `is_absent` where nothing was asked, unless the first
    answers are awaited. `began_with` names the run that this one continues, if it does.
    """
    after = _of_moment(snapshot, "after")
    most = SHOWN_OVER if is_over else SHOWN_GOING
    rows = _of_validation(snapshot) or _of_fixed_prompts(snapshot)
    # Later answers are asked of a few prompts; the others have no row until all are asked.
    rows = [row for row in rows if "now" in row] or rows
    step = after.step if after is not None else _latest(snapshot)
    return {
        "title": "Before and after training" if is_over else "What it answers now",
        "caption": _score(after) if after is not None else _when(snapshot, step, is_over),
        "about": "" if is_over else ABOUT,
        "began_with": f"weights of {began_with}" if began_with else "",
        "rows": rows[:most],
        "is_absent": not rows and not is_awaited,
    }


def answers_by_step(snapshot: RunSnapshot) -> dict[str, Any]:
    """Returns the steps after which sample prompts were answered, and a row for each prompt: what
    is `expected`, which is None where nobody knows, and the answer after each of these steps, which
    is None where the prompt was not asked.
    """
    asked: dict[int, dict[str, str]] = {}
    expected: dict[str, str] = {}
    for match in snapshot.exact_matches:
        for sample in match.samples:
            expected[sample["prompt"]] = sample["expected"]
            asked.setdefault(match.step, {})[sample["prompt"]] = sample["answer"]
    for event in snapshot.prompt_answers:
        pairs = {pair["prompt"]: pair["answer"] for pair in event.answers}
        asked.setdefault(event.step, {}).update(pairs)
    steps = sorted(asked)
    prompts = dict.fromkeys(prompt for step in steps for prompt in asked[step])
    rows = []
    for prompt in prompts:
        given = [asked[step].get(prompt) for step in steps]
        rows.append({"prompt": prompt, "expected": expected.get(prompt), "answers": given})
    return {"steps": steps, "rows": rows}


def right_samples(snapshot: RunSnapshot) -> tuple[int, int, int] | None:
    """Returns how many of the latest sample answers are right, how many there are, and their step;
    None where no answer was given since training began, or nobody knows what is right.
    """
    judged = [row["is_right"] for row in _of_validation(snapshot) if row["is_right"] is not None]
    return (sum(judged), len(judged), _latest(snapshot)) if judged else None


def _of_moment(snapshot: RunSnapshot, moment: str) -> ExactMatchMeasured | None:
    found = [match for match in snapshot.exact_matches if match.moment == moment and match.total]
    return found[-1] if found else None


def _of_validation(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Returns rows of validation prompts."""
    rows: dict[str, dict[str, Any]] = {}
    for match in snapshot.exact_matches:
        name = "now" if match.step else "before"
        for sample in match.samples:
            prompt, answer = sample.get("prompt", ""), sample.get("answer", "")
            expected = sample.get("expected", "")
            row = rows.setdefault(prompt, {"prompt": prompt, "expected": expected})
            row |= {name: answer, "is_right": answer == expected}
            if "rejected" in sample:
                row["rejected"] = sample["rejected"]
    if _of_moment(snapshot, "after") is None and snapshot.prompt_answers:
        for pair in snapshot.prompt_answers[-1].answers:
            if pair["prompt"] in rows and _latest(snapshot):
                row = rows[pair["prompt"]]
                row |= {"now": pair["answer"], "is_right": pair["answer"] == row["expected"]}
    for row in rows.values():
        if "now" not in row:
            row["is_right"] = None
    return list(rows.values())


def _of_fixed_prompts(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Returns rows of the prompts that a person has set; nobody knows what is right."""
    rows: dict[str, dict[str, Any]] = {}
    for event in snapshot.prompt_answers:
        for pair in event.answers:
            row = rows.setdefault(pair["prompt"], {"prompt": pair["prompt"], "is_right": None})
            row["now" if event.step else "before"] = pair["answer"]
    return list(rows.values())


def _latest(snapshot: RunSnapshot) -> int:
    """Returns the step of the latest answers, 0 where none were given since training began."""
    return max(_steps(snapshot), default=0)


def _steps(snapshot: RunSnapshot) -> set[int]:
    """Returns the steps after which something was answered."""
    matched = {match.step for match in snapshot.exact_matches}
    return matched | {answered.step for answered in snapshot.prompt_answers}


def _score(match: ExactMatchMeasured) -> str:
    share = in_share(match.correct / match.total)
    return f"{match.correct:,} of {match.total:,} right ({share}) · step {match.step:,}"


def _when(snapshot: RunSnapshot, step: int, is_over: bool) -> str:
    """Returns of which step the answers are, and when the next ones come."""
    asked = _steps(snapshot) - {0}
    evaluated = {each for each in snapshot.evals.step if each}
    if not asked and not _steps(snapshot):
        return "" if is_over else "Asked first before training"
    if not asked:
        return "" if is_over else "Asked again at an evaluation"
    if len(asked) < len(evaluated):
        return f"Step {step:,} · asked at {len(asked)} of {len(evaluated)} evaluations"
    return f"Step {step:,} · asked at every evaluation"

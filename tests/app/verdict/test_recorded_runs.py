"""The verdict on real runs: those that the rules were tuned on, those that they were not, and those
with an end that is known.

`docs/verdict.md` has what is said of each; `python -m tests.app.verdict.test_recorded_runs` prints
its table. `tests/support/recorded_runs.py` made the runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from app.verdict.findings import Verdict
from app.verdict.judge import verdict
from app.verdict.validation import validation
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import EvalFinished, StepFinished
from engine.runs.record.snapshot import RunSnapshot
from tests.support.folded import fold
from tests.support.recorded_runs import read
from tests.support.runs_to_record import SETS, Recorded

EVERY = 10
"""A run is judged after every so many steps, and after every evaluation."""
HEALTHY = ("doing well", "too early", "plateau", "rate too low", "nothing exact")
"""A run of which one of these is expected gets no alarm at any step."""
STARTS_WRONG = ("not learning", "memory", "worse than before training", "memorizes")
TONES = {
    "diverging": "bad",
    "worse than before training": "bad",
    "memorizes": "warn",
    "overfitting": "warn",
    "not learning": "warn",
    "doing well": "good",
}
"""The runs whose end is known have these colors."""
RUNS = [(which, made) for which, runs in SETS.items() for made in runs]


@dataclass
class Told:
    """`Told` is what was said of a run."""

    verdict: Verdict
    """This was said at the end."""
    snapshot: RunSnapshot
    alarms: dict[str, int] = field(default_factory=dict)
    """Each alarm was first raised at this step."""

    @property
    def rules(self) -> set[str]:
        found = (self.verdict.main, *self.verdict.also)
        return {each.rule.removeprefix("possibly ") for each in found}


def told_of(which: str, made: Recorded) -> Told:
    """Replays a run, and returns what was said of it."""
    snapshot, alarms = RunSnapshot(), {}
    for record in read(which, made.name):
        snapshot.apply(record)
        is_due = isinstance(record.event, EvalFinished) or (
            isinstance(record.event, StepFinished) and record.event.step % EVERY == 0
        )
        if not is_due:
            continue
        shown = verdict(snapshot, snapshot.state)
        for found in (shown.main, *shown.also):
            if found.is_alarm:
                alarms.setdefault(found.rule, snapshot.step)
    return Told(verdict(snapshot, snapshot.state), snapshot, alarms)


def sign(made: Recorded, told: Told) -> int | None:
    """Returns the step after which the fault of a run begins, or None where nobody can say."""
    if made.changes:
        return min(made.changes)
    if "overfitting" in made.expected:
        return validation(told.snapshot).best_step
    return 0 if made.expected in STARTS_WRONG else None


def row(made: Recorded, told: Told) -> str:
    """Returns the row of a run in the table of the page."""
    alarms = ", ".join(f"{rule} at {step}" for rule, step in told.alarms.items()) or "–"
    found = (told.verdict.main, *told.verdict.also)
    shown = [each.rule for each in found if each.rule not in ("speed", "memory")]
    begun = sign(made, told)
    late = "–"
    if begun is not None and told.alarms:
        late = f"{min(told.alarms.values()) - begun}"
    expected = made.expected.replace("|", " or ")
    missed = " (a miss)" if made.missed else ""
    return f"| {made.name} | {expected} | {', '.join(shown)}{missed} | {alarms} | {late} |"


@pytest.mark.parametrize("which, made", RUNS, ids=[f"{which}-{made.name}" for which, made in RUNS])
def test_a_real_run_is_judged_as_expected(which, made):
    found = told_of(which, made)
    expected = set((made.missed or made.expected).split("|"))
    if which == "ends":
        assert found.verdict.main.rule in expected
        assert found.verdict.main.tone == TONES[found.verdict.main.rule]
    if expected & set(HEALTHY):
        assert found.alarms == {} and found.rules & expected
    elif "memory" in expected:
        assert {"memory in danger", "memory ends soon"} & set(found.alarms)
    elif expected & {"ended"}:
        assert found.verdict.main.tone == "bad"
    else:
        assert found.rules & expected
    if expected <= {"diverging", "overfitting", "not learning"}:
        assert found.verdict.main.is_alarm and found.verdict.main.evidence
    assert not {"memory in danger", "memory ends soon"} & found.rules  # each of them is over
    page = (PROGRAM_ROOT / "docs" / "verdict.md").read_text(encoding="utf-8")
    assert row(made, found) in page.splitlines()


def test_a_finished_run_never_has_a_headline_of_the_machine():
    for which, made in RUNS:
        records = read(which, made.name)
        snapshot = fold(records)
        shown = verdict(snapshot, snapshot.state).main
        assert shown.rule not in ("speed", "memory") and "emory" not in shown.text


if __name__ == "__main__":
    for one, run in RUNS:
        print(one, row(run, told_of(one, run)))

"""The table of a run: what was made, what was caught by which test, and why the rest survived."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

from tests.support.changes.copies import CAUGHT, ENGINE, Outcome
from tests.support.changes.record import Change

PAGE = "docs/changes.md"
INTRODUCTION = """\
# Changes that the tests must notice

`tests/support/changes`

Each row is a mistake that was made on purpose in a copy of the tree, one at a time. Then the tests
ran that are likely to notice it. `--engine` also runs all tests of the engine on what survives. The
records stand in `tests/support/changes`, which also says why they are chosen by hand.
CONTRIBUTING.md has the command that makes this page. `tests/test_changes.py` checks that every
record still applies and has a row here.
"""


def page(areas: Mapping[str, Sequence[Change]], outcomes: Mapping[str, Outcome]) -> str:
    """Returns the page in Markdown. A change without an outcome is one that was not made yet."""
    changes = [change for area in areas.values() for change in area]
    made = [change for change in changes if change.name in outcomes]
    caught = [change for change in made if outcomes[change.name].verdict == CAUGHT]
    survivors = [change for change in made if change not in caught]
    today = dt.datetime.now(dt.UTC).date().isoformat()
    lines = [
        INTRODUCTION,
        f"**{len(made)} changes were made, {len(caught)} were caught, {len(survivors)} "
        f"survived** ({today}).",
    ]
    if len(made) < len(changes):
        lines[-1] += f" {len(changes) - len(made)} more were not made yet."
    if survivors:
        lines += [
            "",
            "## Survivors",
            "",
            "| change | what is wrong then | why no test fails | what ran |",
        ]
        lines += ["|---|---|---|---|"]
        for change in survivors:
            why = change.survives or "**a test is missing**"
            ran = outcomes[change.name].stage
            lines.append(f"| {change.name} | {change.breaks} | {why} | {ran} |")
    for area, its_changes in areas.items():
        lines += ["", f"## {area}", "", "| change | file | what is wrong then | caught by |"]
        lines += ["|---|---|---|---|"]
        for change in its_changes:
            by = _caught_by(outcomes.get(change.name))
            lines.append(f"| {change.name} | `{change.file}` | {change.breaks} | {by} |")
    return "\n".join([*lines, ""])


def _caught_by(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not made yet"
    return f"`{outcome.test}`" if outcome.verdict == CAUGHT else "survived"


def in_words(change: Change, outcome: Outcome) -> str:
    """Returns a line of the terminal."""
    what = outcome.test or (change.survives if outcome.stage == ENGINE else "") or outcome.stage
    return f"{outcome.verdict:8}  {outcome.seconds:6.1f} s  {change.name}: {what}"

"""How many validation rows a verdict rests on, and whether these are too few to be sure of it. All
functions are pure.
"""

from __future__ import annotations

from dataclasses import replace

from app.verdict.findings import Finding, Verdict
from engine.runs.record.snapshot import RunSnapshot
from engine.text import counted

FEWEST_ROWS = 20
"""Number of validation rows from which a verdict is told in the color of its outcome."""


def with_rows(judged: Verdict, snapshot: RunSnapshot) -> Verdict:
    """Returns a verdict that says how many validation rows it rests on: among the reasons or, where
    they are few, beside it.
    """
    rows = snapshot.data.get("eval_examples")
    if not isinstance(rows, int) or rows < 1:
        return judged
    if not (len(snapshot.evals) or snapshot.exact_matches):
        return judged
    of = counted(rows, "validation row")
    if rows >= FEWEST_ROWS:
        evidence = f"{judged.main.evidence} Judged by {of}.".lstrip()
        return replace(judged, main=replace(judged.main, evidence=evidence))
    few = Finding(
        "few rows",
        "calm",
        f"Judged by only {of}: {FEWEST_ROWS} are needed to be sure.",
        "More data, or a larger data.eval_fraction, gives more validation rows.",
    )
    return replace(judged, also=(few, *judged.also))

"""How much longer or shorter runs of this machine took than was predicted for them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.runs.summaries.listing import RunSummary

RUNS = 9
"""Number of latest runs that are looked at, at most: the median of few goes up and down with each
run that ends.
"""
ALIKE = 3
"""Number of runs of the same model from which on those of others are left out."""
MARGIN = 0.15
"""Share by which they must differ from what was predicted to be counted in."""


@dataclass(frozen=True)
class Pace:
    """What the predicted time of a run is multiplied by, and the sentence on it."""

    times: float = 1.0
    note: str = ""

    def counted_in(self, time: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the times of a fit report with those of the whole run as they usually are."""
        found = dict(time)
        for name in ("run_seconds", "energy_kwh", "cost"):
            if found[name] is not None:
                found[name] *= self.times
        return found


def usual_pace(runs: Sequence[RunSummary], model: str, device: str, since: float) -> Pace:
    """Returns how steps of the latest finished runs on `device` went: of those of the same model
    where there are enough. runs: the newest first. since: when the rates of the device were
    measured, in Unix seconds; earlier runs were predicted from others.
    """
    known = [
        run
        for run in runs
        if run.state == "finished"
        and run.device == device
        and run.created >= since
        and run.step_times is not None
    ]
    alike = [run for run in known if run.model == model]
    latest = (alike if len(alike) >= ALIKE else known)[:RUNS]
    found = [run.step_times for run in latest if run.step_times is not None]
    times = round(statistics.median(found), 1) if found else 1.0
    if abs(times - 1) <= MARGIN:
        return Pace()
    which = " of this model" if len(alike) >= ALIKE else ""
    who = "last run" if len(found) == 1 else f"last {len(found)} runs{which}"
    return Pace(times, f"Adjusted: the {who} here took {times:.1f}× as long as predicted.")

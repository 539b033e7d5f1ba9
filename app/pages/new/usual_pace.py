"""How much longer or shorter runs of this machine took than was predicted for them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.runs.summaries.listing import RunSummary

RUNS = 3
"""Number of latest runs that are looked at, at most."""
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


def usual_pace(runs: Sequence[RunSummary], device: str, since: float) -> Pace:
    """Returns how steps of the latest finished runs on `device` went. runs: the newest first.
    since: when its rates were measured, in Unix seconds; earlier runs were predicted from others.
    """
    known = [
        run.step_times
        for run in runs
        if run.state == "finished"
        and run.device == device
        and run.created >= since
        and run.step_times is not None
    ][:RUNS]
    times = statistics.median(known) if known else 1.0
    if abs(times - 1) <= MARGIN:
        return Pace()
    who = "last run" if len(known) == 1 else f"last {len(known)} runs"
    return Pace(times, f"Adjusted: the {who} here took {times:.1f} times the predicted time.")

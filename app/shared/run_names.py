"""Names of several runs, told apart, and of the run that another one continues."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine.runs.record.run_folder import BEST_FOLDER, RunFolder
from engine.runs.summaries.names import shown_name


def distinct_names(runs: Sequence[tuple[str, float]]) -> list[str]:
    """Returns a name for each run, given its name and its start in Unix seconds. Runs with the same
    name get the time of their start.
    """
    counts = Counter(name for name, _ in runs)
    return [_told_apart(name, start, counts[name]) for name, start in runs]


def _told_apart(name: str, start: float, count: int) -> str:
    moment = time.strftime("%b %d, %H:%M:%S", time.localtime(start))
    return name if count == 1 else f"{name} ({moment})"


def name_of_start(place: str) -> str:
    """Returns the name of the run whose weights `model.start_from` names, or of a folder that is of
    no run; empty where it names none, so that a run begins with its base model.
    """
    place = place.strip()
    if not place:
        return ""
    path = Path(os.path.expanduser(place))  # noqa: PTH111  it raises nothing
    of_run = path.parent.parent if path.parent.name in ("checkpoints", BEST_FOLDER) else path
    with contextlib.suppress(ValueError):  # a text that is no path
        return shown_name(RunFolder(of_run)) or place
    return place

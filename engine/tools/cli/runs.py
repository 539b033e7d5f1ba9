"""The command `launch.py runs`: the runs of a folder, each with its best weights, if it has kept
any.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import RunError
from engine.runs.record.events import ForecastChecked
from engine.runs.record.following import EVENTS_FILE, last_of_kind
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import UNREADABLE, RunSummary, list_runs, unreadable_text
from engine.runs.summaries.sparkline import NO_SPARKLINE, Sparkline, read_sparkline
from engine.training.checkpoints.saved_on_disk import saved_best

T = TypeVar("T")


def runs_as_text(runs_dir: Path, as_json: bool) -> str:
    """Returns a table of all runs, newest first, or JSON.

    The JSON also contains the best weights, predictions and measurements of each run, and
    `worse_than_before_training` for one that has made its model worse: by which loss.
    """
    runs = list_runs(runs_dir)
    if as_json:
        return json.dumps([_of_each(run, _as_json) for run in runs], indent=2, default=str)
    if not runs:
        return f"There are no runs in {runs_dir} yet."
    titles = ("run", "state", "step", "loss", "best", "started", "name")
    rows = [titles, *(_of_each(run, _row) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    explained = (run for run in runs if run.state == UNREADABLE or run.export_failed)
    lines += [f"{run.id}: {run.reason}" for run in explained]
    return "\n".join(lines)


def _of_each(run: RunSummary, make: Callable[[RunSummary], T]) -> T:
    """Returns what `make` makes of a run, or of the run as unreadable where a fault in this program
    keeps it from being shown: the other runs are shown all the same.
    """
    try:
        return make(run)
    except Exception as error:  # noqa: BLE001  whatever is in that folder
        traceback.print_exc()
        reason = unreadable_text(RunFolder(Path(run.path)), error)
        return make(replace(run, state=UNREADABLE, reason=reason))


def _as_json(run: RunSummary) -> dict[str, Any]:
    """Returns the JSON of a run. One that is unreadable has its reason and nothing more."""
    if run.state == UNREADABLE:
        return asdict(run) | {"best": None, "worse_than_before_training": None, "forecast": {}}
    sparkline = read_sparkline(Path(run.path) / EVENTS_FILE)
    return asdict(run) | {
        "best": _best(run),
        "worse_than_before_training": sparkline.worse and asdict(sparkline.worse),
        "forecast": _prediction_check(run),
    }


def _row(run: RunSummary) -> tuple[str, ...]:
    """Returns the cells of a run in the table."""
    sparkline = (
        NO_SPARKLINE if run.state == UNREADABLE else read_sparkline(Path(run.path) / EVENTS_FILE)
    )
    started = ""
    if run.created:
        started = datetime.fromtimestamp(run.created).strftime("%Y-%m-%d %H:%M")
    return (
        run.id,
        run.state_text,
        f"{run.step}/{run.total_steps}" if run.total_steps else "",
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.state == UNREADABLE else _best_text(_best(run), sparkline),
        started,
        run.name,
    )


def _best(run: RunSummary) -> dict[str, Any] | None:
    """Returns the step of the best weights that a run has kept, by what they are the best, and the
    values; None if it has kept none.
    """
    score = saved_best(RunFolder(Path(run.path)).best_path)
    if score is None:
        return None
    return asdict(score) | {"by": "exact_match" if score.total else "loss"}


def _best_text(best: dict[str, Any] | None, sparkline: Sparkline) -> str:
    worse = sparkline.worse
    if best is None and worse is not None:
        return f"none: {worse.of} {worse.now:.4f}, before {worse.before:.4f}"
    if best is None:
        return ""
    value = f"loss {best['loss']:.4f}"
    if best["by"] == "exact_match":
        value = f"exact {best['correct']}/{best['total']}"
    return f"step {best['step']}, {value}"


def _prediction_check(run: RunSummary) -> dict[str, Any]:
    """Returns the comparison of a run, or {} if its record has none or cannot be read.

    In the latter case, the cause is the run's `reason`.
    """
    try:
        return prediction_check_of(Path(run.path))
    except RunError:
        return {}


def prediction_check_of(folder: Path) -> dict[str, Any]:
    """Returns the latest comparison in a run folder's record.

    It has the form ``{quantity: {predicted, measured, error}}`` and is empty if there is no
    comparison. Raises RunError when the record cannot be read.
    """
    record = last_of_kind(folder / EVENTS_FILE, ForecastChecked.kind)
    if record is None or not isinstance(record.event, ForecastChecked):
        return {}
    return dict(record.event.quantities)

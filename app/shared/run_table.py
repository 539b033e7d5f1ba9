"""The page Runs shows some of all runs: those that are searched for, in the order that is asked
for. All functions are pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.labels import STATE_LABELS, state_label
from app.shared.run_row import NO_WEIGHTS, NOT_SCANNED, RunScan, Weights, shown_word
from engine.runs.summaries.evaluation_figures import Figure
from engine.runs.summaries.listing import RunSummary

SHOWN_AT_FIRST = 50
MOST_SHOWN = 5000


@dataclass(frozen=True)
class ListedRun:
    """Everything that the list knows about one run."""

    run: RunSummary
    weights: Weights = NO_WEIGHTS
    scan: RunScan = NOT_SCANNED


@dataclass(frozen=True)
class Asked:
    """Which runs a page shows."""

    search: str = ""
    """Words that each occur in a run's name, id, note, tags, model, data or state."""
    state: str = ""
    """State of the runs; an empty text stands for all states."""
    tag: str = ""
    """Tag of the runs; an empty text stands for all runs."""
    sort: str = "started"
    """Key of `ORDERS`."""
    turned: bool = False
    """Whether the order is the other way round."""
    pinned: tuple[str, ...] = ()
    """Ids of runs that come first, in this order."""
    limit: int = SHOWN_AT_FIRST
    """Largest number of runs that are shown."""


@dataclass(frozen=True)
class Order:
    """Sorts runs by a number or a text of a column."""

    key: Callable[[ListedRun], float | str | None]
    """Value to sort by. Runs for which it is None come last."""
    falls: bool = False
    """Whether the greatest comes first."""
    needs_scans: bool = False
    """Whether all runs must be scanned before they can be sorted."""


def _difference(figure: Figure | None) -> float | None:
    """Returns by how much training has changed a figure."""
    return None if figure is None else figure.difference


ORDERS = {
    "started": Order(lambda listed: listed.run.created, falls=True),
    "name": Order(lambda listed: listed.run.name.casefold()),
    "state": Order(lambda listed: state_label(listed.run.state, listed.run.export_failed)),
    "model": Order(lambda listed: listed.run.model.casefold()),
    "data": Order(lambda listed: listed.run.data.casefold()),
    "loss": Order(lambda listed: listed.run.loss),
    "validation": Order(lambda at: at.scan.sparkline.validation_loss, False, True),
    "accuracy": Order(lambda at: at.scan.sparkline.accuracy, True, True),
    "evaluated_loss": Order(lambda at: _difference(at.scan.evaluation.loss), False, True),
    "evaluated_right": Order(lambda at: _difference(at.scan.evaluation.right), True, True),
    "steps": Order(lambda listed: listed.run.step, falls=True),
    "time": Order(lambda listed: listed.run.seconds, falls=True),
    "size": Order(lambda at: at.scan.folder_bytes, True, True),
}
"""The columns of the list by which it can be sorted."""


def found_runs(runs: Sequence[ListedRun], asked: Asked) -> list[ListedRun]:
    """Returns the runs that are asked for, in order, the pinned ones first. `runs` come with the
    newest first, and runs that are equal keep their order. The limit is not applied.
    """
    parts = asked.search.casefold().split()
    found = [
        listed
        for listed in runs
        if asked.state in ("", listed.run.state)
        and (not asked.tag or asked.tag in listed.run.tags)
        and _has_all(listed, parts)
    ]
    found = _sorted(found, ORDERS[asked.sort], asked.turned)
    places = {run_id: place for place, run_id in enumerate(asked.pinned)}
    return sorted(found, key=lambda listed: places.get(listed.run.id, len(places)))


def _has_all(listed: ListedRun, words: Sequence[str]) -> bool:
    if not words:
        return True
    run = listed.run
    parts = (run.name, run.id, run.note, *run.tags, run.model, run.data)
    states = (state_label(run.state, run.export_failed), shown_word(run, listed.scan))
    text = "\n".join((*parts, *states)).casefold()
    return all(word in text for word in words)


def _sorted(runs: Sequence[ListedRun], order: Order, turned: bool) -> list[ListedRun]:
    known: list[tuple[Any, ListedRun]] = []
    unknown: list[ListedRun] = []
    for listed in runs:
        value = order.key(listed)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            unknown.append(listed)
        else:
            known.append((value, listed))
    known.sort(key=lambda pair: pair[0], reverse=order.falls != turned)
    return [listed for _, listed in known] + unknown


def choices(runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Returns the `states` and `tags` that occur, each with its number of runs."""
    states = Counter(listed.run.state for listed in runs)
    tags = Counter(tag for listed in runs for tag in listed.run.tags)
    return {
        "states": [
            {"value": state, "label": f"{word} ({states[state]:,})"}
            for state, word in STATE_LABELS.items()
            if states[state]
        ],
        "tags": [
            {"value": tag, "label": f"{tag} ({count:,})"}
            for tag, count in sorted(tags.items(), key=lambda pair: pair[0].casefold())
        ],
    }

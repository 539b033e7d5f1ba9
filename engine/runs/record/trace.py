"""A step's timeline as a file for ui.perfetto.dev and chrome://tracing.

The file is in Chromium's Trace Event Format, with one row for each lane and a process for each
rank. This module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.errors import RunError
from engine.planning.schedule.ops import Lane
from engine.runs.record.events import PlanSimulated, Span, StepTimeline, Wait
from engine.runs.record.run_folder import open_run
from engine.runs.record.timeline_index import TimelineIndex, of_rank, ranks_in

ROWS = (
    Lane.H2D,
    Lane.STATES_IN,
    Lane.COMPUTE,
    "COMPUTE waits",
    Lane.UPDATE,
    Lane.D2H,
    Lane.STATES_OUT,
    Lane.HOST,
    Lane.GRADIENTS_OUT,
    Lane.READ,
    Lane.WRITE,
    Lane.COLLECTIVE,
)
"""Rows from top to bottom; each row is a thread of the trace, numbered from 1. Rows of later
versions come last, so that a record gives the same file.
"""
MEASURED, PREDICTED = 1, 2
"""Ids of two processes of the trace: the measured step on rank 0, and the predicted one. Those of
further ranks have the ids that follow.
"""


def trace_of(
    run_id: str, timeline: StepTimeline, simulated: PlanSimulated | None = None
) -> dict[str, Any]:
    """Returns the trace as JSON values.

    Its events are complete events ("X"), in microseconds from the earliest of them. Each lane is a
    thread; predicted times are a process, and so are the measured ones of each rank. `simulated` is
    the simulation of the plan that the step ran.
    """
    starts = [part["start"] for part in [*timeline.spans, *timeline.waits]]
    begin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    ranks = ranks_in(timeline)
    for rank in range(ranks):
        process = PREDICTED + rank if rank else MEASURED
        own = of_rank(timeline, rank)
        where = f", rank {rank}" if ranks > 1 else ""
        events += [
            *_names(process, f"Step {timeline.step}{where}, measured", own),
            *(_complete(process, span, begin) for span in own.spans),
            *(_waited(process, wait, begin) for wait in own.waits),
        ]
    if simulated is not None:
        # Measured and predicted times both begin with the first op of the step.
        events += [
            *_names(PREDICTED, "As predicted", StepTimeline(timeline.step, simulated.spans)),
            *(_complete(PREDICTED, span, begin) for span in simulated.spans),
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"program": "Ramstream", "run": run_id, "step": str(timeline.step)},
    }


def trace_name(run_id: str, step: int) -> str:
    """Returns the default name of the file."""
    return f"{run_id}-step-{step}.trace.json"


def write_trace(
    runs_dir: str | os.PathLike[str], run_id: str, step: int | None, target: Path | None
) -> Path:
    """Writes the trace of a step and returns the path of the file.

    Without `step`, the latest step that has a timeline is used. Without `target`, the file is
    created in the current folder with the name from `trace_name`. Raises RunError for a run or a
    timeline that does not exist, and for a file that cannot be written.
    """
    timeline, simulated = TimelineIndex(open_run(runs_dir, run_id).events_path).read(step)
    path = target or Path(trace_name(run_id, timeline.step))
    try:
        # The file is written completely or not at all, since a viewer rejects half a file.
        text = json.dumps(trace_of(run_id, timeline, simulated), separators=(",", ":"))
        safe_files.write_whole(path, text, path.parent)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); choose another file with --out."
        ) from None
    return path


def _names(process: int, name: str, timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """Yields the events that name a process and its rows and set their order."""
    yield _metadata(process, "process_name", 0, {"name": name})
    yield _metadata(process, "process_sort_index", 0, {"sort_index": process})
    lanes = {_row(span["lane"]): span["lane"] for span in timeline.spans}
    rows = set(lanes)
    if timeline.waits:
        rows.add(_row("COMPUTE waits"))
    for row in sorted(rows):
        title = ROWS[row - 1] if row <= len(ROWS) else lanes[row]
        yield _metadata(process, "thread_name", row, {"name": title})
        yield _metadata(process, "thread_sort_index", row, {"sort_index": row})


def _metadata(process: int, kind: str, thread: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}


def _row(lane: str) -> int:
    """Returns the row of a lane. Lanes that this version does not know share the lowest row."""
    return ROWS.index(lane) + 1 if lane in ROWS else len(ROWS) + 1


def _complete(process: int, span: Span, begin: float) -> dict[str, Any]:
    """Returns the event of an op."""
    batch: Any = span.get("micro_batch")
    name = f"{span['op']} {span['unit']}"
    values = {"unit": span["unit"], "op": span["op"]}
    if batch is not None:
        name += f" [{batch}]"
        values["micro_batch"] = batch
    return {
        "ph": "X",
        "pid": process,
        "tid": _row(span["lane"]),
        "name": name,
        "cat": span["op"],
        "ts": _microseconds(span["start"] - begin),
        "dur": _microseconds(span["end"] - span["start"]),
        "args": values,
    }


def _waited(process: int, wait: Wait, begin: float) -> dict[str, Any]:
    """Returns the event of a wait of COMPUTE."""
    cause = wait.get("cause", "other")
    return {
        "ph": "X",
        "pid": process,
        "tid": _row("COMPUTE waits"),
        "name": f"waits: {cause}",
        "cat": "wait",
        "ts": _microseconds(wait["start"] - begin),
        "dur": _microseconds(wait["end"] - wait["start"]),
        "args": {"cause": cause},
    }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)

"""A step's timeline as a file for ui.perfetto.dev and chrome://tracing: the trace event format, one
row a lane. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import RunError
from engine.files import write_whole
from engine.plan.ops import Lane
from engine.runs.events import PlanSimulated, StepTimeline
from engine.runs.folder import open_run
from engine.runs.timeline_index import TimelineIndex

ROWS = (
    Lane.H2D,
    Lane.STATES_IN,
    Lane.COMPUTE,
    "COMPUTE waits",
    Lane.UPDATE,
    Lane.D2H,
    Lane.STATES_OUT,
    Lane.HOST,
)
"""From top to bottom; a row is a thread of the trace, numbered from 1."""
MEASURED, PREDICTED = 1, 2
"""Processes of the trace."""


def trace_of(
    run_id: str, timeline: StepTimeline, simulated: PlanSimulated | None = None
) -> dict[str, Any]:
    """The trace as JSON values: complete events ("X") in microseconds from the earliest of them, a
    thread a lane; what was measured and what was predicted are two processes. `simulated`: of the
    plan that the step ran.
    """
    starts = [record["start"] for record in [*timeline.spans, *timeline.waits]]
    begin = min(starts, default=0.0)
    events = [
        *_names(MEASURED, f"Step {timeline.step}, measured", timeline),
        *(_complete(MEASURED, span, begin) for span in timeline.spans),
        *(_waited(wait, begin) for wait in timeline.waits),
    ]
    if simulated is not None:
        # Both begin with the first op of the step.
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
    """What the file is called."""
    return f"{run_id}-step-{step}.trace.json"


def write_trace(
    runs_dir: str | os.PathLike[str], run_id: str, step: int | None, target: Path | None
) -> Path:
    """Write the trace of `step` (None: the latest that has a timeline) to `target` (None: a file of
    its own name in the current folder) and return where it is. Raises RunError for what is not
    there and for a file that cannot be written.
    """
    timeline, simulated = TimelineIndex(open_run(runs_dir, run_id).events_path).read(step)
    path = target or Path(trace_name(run_id, timeline.step))
    try:
        # Whole or not at all: a viewer refuses half a file.
        write_whole(path, json.dumps(trace_of(run_id, timeline, simulated), separators=(",", ":")))
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); choose another file with --out."
        ) from None
    return path


def _names(process: int, name: str, timeline: StepTimeline) -> Iterable[dict[str, Any]]:
    def metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}

    yield metadata("process_name", 0, name=name)
    yield metadata("process_sort_index", 0, sort_index=process)
    rows = {_row(span["lane"]) for span in timeline.spans} | (
        {_row("COMPUTE waits")} if timeline.waits else set()
    )
    lanes = {_row(span["lane"]): span["lane"] for span in timeline.spans}
    for row in sorted(rows):
        yield metadata("thread_name", row, name=ROWS[row - 1] if row <= len(ROWS) else lanes[row])
        yield metadata("thread_sort_index", row, sort_index=row)


def _row(lane: str) -> int:
    """Of a lane; those of another version of the program share one below the others."""
    return ROWS.index(lane) + 1 if lane in ROWS else len(ROWS) + 1


def _complete(process: int, span: dict[str, Any], begin: float) -> dict[str, Any]:
    batch = span.get("micro_batch")
    name = f"{span['op']} {span['unit']}" + ("" if batch is None else f" [{batch}]")
    return _event(
        process,
        _row(span["lane"]),
        name,
        span["op"],
        span,
        begin,
        {"unit": span["unit"], "op": span["op"]}
        | ({} if batch is None else {"micro_batch": batch}),
    )


def _waited(wait: dict[str, Any], begin: float) -> dict[str, Any]:
    cause = wait.get("cause", "other")
    return _event(
        MEASURED, _row("COMPUTE waits"), f"waits: {cause}", "wait", wait, begin, {"cause": cause}
    )


def _event(
    process: int,
    row: int,
    name: str,
    category: str,
    record: dict[str, Any],
    begin: float,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "cat": category,
        "ts": _microseconds(record["start"] - begin),
        "dur": _microseconds(record["end"] - record["start"]),
        "args": args,
    }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)

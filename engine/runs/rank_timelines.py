"""These functions divide the timeline of a step that several ranks computed."""

from __future__ import annotations

from engine.runs.events import StepTimeline


def ranks_in(timeline: StepTimeline) -> int:
    """Returns how many ranks a timeline tells of; 1 in records that name none."""
    return 1 + max((span.get("rank", 0) for span in timeline.spans), default=0)


def of_rank(timeline: StepTimeline, rank: int) -> StepTimeline:
    """Returns the part of a timeline that is of one rank."""
    return StepTimeline(
        timeline.step,
        [span for span in timeline.spans if span.get("rank", 0) == rank],
        [wait for wait in timeline.waits if wait.get("rank", 0) == rank],
    )

"""The page shows one rank of a sampled step with all its lanes, or what all ranks compute and
exchange, one below the other. Most runs have one rank. All functions are pure.
"""

from __future__ import annotations

from typing import Any

from app.labels import in_share
from app.pages.run.spans import MAX_SPANS, Window, lanes_of, phases_of, within
from app.pages.run.timeline_bars import LANE_LABELS, MAX_WAITS, lane_bars, wait_bars
from app.pages.run.timeline_figure import (
    batches_of,
    busy_share,
    count_text,
    duration,
    layout_of,
    phase_lines,
    timeline_figure,
    timeline_legend,
    timeline_phases,
    timeline_text,
)
from app.shared.charts.drawing import Figure
from engine.planning.schedule.ops import Lane
from engine.runs.record.events import PlanSimulated, StepTimeline
from engine.runs.record.timeline_index import of_rank, ranks_in

ALL_RANKS = -1
"""Number with which a page asks for all ranks together."""
COMMON_LANES = (Lane.COMPUTE, Lane.COLLECTIVE)
"""Lanes that are drawn where all ranks are: they show how ranks wait for each other."""


def timeline_part(
    timeline: StepTimeline | None, simulated: PlanSimulated | None = None, rank: int = 0
) -> dict[str, Any]:
    """Returns everything that the page shows about one step on a rank, or on `ALL_RANKS`: its
    figure, the `phases` of the band above it, `legend`, `caption`, `step`, `rank` and the number of
    `ranks`. A rank that the step does not have counts as rank 0.
    """
    ranks = 1 if timeline is None else ranks_in(timeline)
    rank = rank if rank < ranks and ranks > 1 else 0
    of_step = {"step": None if timeline is None else timeline.step, "rank": rank, "ranks": ranks}
    if timeline is not None and rank == ALL_RANKS:
        shown = _common(timeline)
        first = of_rank(timeline, 0)
        return {
            **_figure_of_all(timeline, None),
            "phases": timeline_phases(first),
            "caption": _text_of_all(timeline),
            "legend": [_summed(entry) for entry in timeline_legend(shown)],
            **of_step,
        }
    own = timeline if timeline is None or ranks == 1 else of_rank(timeline, rank)
    return {
        **timeline_figure(own, simulated),
        "phases": timeline_phases(own),
        "caption": timeline_text(own),
        "legend": timeline_legend(own, simulated),
        **of_step,
    }


def stretch_figure(
    timeline: StepTimeline,
    simulated: PlanSimulated | None,
    window: Window,
    rank: int = 0,
) -> Figure:
    """Returns the figure of a stretch of a step, in more detail, on a rank or on `ALL_RANKS`."""
    if rank == ALL_RANKS and ranks_in(timeline) > 1:
        return _figure_of_all(timeline, window)
    return timeline_figure(of_rank(timeline, max(0, rank)), simulated, window)


def _common(timeline: StepTimeline) -> StepTimeline:
    """Returns the part of a timeline that is drawn where all ranks are."""
    spans = [span for span in timeline.spans if span["lane"] in COMMON_LANES]
    return StepTimeline(timeline.step, spans, timeline.waits)


def _summed(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry of the legend for a wait of all ranks together."""
    about = entry["about"]
    return entry | {"about": f"{about}, on all ranks together"} if about else entry


def _figure_of_all(timeline: StepTimeline, window: Window | None) -> Figure:
    """Returns the spans of `COMMON_LANES` of all ranks, with a row for each lane of a rank."""
    ranks = ranks_in(timeline)
    shown = _common(timeline)
    batches = batches_of(shown.spans)
    rows: list[str] = []
    data: list[dict[str, Any]] = []
    drawn = whole = 0
    for rank in range(ranks):
        own = of_rank(shown, rank)
        spans = within(own.spans, window)
        lanes = lanes_of(spans, MAX_SPANS // ranks, COMMON_LANES)
        for lane, bars in lanes.items():
            rows.append(f"{rank} {LANE_LABELS[lane]}")
            data.append(lane_bars(lane, bars, batches, rows[-1]))
        row = rows[-len(lanes)]
        data += wait_bars(within(own.waits, window), row, MAX_WAITS // ranks)
        drawn += sum(map(len, lanes.values()))
        whole += len(spans)
    lines = phase_lines(phases_of(of_rank(timeline, 0).spans))
    return {
        "data": data,
        "layout": layout_of(rows, shown.spans, shown.waits, lines),
        "is_whole": drawn == whole,
        "count": count_text(drawn, whole, window),
    }


def _text_of_all(timeline: StepTimeline) -> str:
    """Returns one sentence for people who cannot or do not want to read the figure."""
    ranks = ranks_in(timeline)
    shares = [busy_share(of_rank(timeline, rank)) for rank in range(ranks)]
    least, most = in_share(min(shares)), in_share(max(shares))
    busy = most if least == most else f"{least} to {most}"
    length = duration(timeline)
    return f"Step {timeline.step:,}: {length} · busy {busy} on {ranks} ranks"

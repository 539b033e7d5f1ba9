"""Made-up steps of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from engine.runs.record.events import Event, MemorySampled, PlanBuilt, RankSample, StepTimeline
from tests.support.synthetic_run import GIB, span, timeline


def timeline_of_ranks(step: int, ranks: int = 2) -> StepTimeline:
    """A step of several ranks. Each begins 2 ms before the rank before it, gathers weights for 3
    ms, and waits for them.
    """
    of_one = timeline(step)
    spans, waits = [], []
    for rank in range(ranks):
        early = 0.002 * rank
        who = {"rank": rank} if rank else {}
        gather = span("block.0", "all_gather", "COLLECTIVE", 0.001, 0.004)
        for each in [*of_one.spans, gather]:
            times = {"start": each["start"] - early, "end": each["end"] - early}
            spans.append(each | times | who)
        waits.append({"start": 0.001 - early, "end": 0.004 - early, "cause": "exchange"} | who)
    return StepTimeline(step, spans, waits)


def on_ranks(events: Iterable[Event], ranks: int = 2) -> Iterator[Event]:
    """The events of a run, as so many ranks would have recorded them."""
    for event in events:
        if isinstance(event, PlanBuilt):
            yield replace(event, choices=event.choices | {"ranks": ranks})
        elif isinstance(event, StepTimeline):
            yield timeline_of_ranks(event.step, ranks)
        elif isinstance(event, MemorySampled):
            yield replace(event, ranks=[_sample(event, rank) for rank in range(ranks)])
        else:
            yield event


def _sample(of_one: MemorySampled, rank: int) -> RankSample:
    more = rank * GIB // 2
    return RankSample(
        rank=rank,
        host=3 * GIB + more // 4,
        gpu_allocated=of_one.gpu_allocated + more,
        gpu_reserved=of_one.gpu_reserved + more,
        gpu_peak=of_one.gpu_peak + more,
        gpu_driver=of_one.gpu_driver + more,
        gpu_total=of_one.gpu_total,
        power=of_one.power + 7 * rank,
    )

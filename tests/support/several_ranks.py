"""Runs of several ranks, and made-up timelines of them."""

from __future__ import annotations

from dataclasses import replace

from engine.runs.events import StepTimeline
from engine.train import prepare
from tests.support.synthetic_run import span, timeline


def plan_for_ranks(monkeypatch, ranks: int) -> None:
    """Makes every plan from now on one for so many ranks, whatever the planner would choose."""
    planned = prepare.make_plan

    def make_plan(session, job, check):
        found = planned(session, job, check)
        of_one = found.chosen.choices
        choices = replace(
            of_one,
            ranks=ranks,
            micro_batches=max(1, of_one.micro_batches // ranks),
            settled_units=0,
            graphs=False,
            boundary_blocks=1,
            rounds=1,
            kept_blocks=0,
            resident_blocks=0,
            device_homes=(),
            parked_gradients=False,
        )
        return replace(found, chosen=replace(found.chosen, choices=choices))

    monkeypatch.setattr(prepare, "make_plan", make_plan)


def timeline_of_ranks(step: int, ranks: int = 2) -> StepTimeline:
    """A step of several ranks. Each begins 2 ms before the rank before it, gathers weights for 3
    ms, and waits for them.
    """
    of_one = timeline(step)
    spans, waits = [], []
    for rank in range(ranks):
        early = 0.002 * rank
        who = {"rank": rank} if rank else {}
        gather = span("block.0", "all_gather", "EXCHANGE", 0.001, 0.004)
        for each in [*of_one.spans, gather]:
            times = {"start": each["start"] - early, "end": each["end"] - early}
            spans.append(each | times | who)
        waits.append({"start": 0.001 - early, "end": 0.004 - early, "cause": "exchange"} | who)
    return StepTimeline(step, spans, waits)

"""Exposed time is blamed on what compute waited for."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from engine.planning.schedule.ops import Lane
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.stalls import (
    Wait,
    as_records,
    first_start,
    overlap_seconds,
    seconds_by_cause,
    waits_as_records,
    waits_of,
)
from tests.support.planned_steps import measured, op_on, plan_of


def op(index, lane, waits=(), previous=()):
    return op_on(lane, index, f"unit {index}", waits=waits, waits_previous=previous)


def exposed_seconds(spans, previous, inline, seconds=math.inf):
    """Seconds that COMPUTE waited, by cause."""
    return seconds_by_cause(waits_of(spans, previous, inline, seconds))


def test_a_gap_is_split_between_the_transfer_and_what_the_transfer_waited_for():
    before = [Span(op(0, Lane.COMPUTE), 0.0, 1.0), Span(op(1, Lane.HOST), 1.0, 4.0)]
    step = [
        Span(op(0, Lane.H2D, previous=(1,)), 4.0, 6.0),
        Span(op(1, Lane.COMPUTE, (0,)), 6.5, 8.0),
    ]
    found = exposed_seconds(step, before, inline=False)
    assert found == pytest.approx({"h2d": 2.0, "d2h": 0.0, "optimizer": 3.0, "other": 0.5})
    assert sum(found.values()) == pytest.approx(6.5 - 1.0)


def test_what_an_update_of_the_step_before_waited_for_is_sought_in_that_step():
    before = [
        Span(op(0, Lane.COMPUTE), 0.0, 1.0),
        Span(op(1, Lane.D2H, waits=(0,)), 1.0, 1.5),
        Span(op(2, Lane.HOST, waits=(1,)), 1.5, 4.0),
    ]
    step = [
        Span(op(0, Lane.H2D, previous=(2,)), 4.0, 5.0),
        Span(op(1, Lane.COMPUTE, (0,)), 5.0, 90.0),
        Span(op(2, Lane.HOST, waits=(1,)), 90.0, 95.0),
    ]
    found = exposed_seconds(step, before, inline=False)
    assert found == pytest.approx({"h2d": 1.0, "d2h": 0.5, "optimizer": 2.5, "other": 0.0})


def test_a_transfer_that_ended_before_the_gap_is_not_blamed():
    step = [
        Span(op(0, Lane.H2D), 0.0, 1.0),
        Span(op(1, Lane.COMPUTE, waits=(0,)), 1.0, 3.0),
        Span(op(2, Lane.H2D), 1.0, 2.0),
        Span(op(3, Lane.COMPUTE, waits=(2,)), 3.5, 4.0),
    ]
    assert exposed_seconds(step, None, inline=False) == pytest.approx(
        {"h2d": 0, "d2h": 0, "optimizer": 0, "other": 0.5}
    )


def test_what_was_before_it_on_its_lane_is_a_cause_too():
    """A weight comes late because its update came late, and that because another's came first."""
    before = [
        Span(op(0, Lane.COMPUTE), 0.0, 1.0),
        Span(op(1, Lane.HOST), 1.0, 4.0),
        Span(op(2, Lane.HOST), 4.0, 6.0),
    ]
    step = [
        Span(op(0, Lane.H2D, previous=(2,)), 6.0, 7.0),
        Span(op(1, Lane.COMPUTE, (0,)), 7.0, 8.0),
    ]
    assert exposed_seconds(step, before, inline=False) == pytest.approx(
        {"h2d": 1.0, "d2h": 0, "optimizer": 5.0, "other": 0}
    )
    step = [
        Span(op(0, Lane.H2D, previous=(1,)), 4.0, 7.0),
        Span(op(1, Lane.H2D), 7.0, 9.0),
        Span(op(2, Lane.COMPUTE, (1,)), 9.0, 9.5),
    ]
    assert exposed_seconds(step, before, inline=False) == pytest.approx(
        {"h2d": 5.0, "d2h": 0, "optimizer": 3.0, "other": 0}
    )


def test_compute_that_waits_for_a_staging_buffer_waits_for_d2h():
    step = [
        Span(op(0, Lane.COMPUTE), 0.0, 1.0),
        Span(op(1, Lane.D2H, waits=(0,)), 1.0, 4.0),
        Span(op(2, Lane.COMPUTE, waits=(1,)), 4.0, 5.0),
    ]
    assert exposed_seconds(step, None, inline=False)["d2h"] == pytest.approx(3.0)


def test_on_one_thread_whatever_ran_in_the_gap_is_its_cause():
    step = [
        Span(op(0, Lane.COMPUTE), 0.0, 1.0),
        Span(op(1, Lane.H2D), 1.0, 1.5),
        Span(op(2, Lane.D2H), 1.5, 2.0),
        Span(op(3, Lane.HOST), 2.0, 4.0),
        Span(op(4, Lane.COMPUTE), 4.25, 5.0),
    ]
    assert exposed_seconds(step, None, inline=True) == pytest.approx(
        {"h2d": 0.5, "d2h": 0.5, "optimizer": 2.0, "other": 0.25}
    )


@pytest.mark.parametrize("inline", [False, True])
def test_no_more_is_exposed_than_the_step_took(inline):
    """What compute waited for before that was in the step before."""
    before = [Span(op(0, Lane.COMPUTE), 0.0, 1.0), Span(op(1, Lane.HOST), 1.0, 9.0)]
    step = [
        Span(op(0, Lane.H2D, previous=(1,)), 9.0, 9.5),
        Span(op(1, Lane.COMPUTE, (0,)), 9.5, 10.0),
    ]
    found = exposed_seconds(step, before, inline, seconds=3.0)
    assert found == pytest.approx({"h2d": 0.5, "d2h": 0.0, "optimizer": 2.0, "other": 0.0})


def test_waits_are_stretches_of_time_with_a_cause():
    before = [Span(op(0, Lane.COMPUTE), 0.0, 1.0), Span(op(1, Lane.HOST), 1.0, 4.0)]
    step = [
        Span(op(0, Lane.H2D, previous=(1,)), 4.0, 6.0),
        Span(op(1, Lane.COMPUTE, (0,)), 6.5, 8.0),
    ]
    waits = waits_of(step, before, inline=False)
    assert waits == [Wait(1.0, 4.0, "optimizer"), Wait(4.0, 6.0, "h2d"), Wait(6.0, 6.5, "other")]
    assert waits_as_records(waits, first_start(step)) == [
        {"start": -3.0, "end": 0.0, "cause": "optimizer"},
        {"start": 0.0, "end": 2.0, "cause": "h2d"},
        {"start": 2.0, "end": 2.5, "cause": "other"},
    ]
    assert waits_as_records([Wait(4.0, 4.0000001, "h2d")], first_start(step)) == []


def test_waits_on_one_thread_are_what_ran_meanwhile():
    step = [
        Span(op(0, Lane.COMPUTE), 0.0, 1.0),
        Span(op(1, Lane.H2D), 1.0, 1.5),
        Span(op(2, Lane.H2D), 1.5, 2.0),
        Span(op(3, Lane.COMPUTE), 2.25, 3.0),
        Span(op(4, Lane.HOST), 3.0, 4.0),
        Span(op(5, Lane.COMPUTE), 4.0, 5.0),
    ]
    assert waits_of(step, None, inline=True) == [
        Wait(1.0, 2.0, "h2d"),
        Wait(2.0, 2.25, "other"),
        Wait(3.0, 4.0, "optimizer"),
    ]


@pytest.mark.parametrize("rounds", [1, 2])
def test_waits_fill_the_gaps_of_compute_and_nothing_else(rounds):
    step = measured(plan_of(rounds=rounds), 1)
    assert {span["lane"] for span in step.spans} <= set(Lane) and len(step.waits) > 2
    compute = [(span["start"], span["end"]) for span in step.spans if span["lane"] == Lane.COMPUTE]
    busy = sorted(compute + [(wait["start"], wait["end"]) for wait in step.waits])
    assert all(before[1] == pytest.approx(after[0], abs=2e-6) for before, after in pairwise(busy))
    assert all(wait["end"] > wait["start"] for wait in step.waits)


def test_overlap_counts_shared_time_once():
    spans = [
        Span(op(0, Lane.COMPUTE), 0.0, 2.0),
        Span(op(1, Lane.COMPUTE), 1.0, 3.0),
        Span(op(2, Lane.H2D), 1.0, 5.0),
    ]
    assert overlap_seconds(spans, Lane.COMPUTE, Lane.H2D) == pytest.approx(2.0)
    assert overlap_seconds(spans, Lane.COMPUTE, Lane.D2H) == 0.0
    spans += [
        Span(op(k, Lane.H2D), start, end)
        for k, start, end in ((3, 6.0, 7.0), (4, 8.0, 12.0), (5, 8.5, 9.0))
    ]
    spans += [
        Span(op(k, Lane.COMPUTE), start, end)
        for k, start, end in ((6, 4.5, 6.25), (7, 6.5, 8.5), (8, 9.0, 9.5))
    ]
    assert (
        overlap_seconds(spans, Lane.COMPUTE, Lane.H2D)
        == overlap_seconds(spans, Lane.H2D, Lane.COMPUTE)
        == pytest.approx(4.25)
    )
    assert overlap_seconds(spans, Lane.H2D, Lane.H2D) == pytest.approx(9.0)


def test_records_count_from_the_first_span():
    records = as_records([Span(op(0, Lane.H2D), 10.0, 11.0), Span(op(1, Lane.COMPUTE), 11.0, 12.5)])
    assert [(r["start"], r["end"]) for r in records] == [(0.0, 1.0), (1.0, 2.5)]
    assert set(records[0]) == {"unit", "op", "lane", "micro_batch", "start", "end"}

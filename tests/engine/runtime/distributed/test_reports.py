"""Workers report when their ops ran and what memory they hold, and the record has it."""

from __future__ import annotations

import pytest

from engine.runs.record.events import ForecastChecked, MemorySampled, StepFinished, StepTimeline
from engine.runs.record.timeline_index import of_rank, ranks_in
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.trained_runs import events_of
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture

pytestmark = pytest.mark.computing

SLACK = 5e-6
"""Seconds by which rounding to microseconds may shift a span."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    values = {"train.steps": 4, "train.micro_batch_size": 1, "output.timeline_every": 2}
    run = start_run(make_config(folder, **values, **{"engine.gpus": 2}), folder / "runs")
    assert run.execute().state == "finished"
    return run


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_sampled_steps_have_the_ops_of_every_rank_on_one_clock(run):
    timelines = events_of(run, StepTimeline)
    assert [event.step for event in timelines] == [1, 2, 4]
    for timeline in timelines:
        assert ranks_in(timeline) == 2
        first, second = of_rank(timeline, 0), of_rank(timeline, 1)
        assert all("rank" not in span for span in first.spans)
        assert min(span["start"] for span in first.spans) == 0
        exchanges = []
        for own in (first, second):
            ops = [span for span in own.spans if span["lane"] == "COLLECTIVE"]
            exchanges.append(sorted(ops, key=lambda span: span["start"]))
            waited = sum(wait["end"] - wait["start"] for wait in own.waits)
            both = (*own.spans, *own.waits)
            edges = [each[edge] for each in both for edge in ("start", "end")]
            assert 0 <= waited <= max(edges) - min(edges) + SLACK  # one wait ends before the next
        named = [[(span["op"], span["unit"]) for span in ops] for ops in exchanges]
        assert named[0] == named[1]
        assert {"reduce_scatter", "all_reduce"} < {op for op, _ in named[0]}
        # A collective ends nowhere before every rank has begun it.
        for one, other in zip(*exchanges):
            assert one["end"] + SLACK >= other["start"] and other["end"] + SLACK >= one["start"]
    assert any(wait["cause"] == "exchange" for wait in timelines[-1].waits)


def test_steps_that_are_not_sampled_leave_nothing_behind(run):
    assert run.recorder.snapshot.timeline_steps == [1, 2, 4]
    exposed = [event.exposed for event in events_of(run, StepFinished)]
    assert all("exchange" in each for each in exposed)


def test_samples_have_the_memory_of_every_rank_and_count_what_they_share_once(run):
    samples = events_of(run, MemorySampled)
    assert samples
    for sample in samples:
        first, second = sample.ranks
        assert (first["rank"], second["rank"]) == (0, 1)
        assert min(first["host"], second["host"]) > 50 << 20  # a Python process with torch
        # The planes are in `host_rss` beside what each process has for itself.
        assert sample.host_rss >= first["host"] + second["host"]
    (last,) = [each for each in events_of(run, ForecastChecked) if each.moment == "end"]
    assert last.quantities["host_bytes"]["measured"] >= max(each.host_rss for each in samples)
    assert run.recorder.snapshot.ranks == samples[-1].ranks
    assert run.recorder.snapshot.rank_count == 2


def test_a_record_of_one_rank_says_nothing_of_ranks(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    run.execute()
    text = run.folder.events_path.read_text(encoding="utf-8")
    assert '"memory_sampled"' in text and '"rank"' not in text
    assert '"ranks":[' not in text

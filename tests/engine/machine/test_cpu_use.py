"""What other programs use of the CPU, from counters that are set here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.machine import cpu_use
from engine.machine.cpu_use import UNKNOWN, OtherPrograms


@pytest.fixture
def counters(monkeypatch):
    """Two cores, of a machine with three, that this process may use; all counters are 0."""
    set_to = SimpleNamespace(clock=0.0, own=0.0, busy=[0.0, 0.0, 0.0], cores=2)

    def times(percpu):
        assert percpu
        idle = dict(nice=0.0, system=0.0, irq=0.0, softirq=0.0, steal=0.0, idle=9.0)
        return [SimpleNamespace(user=busy, **idle) for busy in set_to.busy]

    monkeypatch.setattr(cpu_use.os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(cpu_use, "usable_cores", lambda: set_to.cores)
    monkeypatch.setattr(cpu_use.psutil, "cpu_times", times)
    monkeypatch.setattr(cpu_use.time, "perf_counter", lambda: set_to.clock)
    monkeypatch.setattr(cpu_use.time, "process_time", lambda: set_to.own)
    return set_to


def test_what_others_use_of_own_cores_counts_since_the_call_before(counters):
    others = OtherPrograms()
    counters.clock, counters.own, counters.busy = 10.0, 8.0, [9.0, 10.0, 4.0]
    assert others.share() == pytest.approx((9 + 4 - 8) / 20)
    counters.clock, counters.own, counters.busy = 20.0, 18.1, [14.0, 20.0, 9.0]
    assert others.share() == 0  # the clocks are not read at one moment


def test_it_is_unknown_where_nothing_is_counted_or_a_quota_shares_the_cores(counters):
    others = OtherPrograms()
    counters.clock, counters.own = 10.0, 8.0
    assert others.share() == UNKNOWN
    counters.cores = 1
    limited = OtherPrograms()
    counters.clock, counters.busy = 20.0, [9.0, 10.0, 4.0]
    assert limited.share() == UNKNOWN

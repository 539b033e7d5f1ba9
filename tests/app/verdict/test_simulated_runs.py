"""Of made-up healthy runs hardly any gets an alarm, and made-up faults are found.

The sample is small, so that it takes seconds; `python -m tests.support.simulated_runs` judges a
thousand runs after every step.
"""

from __future__ import annotations

import statistics

import pytest

from tests.support.simulated_runs import (
    alarms,
    any_healthy,
    diverging,
    false_alarms,
    many,
    overfitting,
)

HEALTHY_RUNS, FAULTY_RUNS = 48, 10
EVERY = 10
"""An alarm lasts at least so many steps, so hardly any is missed by looking only so often."""


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_hardly_any_healthy_run_gets_an_alarm():
    alarmed = {}
    for number, made in enumerate(many(any_healthy, HEALTHY_RUNS, seed=1)):
        found = false_alarms(made, EVERY)
        if found:
            alarmed[made.kind, number] = found
    assert len(alarmed) <= 1, alarmed


def test_a_loss_that_diverges_is_found_soon_and_never_before():
    delays = []
    for made in many(lambda draw, _: diverging(draw), FAULTY_RUNS, seed=2):
        step = alarms(made, 5)["diverging"]
        assert step > made.onset
        delays.append(step - made.onset)
    assert statistics.median(delays) <= 20 and max(delays) <= 40


def test_overfitting_is_found_and_never_before_it_begins():
    delays = []
    for made in many(lambda draw, _: overfitting(draw), FAULTY_RUNS, seed=2):
        step = alarms(made, EVERY).get("overfitting")
        if step is not None:
            assert step > made.onset
            delays.append(step - made.onset)
    assert len(delays) >= FAULTY_RUNS - 1 and statistics.median(delays) <= 100

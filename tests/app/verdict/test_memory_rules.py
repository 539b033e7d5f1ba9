"""Memory is judged against its limit and against what was predicted."""

from __future__ import annotations

import numpy as np
import pytest

from app.verdict.memory_kinds import full_at, memory_kinds
from app.verdict.memory_rules import in_danger, of_grown_memory, of_memory
from engine.runs.record.events import (
    ForecastChecked,
    MemorySampled,
    RunEnded,
    RunStarted,
    StepFinished,
)
from tests.app.verdict.made_runs import fold, growing, steps
from tests.support.synthetic_run import GIB

MIB = GIB / 1024


def sampled(used, limit, **gpu):
    return [
        MemorySampled(step=place + 1, host_rss=int(value), host_total=int(limit), **gpu)
        for place, value in enumerate(used)
    ]


def test_memory_that_grows_to_its_limit_is_in_danger_and_the_step_is_told():
    snapshot = fold(*steps(60), *growing(), total=1000)
    (found,) = of_memory(snapshot)
    assert (found.rule, found.tone) == ("memory ends soon", "warn") and in_danger(snapshot)
    full = full_at(snapshot, memory_kinds(snapshot)[0])
    assert full == pytest.approx(90, abs=2) and f"at about step {full} of 1,000" in found.text
    assert "each quarter" in found.evidence and "30 % of its limit" in found.evidence
    slow = fold(
        *(StepFinished(step=step, seconds=100.0) for step in range(1, 61)), *growing(), total=1000
    )
    assert of_memory(slow)[0].rule == "memory in danger"


def test_growth_that_lasts_to_the_end_is_calm():
    snapshot = fold(*steps(60), *growing(), total=85)
    (found,) = of_memory(snapshot)
    assert found.tone == "calm"
    assert "but lasts to the end" in found.text
    assert not in_danger(snapshot)


def test_a_starter_that_warms_up_is_no_finding():
    # 60 MiB more at 0.8 GiB, with 18 GiB free: this was once the headline of a success.
    used = 0.75 * GIB + np.linspace(0, 60 * MIB, 200)
    snapshot = fold(*steps(200), *sampled(used, 18.8 * GIB), total=450)
    assert memory_kinds(snapshot)[0].growth.is_growing
    assert of_memory(snapshot) == [] and of_grown_memory(snapshot) == []


def test_growth_that_slows_below_the_limit_is_calm_at_every_step():
    used = GIB * (1 + 6 * (1 - 0.97 ** np.arange(200)))
    for count in range(50, 200, 10):
        snapshot = fold(*steps(count), *sampled(used[:count], 9 * GIB), total=10_000)
        assert not in_danger(snapshot)


@pytest.mark.parametrize("samples", [20, 49])
def test_few_samples_after_the_first_steps_say_nothing(samples):
    assert of_memory(fold(*steps(samples), *growing(samples, 30), total=1000)) == []


@pytest.mark.parametrize(
    "used, limit, predicted, is_short",
    [
        (99.5, 100, None, True),
        (99.5, 100, 99.0, False),  # it was to be so full
        (99.5, 100, 90.0, True),
        (94.0, 100, 90.0, False),
        (7.5, 8, 6.0, True),
        (6.9, 8, 6.0, False),
        (1.7, 2, 1.0, False),  # a GiB is not asked for where there are two
        (1.9, 2, 1.0, True),
    ],
)
def test_memory_runs_short_below_what_must_be_free_unless_it_was_predicted(
    used, limit, predicted, is_short
):
    found = []
    if predicted is not None:
        quantities = {"host_bytes": {"predicted": predicted * GIB, "measured": None, "error": None}}
        found = [ForecastChecked(5, "running", quantities)]
    snapshot = fold(*steps(60), *found, *sampled([used * GIB] * 60, limit * GIB))
    assert in_danger(snapshot) == is_short
    if is_short:
        assert "runs short" in of_memory(snapshot)[0].text


def test_one_short_sample_is_none_and_three_count_for_ten_more():
    def run(*values):
        return in_danger(fold(*steps(70), *sampled([50 * GIB] * 50 + [*values], 100 * GIB)))

    full, free = 99.5 * GIB, 50 * GIB
    assert not run(full, full, free, full, full)
    assert run(full, full, full) and run(full, full, full, *[free] * 9)
    assert not run(full, full, full, *[free] * 10)


def test_a_card_is_judged_by_all_that_is_in_use_on_it():
    gpu = {"gpu_total": 80 * GIB, "gpu_peak": 60 * GIB}
    calm = fold(*steps(60), *sampled([GIB] * 60, 64 * GIB, gpu_driver=70 * GIB, **gpu))
    assert of_memory(calm) == []
    short = fold(*steps(60), *sampled([GIB] * 60, 64 * GIB, gpu_driver=79 * GIB, **gpu))
    assert of_memory(short)[0].text == "GPU memory runs short: 1.00 GiB of 80.0 GiB are free."


def test_a_resume_begins_with_new_samples():
    later = [
        MemorySampled(step=step, host_rss=10 * GIB, host_total=100 * GIB) for step in range(61, 130)
    ]
    resumed = RunStarted(total_steps=1000, resumed_step=60)
    snapshot = fold(*steps(60), *growing(), resumed, *later[:29], total=1000)
    assert of_memory(snapshot) == []
    assert not memory_kinds(fold(*steps(60), *growing(), resumed, *later))[0].growth.is_growing


def test_a_run_that_is_over_is_in_no_danger():
    over = fold(*steps(60), *growing(), RunEnded("finished"), total=1000)
    assert not in_danger(over)
    assert of_grown_memory(over)[0].text.startswith("RAM grew by 30.0 GiB after step 31")

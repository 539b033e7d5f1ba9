"""Memory growth is recognized in samples for which the right answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from app.verdict.memory_growth import (
    FEWEST_SAMPLES,
    GROWTH_SHARE,
    TOLERANCE,
    MemoryGrowth,
    memory_growth,
)

GIB = float(1 << 30)


def of(values, every=10):
    return memory_growth([every * (k + 1) for k in range(len(values))], values)


def noisy(count, level=40 * GIB, share=0.002, seed=0):
    return level * (1 + share * np.random.default_rng(seed).uniform(-1, 1, count))


@pytest.mark.parametrize("count", [FEWEST_SAMPLES, 40, 32_768])
def test_samples_that_stay_as_they_are_do_so_from_the_first_on(count):
    found = of(noisy(count))
    assert found.steady_since == 10 and not found.is_growing
    assert 0 < found.share <= 0.002
    assert of(np.full(count, 3.0)) == MemoryGrowth(steady_since=10, share=0.0)


def test_what_was_taken_at_the_beginning_is_left_out():
    values = np.concatenate([np.linspace(1, 40, 20) * GIB, noisy(60)])
    found = of(values)
    assert found.steady_since in (200, 210)
    assert found.share < TOLERANCE
    assert not found.is_growing


@pytest.mark.parametrize("count", [2 * FEWEST_SAMPLES, 100, 5000])
@pytest.mark.parametrize("rise", [1.05, 1.5, 10])
def test_samples_that_grow_all_along_are_told(count, rise):
    level = np.linspace(40 * GIB, 40 * GIB * rise, count)
    found = of(level * noisy(count, level=1, share=0.001))
    assert found.is_growing and found.steady_since is None
    assert found.grown == pytest.approx(40 * GIB * (rise - 1) / 2, rel=0.15)
    assert found.grows_since == pytest.approx(10 * count / 2, abs=10)
    assert found.per_step == pytest.approx(found.grown / (5 * count), rel=0.15)


def test_a_staircase_grows_and_a_single_step_does_not():
    stairs = np.repeat([40, 42, 44, 46, 48, 50, 52, 54], 10) * GIB
    assert of(stairs).is_growing
    once = np.repeat([40, 44], [60, 40]) * GIB
    assert of(once) == MemoryGrowth(steady_since=610, share=0.0)
    late = np.repeat([40, 44], [97, 3]) * GIB  # too few samples to judge the new level
    assert of(late) == MemoryGrowth()


def test_falling_and_swinging_memory_does_not_grow():
    assert not of(np.linspace(50, 40, 100) * GIB).is_growing
    swinging = 40 * GIB * (1 + 0.2 * np.sin(np.arange(200)))
    assert of(swinging) == MemoryGrowth()
    peaks = noisy(100)
    peaks[::25] *= 1.5
    assert not of(peaks).is_growing


def test_growth_below_the_share_is_none():
    values = np.linspace(40 * GIB, 40 * GIB * (1 + GROWTH_SHARE), 100)
    assert of(values).steady_since == 10


@pytest.mark.parametrize("values", [[], [1.0], [2.0] * (FEWEST_SAMPLES - 1), [0.0] * 50])
def test_nothing_is_said_of_too_few_samples_or_of_none(values):
    assert of(values) == MemoryGrowth()


def test_growth_that_slows_is_not_taken_to_go_on_as_it_was():
    steps = np.arange(200)
    found = of(GIB * (1 + 4 * (1 - 0.985**steps)) * noisy(200, level=1, share=0.0005))
    assert found.is_growing and found.per_step < found.grown / 1000
    # 4 GiB x 0.985^200 are to come; the estimate is no less than that.
    assert 0.19 * GIB < found.to_come < 0.6 * GIB
    even = of(np.linspace(1, 5, 200) * GIB)
    assert even.is_growing and even.to_come == math.inf

"""The time of a run on New counts in how the latest runs went."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.pages.new.usual_pace import Pace, usual_pace


def run(step_times, state="finished", device="CPU", created=100.0, model="m"):
    return SimpleNamespace(
        state=state, device=device, created=created, step_times=step_times, model=model
    )


@pytest.mark.parametrize(
    "runs, times, who",
    [
        ([run(1.4), run(1.2), run(2.0), run(9.0)], 1.7, "last 4 runs of this model"),
        ([run(9.0, model="other"), *[run(1.4)] * 3], 1.4, "last 3 runs of this model"),
        ([run(3.0, model="other"), *[run(1.4)] * 2], 1.4, "last 3 runs"),
        # A run that went otherwise changes what is told by little.
        ([run(9.0), *[run(1.42)] * 20], 1.4, "last 9 runs of this model"),
        ([run(0.5), run(0.7)], 0.6, "last 2 runs"),
        ([run(1.3)], 1.3, "last run"),
        ([run(9.0, state="stopped"), run(9.0, device="RTX 4090"), run(None), run(1.3)], 1.3, "run"),
        ([run(1.3), run(9.0, created=50.0)], 1.3, "last run"),  # before rates were measured
    ],
)
def test_the_median_of_the_latest_runs_here_is_counted_in(runs, times, who):
    found = usual_pace(runs, "m", "CPU", since=80.0)
    assert found.times == pytest.approx(times)
    told = f"{who} here took {times}× as long as predicted."
    assert found.note.startswith("Adjusted: the ") and found.note.endswith(told)


@pytest.mark.parametrize("runs", [[], [run(1.14)], [run(0.86)], [run(1.1), run(5.0), run(0.9)]])
def test_runs_that_went_about_as_predicted_change_nothing(runs):
    assert usual_pace(runs, "m", "CPU", since=0.0) == Pace()


def test_what_is_of_a_step_stays_as_predicted():
    time = {"step_seconds": 2.0, "run_seconds": 20.0, "energy_kwh": None, "cost": 3.0, "steps": 10}
    assert Pace(1.5).counted_in(time) == time | {"run_seconds": 30.0, "cost": 4.5}

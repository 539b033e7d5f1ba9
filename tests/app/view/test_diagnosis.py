"""The diagnosis says where a run's time and memory go, and what could be changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.view.diagnosis import CAUSES, diagnosis
from app.view.step_time import PARTS
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.events import (
    PlanBuilt,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.snapshot import RunSnapshot
from tests.support.synthetic_run import records

CONFIG = TrainConfig.from_dict(
    {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"batch_size": 16, "steps": 101}}
)


def fold(*events, device="cuda", total=100):
    snapshot = RunSnapshot()
    for record in records(
        [RunStarted(device=device, total_steps=total), StateChanged("running"), *events]
    ):
        snapshot.apply(record)
    return snapshot


def steps(count=30, data=0.0, **exposed):
    return [
        StepFinished(step=k, seconds=1.0, exposed=exposed, data_seconds=data)
        for k in range(1, count + 1)
    ]


def test_before_the_first_step():
    assert diagnosis(RunSnapshot()).text == "Getting ready: the first step has not begun."
    assert diagnosis(RunSnapshot(state="running")).text == "The first step is under way."
    compiled = fold(PlanBuilt(choices={"compiled": True}))
    assert diagnosis(compiled, CONFIG).text.startswith(
        "The first step is under way. Its blocks are compiled"
    )
    assert diagnosis(compiled, CONFIG).offer is None


def test_compute_bound_is_said():
    found = diagnosis(fold(*steps(h2d=0.03)), CONFIG)
    assert (found.text, found.tone) == ("Compute-bound: 3 % of the time is spent waiting.", "good")
    assert not found.advice and found.offer is None
    by_hand = diagnosis(
        fold(*steps(h2d=0.03)), CONFIG.with_values({"engine.save_level": "boundary"})
    )
    assert by_hand.offer.changes == {"engine.save_level": "auto"}
    shown = by_hand.to_dict()  # with the form's names for the settings
    assert (
        shown["offer"]["label"] == "Save level: auto"
        and "because Save level was set by hand" in shown["advice"]
    )


def test_a_first_step_that_compiles_is_left_out():
    slow = StepFinished(step=1, seconds=60.0, exposed={"other": 50.0})
    assert "launches" in diagnosis(fold(slow), CONFIG).text
    assert diagnosis(fold(slow, *steps()[1:]), CONFIG).tone == "good"


@pytest.mark.parametrize(
    "device, text, advice",
    [
        (
            "cuda",
            "The host optimizer holds the GPU up for 18 % of the time; further waits: weights "
            "coming in (H2D) 4 %.",
            "More tokens a step would hide it",
        ),
        (
            "cpu",
            "The optimizer takes 18 % of the time, and on the CPU nothing computes beside it; "
            "further waits: weights coming in (H2D) 4 %.",
            "More tokens a step would spread it",
        ),
    ],
)
def test_the_optimizer_holds_compute_up(device, text, advice):
    found = diagnosis(fold(*steps(optimizer=0.18, h2d=0.04, d2h=0.005), device=device), CONFIG)
    assert (found.text, found.tone) == (text, "warn") and found.advice.startswith(advice)
    assert found.offer.changes == {"train.batch_size": 32, "train.steps": 51}
    assert found.offer.label == "32 rows a step instead of 16, 51 steps instead of 101"


def test_weights_and_gradients_late_on_the_bus():
    late = fold(*steps(h2d=0.2))
    assert (
        diagnosis(late, CONFIG).text
        == "Weights arrive late (H2D): the GPU waits 20 % of the time for them."
    )
    by_hand = CONFIG.with_values({"engine.rounds": 4, "engine.slots": 2})
    assert diagnosis(late, by_hand).offer.changes == {
        "engine.slots": "auto",
        "engine.rounds": "auto",
    }
    out = diagnosis(
        fold(*steps(d2h=0.2)), CONFIG.with_values({"engine.save_level": "boundary_host"})
    )
    assert out.text.startswith("Gradients leave late (D2H)") and out.offer.changes == {
        "engine.save_level": "auto"
    }


def test_rows_that_come_late_and_launches_are_told_apart():
    found = diagnosis(fold(*steps(data=0.15, other=0.2)), CONFIG)
    assert found.text == (
        "Data-bound: the GPU waits 15 % of the time while rows are put together; further waits: "
        "launches and the rest 5 %."
    )
    assert found.offer is None
    launches = diagnosis(fold(*steps(other=0.2)), CONFIG.with_values({"train.micro_batch_size": 2}))
    assert launches.offer.changes == {
        "train.micro_batch_size": "auto"
    } and launches.text.startswith("The GPU waits 20 %")


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_a_sentence_and_offers_load(cause):
    exposed = {"other": 0.3} if cause == "data" else {cause: 0.3}
    for device in ("cuda", "cpu"):
        snapshot = fold(*steps(data=0.3 if cause == "data" else 0.0, **exposed), device=device)
        for config in (
            None,
            CONFIG,
            CONFIG.with_values({"train.steps": None, "train.batch_size": 1 << 20}),
        ):
            found = diagnosis(snapshot, config)
            assert found.text.endswith(".") and found.advice.endswith(".") and cause in PARTS
            assert config is not None or found.offer is None
            if found.offer is not None:
                config.with_values(found.offer.changes)
    assert diagnosis(fold(*steps(**exposed)), CONFIG).to_dict()["tone"] == "warn"


def test_what_is_said_of_a_run_needs_neither_gradio_nor_plotly():
    code = (
        "import sys, app.pages.checker, app.view.headline, app.view.run_words, "
        "app.view.run_watch\nprint(sorted({'gradio', 'plotly', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROGRAM_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

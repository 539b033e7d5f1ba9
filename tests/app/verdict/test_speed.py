"""The verdict says what a run's time goes to, and what could be changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.verdict.speed import CAUSES, FEWEST_STEPS, of_speed, slow_text
from app.verdict.step_shares import PART_LABELS
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import (
    CheckpointWritten,
    EvalFinished,
    FitReported,
    MemorySampled,
    RunStarted,
    StateChanged,
    StepFinished,
)
from tests.support import folded
from tests.support.synthetic_run import records

CONFIG = TrainConfig.from_dict(
    {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"batch_size": 16, "steps": 101}}
)


def fold(*events, device="cuda", total=100):
    return folded.fold(
        records([RunStarted(device=device, total_steps=total), StateChanged("running"), *events])
    )


def steps(count=30, data=0.0, seconds=1.0, **exposed):
    return [
        StepFinished(step=k, seconds=seconds, exposed=exposed, data_seconds=data)
        for k in range(1, count + 1)
    ]


def test_compute_bound_is_said():
    found = of_speed(fold(*steps(h2d=0.03)), CONFIG)
    assert (found.text, found.tone) == ("The GPU is busy; 3 % of the time it waits.", "good")
    assert not found.advice
    assert found.offer is None
    assert "as 28 steps show" in found.evidence
    by_hand = of_speed(
        fold(*steps(h2d=0.03)), CONFIG.with_values({"engine.activation_checkpointing": "full"})
    )
    assert by_hand.offer.changes == {"engine.activation_checkpointing": "auto"}
    # Pages receive the form's names for the settings.
    assert "Activation checkpointing was set by hand" in by_hand.to_dict()["advice"]
    assert of_speed(fold(*steps(h2d=0.09))).tone == "good"


def test_only_clean_steps_count_and_few_say_nothing():
    assert of_speed(fold(*steps(29, h2d=0.5))) is None  # 20 steps are judged, of which 18 are clean
    slow = [StepFinished(step=k, seconds=60.0, exposed={"other": 50.0}) for k in (1, 2, 21)]
    rest = steps(40)
    seen = [*slow[:2], *rest[2:20], EvalFinished(step=20, loss=1.0), slow[2], *rest[21:]]
    assert of_speed(fold(*seen)).tone == "good"
    seen[20] = CheckpointWritten(step=20)
    assert of_speed(fold(*seen)).tone == "good"
    assert FEWEST_STEPS == 20


def test_an_alarm_lasts_ten_steps_longer():
    waits = [*steps(40, h2d=0.11)]
    calm = [StepFinished(step=k, seconds=1.0, exposed={"h2d": 0.05}) for k in range(41, 101)]
    assert of_speed(fold(*waits, *calm[:10])).is_alarm
    assert of_speed(fold(*waits, *calm[:19])).is_alarm
    assert not of_speed(fold(*waits, *calm[:30])).is_alarm


@pytest.mark.parametrize(
    "device, text, advice, tone",
    [
        (
            "cuda",
            "The GPU waits 18 % of the time for the CPU optimizer; other waits: weights in 4 %.",
            "More tokens a step would hide it",
            "warn",
        ),
        (
            "cpu",
            "The optimizer takes 18 % of the time, and on the CPU nothing computes beside it; "
            "other waits: weights in 4 %.",
            "More tokens a step would spread it",
            "calm",
        ),
    ],
)
def test_the_optimizer_holds_compute_up(device, text, advice, tone):
    found = of_speed(fold(*steps(optimizer=0.18, h2d=0.04, d2h=0.005), device=device), CONFIG)
    assert (found.text, found.tone) == (text, tone) and found.advice.startswith(advice)
    assert found.offer.changes == {"train.batch_size": 32, "train.steps": 51}
    assert found.offer.label == "32 rows a step instead of 16, 51 steps instead of 101"


def test_gpus_wait_for_each_other():
    found = of_speed(fold(*steps(exchange=0.3, h2d=0.02)), CONFIG)
    assert found.tone == "warn"
    assert found.text == (
        "The GPUs exchange weights and gradients: the GPU waits 30 % of the time for that; other "
        "waits: weights in 2 %."
    )
    assert found.offer.changes["train.batch_size"] == 32


def test_weights_and_gradients_late_on_the_bus():
    late = fold(*steps(h2d=0.2))
    assert (
        of_speed(late, CONFIG).text
        == "Weights arrive late: the GPU waits 20 % of the time for them."
    )
    by_hand = CONFIG.with_values({"engine.rounds": 4, "engine.slots": 2})
    assert of_speed(late, by_hand).offer.changes == {
        "engine.slots": "auto",
        "engine.rounds": "auto",
    }
    out = of_speed(
        fold(*steps(d2h=0.2)), CONFIG.with_values({"engine.activation_checkpointing": "offload"})
    )
    assert out.text.startswith("Gradients leave late")
    assert out.offer.changes == {"engine.activation_checkpointing": "auto"}


def test_rows_that_come_late_and_launches_are_told_apart():
    found = of_speed(fold(*steps(data=0.15, other=0.2)), CONFIG)
    assert found.text == (
        "The GPU waits 15 % of the time for rows of the data; other waits: "
        "launches and the rest 5 %."
    )
    assert found.offer is None
    launches = of_speed(fold(*steps(other=0.2)), CONFIG.with_values({"train.micro_batch_size": 2}))
    assert launches.offer.changes == {"train.micro_batch_size": "auto"}
    assert launches.text.startswith("The GPU waits 20 %")


@pytest.mark.parametrize(
    "time, is_slow",
    [
        ({"step_seconds": 0.7, "estimated": False}, True),
        ({"step_seconds": 0.9, "estimated": False}, False),
        ({"step_seconds": 0.7, "estimated": True}, False),
        ({"step_seconds": None, "estimated": False}, False),
    ],
)
def test_steps_are_slow_against_a_prediction_from_measured_rates_alone(time, is_slow):
    for device in ("cuda", "cpu"):
        seen = fold(FitReported({"time": time}), *steps(optimizer=0.05), device=device)
        found = of_speed(seen, CONFIG)
        assert found.is_alarm == is_slow
        assert slow_text(seen) == (found.text if is_slow else "")
        if is_slow:
            assert (
                found.text
                == "1.4× slower than predicted: other programs may have used this machine."
            )


@pytest.mark.parametrize(
    "shares, known",
    [
        ([0.9, 0.4, 0.5], "45 % of the CPU went to other programs"),  # the first is of older steps
        ([0.9, 0.02, 0.04], "no other program used much of the CPU"),
        ([0.9, 0.3, -1.0], "30 % of the CPU went to other programs"),
        ([0.9, -1.0, -1.0], "other programs may have used this machine"),
    ],
)
def test_a_slow_run_says_what_is_known_of_other_programs(shares, known):
    before, *latest = (
        MemorySampled(step=step, cpu_others=share) for step, share in zip((10, 50, 90), shares)
    )
    fit, all_steps = FitReported({"time": {"step_seconds": 0.5}}), steps(90, optimizer=0.3)
    seen = fold(fit, *all_steps[:10], before, *all_steps[10:], *latest, device="cpu")
    # What its time goes to on the CPU is no reason for it.
    assert of_speed(seen, CONFIG).text == f"2.0× slower than predicted: {known}."


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
            found = of_speed(snapshot, config)
            assert found.text.endswith(".")
            assert found.advice.endswith(".")
            assert cause in PART_LABELS
            assert found.evidence.endswith(".") and (config is not None or found.offer is None)
            if found.offer is not None:
                config.with_values(found.offer.changes)


def test_what_is_said_of_a_run_needs_neither_gradio_nor_plotly():
    code = (
        "import sys, app.pages.new.checker, app.verdict.judge, app.pages.run.run_overview, "
        "app.pages.run.run_watch\nprint(sorted({'gradio', 'plotly', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROGRAM_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from engine.config.settings import OptimConfig
from engine.errors import ConfigError
from engine.training.loop.lr_schedule import fitting_warm_up, learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 40, 60])
@pytest.mark.parametrize("total", [1, 40])
def test_equals_what_a_transformers_trainer_uses_for_every_step(schedule, warmup, total):
    config = OptimConfig(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    for step in range(1, total + 1):
        assert learning_rate(config, step, total) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12, abs=0
        )
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("least", [0.0, 1e-5, 3e-4])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "warmup_stable_decay"])
def test_rates_fall_to_the_least_rate_as_those_of_a_transformers_trainer(schedule, warmup, least):
    total, decay, peak = 40, 9, 3e-4
    config = OptimConfig(
        learning_rate=peak,
        schedule=schedule,
        warmup_steps=warmup,
        min_learning_rate=least,
        decay_steps=decay,
    )
    config.check()
    name, more = {
        "cosine": ("cosine_with_min_lr", {"min_lr": least}),
        "linear": ("polynomial", {"lr_end": least * (1 - 1e-15), "power": 1.0}),  # below the peak
        "warmup_stable_decay": (schedule, {"num_decay_steps": decay, "min_lr_ratio": least / peak}),
    }[schedule]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=more,
    )
    for step in range(1, total + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, step, total) == pytest.approx(expected, rel=1e-12, abs=0)
        optimizer.step()
        scheduler.step()


def test_a_rate_that_stays_falls_in_the_last_tenth():
    config = OptimConfig(learning_rate=1.0, schedule="warmup_stable_decay", warmup_steps=2)
    rates = [learning_rate(config, step, 40) for step in range(1, 41)]
    assert rates[:3] == [0.0, 0.5, 1.0] and set(rates[2:37]) == {1.0}
    assert rates[37:] == pytest.approx([0.853553, 0.5, 0.146447], abs=1e-6)


@pytest.mark.parametrize(
    "values, field",
    [
        ({"min_learning_rate": 1e-3, "learning_rate": 1e-4}, "train.min_learning_rate"),
        ({"min_learning_rate": -1e-5}, "train.min_learning_rate"),
        ({"min_learning_rate": float("nan")}, "train.min_learning_rate"),
    ],
)
def test_rates_that_cannot_be_are_refused(values, field):
    with pytest.raises(ConfigError) as error:
        OptimConfig(**values).check()
    assert error.value.field == field


def test_first_step_of_a_warm_up_has_rate_zero_and_the_peak_comes_after_it():
    config = OptimConfig(learning_rate=1e-3, schedule="linear", warmup_steps=4)
    assert [learning_rate(config, step, 8) for step in (1, 3, 5, 8)] == pytest.approx(
        [0, 5e-4, 1e-3, 2.5e-4]
    )


@pytest.mark.parametrize("total, taken", [(8, 4), (9, 4), (1, 0), (200, 10)])
def test_a_warm_up_takes_half_of_the_steps_at_most_and_that_is_said(total, taken):
    fitting, warning = fitting_warm_up(OptimConfig(warmup_steps=10), total)
    assert fitting.warmup_steps == taken
    expected = f"train.warmup_steps 10 is more than half of the {total} steps, so {taken} are used."
    assert warning == ("" if taken == 10 else expected)

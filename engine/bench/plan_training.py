"""A training of `launch.py bench` is planned as a run would be."""

from __future__ import annotations

from dataclasses import replace

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.fit.choose import choose
from engine.fit.cost import MicroBatch
from engine.fit.job import Job, Target, numbers_of_ranks
from engine.fit.planner import Chosen
from engine.fit.predict import predicted_seconds
from engine.machine.device import gpu_count
from engine.machine.read_machine import Machine


def plan_training(job: Job, target: Target, machine: Machine) -> Chosen:
    """Returns the plan of a job on as many ranks as its settings ask for; with `auto`, on those
    that are fastest. Raises ConfigError where the machine does not have so many, and FitError
    where none fits.
    """
    numbers = numbers_of_ranks(job.config, gpu_count(job.config, machine), {})
    plans = [choose(replace(job, ranks=ranks), target) for ranks in numbers]
    return min(plans, key=lambda chosen: planned_seconds(chosen, job, target))


def refuse_other_trainings(config: TrainConfig) -> None:
    """Raises ConfigError for a training that `bench` does not measure."""
    if config.train.method != "full":
        raise ConfigError(
            "train.method",
            f"bench trains whole models on random tokens, not with {config.train.method}; set it "
            "to full.",
        )
    if config.preference.objective != "sft":
        raise ConfigError(
            "preference.objective",
            f"bench trains on random tokens, not with {config.preference.objective}; set it to "
            "sft.",
        )


def planned_seconds(chosen: Chosen, job: Job, target: Target) -> float:
    """Returns the predicted time of a step."""
    assert target.rates is not None  # a bench has measured them
    micro_batch = MicroBatch(chosen.micro_batch_size, job.row_length)
    return predicted_seconds(job.shape, chosen.choices, target.rates, micro_batch, target.device)

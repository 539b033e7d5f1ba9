"""The plan of a training of `launch.py bench`, made as for a run, and its random rows."""

from __future__ import annotations

from dataclasses import replace

from engine.config.settings import TrainConfig
from engine.data.batches.rows import MicroBatch as RandomRows
from engine.data.batches.rows import micro_batch_bounds
from engine.machine.device import device_of, gpu_count
from engine.machine.disk_rates import with_disk
from engine.machine.read_machine import Machine
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.job import Job, Target, numbers_of_ranks
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.requirements import (
    RUNTIME_GROWTH_BYTES,
    Requirements,
    Resident,
    SessionFacts,
)
from engine.planning.fit.simulate_step import predicted_seconds, rates_of_steps
from engine.planning.shape.model_shape import ModelShape
from engine.tools.bench.random_pairs import AnswersOfSteps, random_answers
from engine.tools.bench.steps import random_rows


def plan_training(job: Job, target: Target, machine: Machine) -> Chosen:
    """Returns the plan of a job on the number of ranks that its settings ask for; with `auto`, on
    those that are fastest by prediction, whether they fit or not. Raises ConfigError where the
    machine does not have them.
    """
    numbers = numbers_of_ranks(job.config, gpu_count(job.config, machine), {})
    plans = [choose(replace(job, ranks=ranks), target) for ranks in numbers]
    return min(plans, key=lambda chosen: planned_seconds(chosen, job, target))


def rows_of_step(
    config: TrainConfig, chosen: Chosen, shape: ModelShape
) -> tuple[AnswersOfSteps | None, list[RandomRows]]:
    """Returns the micro-batches of every step, and the answers that are compared in them; None
    where none are.
    """
    rows, size, length = config.train.batch_size, chosen.micro_batch_size, config.data.max_seq_len
    if not config.objective.is_preference:
        sizes = [stop - start for start, stop in micro_batch_bounds(rows, size)]
        return None, random_rows(sizes, length, shape.vocab_size)
    found = random_answers(config.objective, rows, length, shape.vocab_size)
    answers = AnswersOfSteps(found, size)
    return answers, answers.batches()


def planned_rows(chosen: Chosen, job: Job) -> MicroBatch:
    """Returns the micro-batches of a step, which have full rows of one document."""
    rows = MicroBatch(chosen.micro_batch_size, job.row_length)
    return rows.learning(job.config.objective, chosen.loss_chunk)


def planned_seconds(chosen: Chosen, job: Job, target: Target) -> float:
    """Returns the predicted time of a step."""
    assert target.rates is not None  # a bench has measured them
    rows = planned_rows(chosen, job)
    return predicted_seconds(job.shape, chosen.choices, target.rates, rows, target.device)


def reported_seconds(chosen: Chosen, job: Job, target: Target) -> float | None:
    """Returns the predicted time of a step as a run reports it; None on the CPU in bf16, where
    products are not measured.
    """
    row_length = job.row_length
    size = chosen.micro_batch_size
    rates = rates_of_steps(job.shape, size, target.rates, row_length, target.device)
    if rates is None:
        return None
    return planned_seconds(chosen, job, replace(target, rates=with_disk(rates, job.config)))


def predicted_host_bytes(chosen: Chosen, job: Job, machine: Machine, resident: int) -> int:
    """Returns the RAM of all processes of a training, as the fit report predicts it for a run.
    resident: bytes that this one had before the planes were filled.
    """
    device = device_of(job.config, machine)
    facts = SessionFacts(resident=Resident(resident, RUNTIME_GROWTH_BYTES[device]))
    items = Requirements(job.config, machine, job.shape, chosen, facts).parts[PartName.HOST].items
    return sum(
        item.bytes
        for item in items
        if item.kind.is_there_in_training and item.kind != MemoryItem.STAGING_BUFFERS
    )

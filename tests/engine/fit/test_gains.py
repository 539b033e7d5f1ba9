"""What more GPU memory or RAM would be worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.fit.gains import FURTHER_GIB, gains, gains_in_words
from engine.fit.memory_items import PartName
from engine.fit.needs import needs_of
from engine.machine.known_machines import named_machine
from engine.model.catalog import entry_of
from engine.words import GIB


def job(model: str, rows: int) -> tuple[TrainConfig, object]:
    config = TrainConfig.from_dict(
        {
            "model": {"source": model},
            "data": {"source": "d", "max_seq_len": 1024},
            "train": {"batch_size": rows},
        }
    )
    return config, entry_of(model).shape("bfloat16")


def test_further_memory_saves_what_the_planner_makes_of_it():
    config, shape = job("Qwen/Qwen2.5-7B", 16)
    machine = named_machine("H100 SXM", 128)
    found = gains(config, machine, shape)
    assert found[PartName.GPU] > 0
    card = replace(machine.gpus[0], free=machine.gpus[0].free + FURTHER_GIB * GIB)
    now = needs_of(config, machine, shape).step_seconds
    then = needs_of(config, replace(machine, gpus=(card,)), shape).step_seconds
    assert now - FURTHER_GIB * found[PartName.GPU] == pytest.approx(then)
    words = gains_in_words(found)
    assert words.startswith("Of a step, each further GiB, up to 8, would save: GPU memory about ")


def test_a_model_that_lives_on_the_card_gains_nothing():
    config, shape = job("Qwen/Qwen2.5-0.5B", 16)
    found = gains(config, named_machine("H200", 256), shape)
    assert set(found.values()) == {0.0}
    assert gains_in_words(found) == "More GPU memory or RAM would not make a step shorter."


def test_without_a_gpu_nothing_is_said():
    config, shape = job("Qwen/Qwen2.5-0.5B", 16)
    machine = replace(named_machine("H200", 256), gpus=())
    assert gains(config, machine, shape) == {} and gains_in_words({}) == ""

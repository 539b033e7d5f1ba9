"""What it costs a step that units live where they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.machine import disk_rates
from engine.machine.device import rates_of
from engine.machine.disk_rates import DRAINED_BYTES, DiskRates, with_disk
from engine.machine.known_machines import named_machine
from engine.machine.read_machine import Machine
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool import units_by_place
from engine.planning.fit.pool_costs import Cost, Costs, Work, cost_text, costs_of, roughly
from engine.planning.fit.requirements import NOTHING_MORE, Requirements, requirements_of
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.planning.shape.catalog import entry_of
from engine.planning.shape.model_shape import ModelShape

pytestmark = pytest.mark.computing


def job(model: str, rows: int, **changes: object) -> tuple[TrainConfig, ModelShape]:
    config = TrainConfig.from_dict(
        {
            "model": {"source": model},
            "data": {"source": "d", "max_seq_len": 1024},
            "train": {"batch_size": rows},
        }
    )
    shape = entry_of(model).shape("bfloat16")
    return config.with_values(
        {name.replace("__", "."): value for name, value in changes.items()}
    ), shape


JOBS = {
    "split": (job("Qwen/Qwen2.5-7B", 16), named_machine("H100 SXM", 256)),
    "in RAM": (job("Qwen/Qwen2.5-7B", 16, engine__states="host"), named_machine("H100 SXM", 256)),
    "gradients on the GPU": (
        job("Qwen/Qwen2.5-7B", 16, engine__gradients="gpu"),
        named_machine("H200", 256),
    ),
    "small card": (job("Qwen/Qwen2.5-7B", 32), named_machine("RTX 4090", 128)),
    "disk": (job("Qwen/Qwen2.5-7B", 16, engine__disk="/disk"), named_machine("RTX 4090", 64)),
    "whole": (job("Qwen/Qwen2.5-0.5B", 16), named_machine("H200", 256)),
}


def planned(name: str) -> tuple[TrainConfig, Machine, ModelShape, Requirements]:
    (config, shape), machine = JOBS[name]
    return config, machine, shape, requirements_of(config, machine, shape, coarse=True)


@pytest.mark.parametrize("name", JOBS)
def test_what_is_waited_for_is_all_that_compute_waits(name):
    config, machine, shape, requirements = planned(name)
    costs = costs_of(requirements.chosen, config, machine, shape)
    rates = rates_of(config, machine)
    _, timing = predicted_step(
        shape, requirements.chosen.choices, rates, requirements.micro_batch, "cuda"
    )
    assert costs.step_seconds == timing.seconds == requirements.step_seconds
    waited = sum(cost.waited_seconds for _, cost in costs.by_units)
    assert waited == pytest.approx(timing.exposed, abs=1e-6 * timing.seconds)


@pytest.mark.parametrize("name", JOBS)
def test_the_work_of_all_units_is_what_lanes_are_busy_with(name):
    config, machine, shape, requirements = planned(name)
    costs = costs_of(requirements.chosen, config, machine, shape)
    rates = rates_of(config, machine)
    _, timing = predicted_step(
        shape, requirements.chosen.choices, rates, requirements.micro_batch, "cuda"
    )
    total = costs.of([units for units, _ in costs.by_units]).busy
    lanes = timing.busy
    assert total[Work.HOST_OPTIMIZER] == pytest.approx(lanes[Lane.HOST])
    assert total[Work.DISK] == pytest.approx(lanes.get(Lane.READ, 0) + lanes.get(Lane.WRITE, 0))
    assert bool(total[Work.DISK]) is (name == "disk")
    copied = lanes[Lane.H2D] + lanes[Lane.D2H] + lanes[Lane.STATES_IN]
    copied += lanes[Lane.STATES_OUT] + lanes[Lane.GRADIENTS_OUT]
    bus = total[Work.TO_GPU] + total[Work.TO_HOST] + total[Work.BLOCK_INPUTS]
    assert bus == pytest.approx(copied)
    assert [units for units, _ in costs.by_units] == units_by_place(
        len(shape.units), requirements.chosen.choices
    )


def test_units_that_live_on_the_gpu_are_not_moved():
    config, machine, shape, requirements = planned("split")
    costs = costs_of(requirements.chosen, config, machine, shape)
    units, cost = costs.by_units[0]
    assert units.placement.weights == PartName.GPU
    assert cost.busy[Work.GPU_OPTIMIZER] > 0
    assert cost.busy[Work.TO_GPU] == cost.busy[Work.TO_HOST] == cost.busy[Work.HOST_OPTIMIZER] == 0
    in_ram = costs.of([each for each, _ in costs.by_units[1:]])
    assert in_ram.busy[Work.TO_GPU] > 0 and in_ram.busy[Work.HOST_OPTIMIZER] > 0


def test_the_disk_costs_what_its_rates_say_and_only_units_with_moments_there(monkeypatch):
    config, machine, shape, requirements = planned("disk")
    assumed = costs_of(requirements.chosen, config, machine, shape)
    for units, cost in assumed.by_units:
        is_there = units.placement.moments == PartName.DISK
        assert bool(cost.busy[Work.DISK]) is is_there
        assert is_there or not cost.waited[Work.DISK]
        assert ("disk reads and writes" in cost_text(cost, assumed.step_seconds)) is is_there
    every = [units for units, _ in assumed.by_units]
    waited = assumed.of(every).waited
    assert max(waited, key=waited.get) == Work.DISK
    coarse = DiskRates(4e9, 4e9, DRAINED_BYTES)
    rates = with_disk(rates_of(config, machine), config)
    monkeypatch.setattr(disk_rates, "disk_rates_of", lambda config: coarse)
    measured = costs_of(requirements.chosen, config, machine, shape)
    ratio = coarse.write / rates.disk_write
    assert measured.of(every).busy[Work.DISK] == pytest.approx(
        assumed.of(every).busy[Work.DISK] / ratio, rel=0.05
    )


def test_nothing_is_said_without_rates_or_without_a_gpu():
    config, machine, shape, requirements = planned("whole")
    unknown = replace(machine, gpus=(replace(machine.gpus[0], name="Unknown card"),))
    assert costs_of(requirements.chosen, config, unknown, shape) is None
    cpu = config.with_values({"engine.device": "cpu"})
    chosen = requirements_of(cpu, machine, shape).chosen
    assert costs_of(chosen, cpu, machine, shape, NOTHING_MORE) is None


def test_costs_in_words_leave_out_what_is_hardly_anything():
    none = dict.fromkeys(Work, 0.0)
    busy = none | {Work.TO_GPU: 0.3, Work.TO_HOST: 0.12, Work.HOST_OPTIMIZER: 0.314}
    cost = Cost(busy, none | {Work.TO_GPU: 0.1, Work.HOST_OPTIMIZER: 0.021})
    words = "bus 0.42 s, optimizer on the host 0.31 s, 0.12 s of it waited for"
    assert cost_text(cost, 2.0) == words
    assert cost_text(Cost(none | {Work.GPU_OPTIMIZER: 1e-5}, none), 2.0) == ""
    assert [roughly(each) for each in (0.0337, 1.0, 1.26, 12.4, 128.0)] == [
        "0.034 s",
        "1 s",
        "1.3 s",
        "12 s",
        "130 s",
    ]
    units = units_by_place(4, PlanChoices())
    told = Costs(2.0, ((units[0], cost),)).to_dict()
    assert told[0]["units"] == "the whole model" and told[0]["waited"] == pytest.approx(0.121)
    assert told[0]["busy"] == {"to_gpu": 0.3, "to_host": 0.12, "host_optimizer": 0.314}

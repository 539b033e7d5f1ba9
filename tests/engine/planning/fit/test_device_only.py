"""On a GPU, only the GPU updates the matrices that an optimizer orthogonalizes: in no plan does the
host update one, so that a run which is resumed with another plan continues bit for bit.
"""

from __future__ import annotations

import pytest

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine
from engine.machine.rates import TYPICAL
from engine.planning.fit.buffer_sizes import device_matrix_bytes, host_matrix_bytes
from engine.planning.fit.cost_model import Cost, MicroBatch
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.optimizer_placement import place_optimizers
from engine.planning.fit.requirements import (
    FitStatus,
    Requirements,
    SessionFacts,
    requirements_of,
)
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.catalog import entry_of
from engine.planning.shape.model_shape import ModelShape

LARGE, SMALL = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B"


def config(model: str, rows: int, **changes: object) -> TrainConfig:
    base = {
        "model": {"source": model},
        "data": {"source": "d", "max_seq_len": 1024},
        "train": {"batch_size": rows, "optimizer": "muon"},
    }
    return TrainConfig.from_dict(base).with_values(
        {name.replace("__", "."): value for name, value in changes.items()}
    )


def shape_of(settings: TrainConfig) -> ModelShape:
    shape = entry_of(settings.model.source).shape("bfloat16", adapters=settings.train.parts)
    return shape.with_optimizer("muon")


def planned(
    settings: TrainConfig, card: str, coarse: bool = False, **facts: object
) -> Requirements:
    machine = named_machine(card, 256)
    return requirements_of(settings, machine, shape_of(settings), SessionFacts(**facts), coarse)


def fits(found: Requirements) -> bool:
    return found.status() != FitStatus.DOES_NOT_FIT


def updated_on_host(shape: ModelShape, choices: PlanChoices) -> set[str]:
    """Returns the blocks that the host updates."""
    blocks = [unit.name for unit in shape.blocks]
    there = {*choices.updates.device_updated_units, *choices.placement.gpu_resident(blocks)}
    return {*blocks} - there


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("model", "card", "rows", "changes"),
    [
        (LARGE, "RTX 4090", 32, {}),
        (LARGE, "RTX 4090", 32, {"engine__states": "host"}),
        (LARGE, "RTX 4090", 32, {"train__method": "lora"}),
        (LARGE, "RTX 3060", 4, {}),
        (LARGE, "H200", 64, {}),
        (SMALL, "RTX 4090", 32, {}),
        (SMALL, "H200", 32, {}),
    ],
)
def test_the_host_updates_no_block(model, card, rows, changes, coarse):
    found = planned(config(model, rows, **changes), card, coarse)
    assert fits(found) and not updated_on_host(found.shape, found.chosen.choices)
    assert MemoryItem.UPDATED_MATRIX not in {each.kind for each in found.parts[PartName.HOST].items}


@pytest.mark.parametrize("gib", [100, 40, 24])
def test_a_resumed_run_keeps_its_blocks_on_the_device(gib):
    before = planned(config(LARGE, 16, train__micro_batch_size=4), "H200").chosen
    settings = config(LARGE, 16, train__micro_batch_size=4, engine__gpu_memory_gib=gib)
    found = planned(settings, "H200", rounding=before.rounding)
    assert fits(found) and found.chosen.rounding == before.rounding
    assert found.chosen.choices.placement != before.choices.placement
    assert not updated_on_host(found.shape, found.chosen.choices)


@pytest.mark.parametrize(("card", "rows"), [("RTX 4090", 32), ("H200", 64)])
def test_a_table_tells_about_the_seconds_of_the_plan(card, rows):
    settings = config(LARGE, rows)
    exact = planned(settings, card).step_seconds
    assert planned(settings, card, coarse=True).step_seconds == pytest.approx(exact, rel=0.1)


def test_where_no_block_can_be_updated_on_the_device_the_job_does_not_fit():
    adamw = config(LARGE, 4, engine__gpu_memory_gib=10.5, train__optimizer="adamw")
    assert fits(planned(adamw, "RTX 4090"))
    found = planned(config(LARGE, 4, engine__gpu_memory_gib=10.5), "RTX 4090")
    assert found.parts[PartName.GPU].status == FitStatus.DOES_NOT_FIT
    assert not updated_on_host(found.shape, found.chosen.choices)


def test_the_device_updates_them_even_where_the_host_would_be_faster():
    shape = shape_of(config(SMALL, 4))
    cost = Cost(shape, TYPICAL["cuda"], MicroBatch(1, 1024), compiled=False)
    cost.on_host = lambda *_: 0.0
    choices = PlanChoices().changed(update_buffers=1)
    assert set(place_optimizers(cost, choices).units) == {unit.name for unit in shape.blocks}
    assert place_optimizers(cost, choices.changed(update_buffers=0), "cpu").units == ()


def test_a_matrix_takes_memory_where_it_is_updated():
    shape = shape_of(config(LARGE, 4))
    small, large = 3584, 18944
    assert device_matrix_bytes(shape) == 6 * small * large + 4 * small**2
    assert host_matrix_bytes(shape, "cuda") == 0
    assert host_matrix_bytes(shape, "cpu") == 10 * small * large + 36 * (1 << 22)
    found = planned(config(LARGE, 4, engine__device="cpu"), "H200")
    items = {each.kind: each.bytes for each in found.parts[PartName.HOST].items}
    assert items[MemoryItem.UPDATED_MATRIX] == host_matrix_bytes(shape, "cpu")

"""Every unit lives somewhere, and what the pool holds is what the report's items say."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine, with_figures
from engine.machine.read_machine import Machine
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.fill_memory import Candidate, MemoryFiller
from engine.planning.fit.memory_items import Item, MemoryItem, PartName
from engine.planning.fit.pool import (
    Held,
    Pool,
    held_by,
    pool_of,
    together_text,
    units_by_place,
    units_text,
)
from engine.planning.fit.report import estimate, with_times
from engine.planning.fit.requirements import NOTHING_MORE, Requirements, requirements_of
from engine.planning.fit.suggestions import moves_text
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import FetchStates, MainGrad, Prefetch, Update, UpdateInPlace
from engine.planning.shape.catalog import entry_of

pytestmark = pytest.mark.computing

QWEN, MIDDLE, SMALL = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-0.5B"
GPU, HOST, DISK = PartName.GPU, PartName.HOST, PartName.DISK


def job(model: str = QWEN, rows: int = 16, **changes: object) -> TrainConfig:
    config = TrainConfig.from_dict(
        {"model": {"source": model}, "data": {"source": "d"}, "train": {"batch_size": rows}}
    )
    return config.with_values({name.replace("__", "."): value for name, value in changes.items()})


def requirements(config: TrainConfig, machine: Machine) -> Requirements:
    shape = entry_of(config.model.source).shape(config.model.dtype)
    return requirements_of(config, machine, shape, coarse=True)


def machine(name: str, ram: int) -> Machine:
    return with_figures(named_machine(name, ram), disk_gib=4096)


JOBS = {
    "split": (job(), machine("H100 SXM", 256)),
    "whole": (job(SMALL), machine("H200", 256)),
    "in RAM": (job(engine__states="host"), machine("H100 SXM", 256)),
    "gradients on the GPU": (job(engine__gradients="gpu"), machine("RTX 4090", 128)),
    "rounds": (job(rows=128, engine__gradients="gpu"), machine("H100 SXM", 256)),
    "whole, rounds": (job(MIDDLE, rows=128), machine("H200", 256)),
    "short": (job(), machine("RTX 4090", 48)),
    "8 bits": (job(train__optimizer="adamw_8bit"), machine("RTX 4090", 64)),
    "float32": (job(model__dtype="float32"), machine("H100 SXM", 256)),
    "tied": (job(SMALL, engine__states="host"), machine("RTX 4090", 32)),
    "cpu": (job(SMALL, engine__device="cpu"), machine("RTX 4090", 64)),
}


def items_held(items: tuple[Item, ...], held: Held) -> int:
    return sum(item.bytes for item in items if held_by(item.kind) == held)


@pytest.mark.parametrize("name", JOBS)
def test_each_part_holds_what_the_items_of_the_report_add_up_to(name):
    found = requirements(*JOBS[name])
    pool = pool_of(found)
    assert [part.name for part in pool.parts] == [p for p in (GPU, HOST, DISK) if p in found.parts]
    for part in pool.parts:
        items = found.parts[part.name].items
        assert (part.total, part.limit) == (
            found.parts[part.name].total,
            found.parts[part.name].limit,
        )
        assert all(share.bytes > 0 for share in part.shares)
        for held in (Held.COPY, Held.FILES, Held.PROGRAM):
            assert part.held(held) == items_held(items, held)
        assert part.free == found.parts[part.name].known_limit - part.total
    ram = next(part for part in pool.parts if part.name == HOST)
    assert ram.held(Held.MODEL) == items_held(found.parts[HOST].items, Held.MODEL)


@pytest.mark.parametrize("name", JOBS)
def test_every_unit_is_in_one_place_by_plane(name):
    found = requirements(*JOBS[name])
    pool = pool_of(found)
    count = len(found.shape.units)
    assert [unit for each in pool.units for unit in each.numbers] == [*range(count)]
    by_unit = [each.placement for each in pool.units for _ in each.numbers]
    choices = found.chosen.choices
    for index, place in enumerate(by_unit):
        there = [place.planes_in(part) for part in PartName]
        assert sorted(sum(there, ())) == ["gradients", "moments", "weights"]
        assert (place.weights == GPU) == (index < choices.placement.gpu_resident_units)
    for one, other in zip(pool.units, pool.units[1:]):
        assert one.placement != other.placement, "neighbors alike are one"


@pytest.mark.parametrize("name", [name for name in JOBS if name != "cpu"])
def test_units_live_where_the_plan_uses_them(name):
    """What lives on the GPU is never fetched and is updated there. All else is fetched: its weights
    by themselves, or with its other states by an optimizer on the GPU.
    """
    found = requirements(*JOBS[name])
    shape, choices = found.shape, found.chosen.choices
    numel = {unit.name: unit.numel for unit in shape.units}
    sizes = PlaneSizes(numel=numel, embed_chunk=shape.embed_chunk, item_bytes=shape.item_bytes)
    blocks = [unit.name for unit in shape.blocks]
    plan = build_step_plan(blocks, shape.tied, choices, sizes)
    names = [unit.name for unit in shape.units]
    pool = pool_of(found)
    lives = {name for name, there in _by_name(names, pool) if there.weights == GPU}
    copied = {name for name, there in _by_name(names, pool) if there.is_copied}
    in_place = {op.unit for op in plan.ops if isinstance(op, UpdateInPlace)}
    fetched = [op.unit for op in plan.ops if isinstance(op, Prefetch)]
    states = {op.unit for op in plan.ops if isinstance(op, FetchStates)}
    assert lives == in_place and not lives & (states | set(fetched))
    assert lives | states | set(fetched) == set(names)
    assert all(fetched.count(name) <= 1 for name in copied)
    on_host = {op.unit for op in plan.ops if isinstance(op, Update)}
    assert sum(each.updated_on_gpu for each in pool.units) == len(names) - len(on_host)


def _by_name(names: list[str], pool: Pool) -> Iterator[tuple[str, object]]:
    for each in pool.units:
        for number in each.numbers:
            yield names[number], each.placement


def test_gradients_that_wait_in_the_memory_of_their_main_grads_take_none_of_their_own():
    found = requirements(*JOBS["whole, rounds"])
    choices = found.chosen.choices
    assert choices.gradients.main_grad == MainGrad.DEVICE
    assert choices.placement.gpu_resident_units == len(found.shape.units)
    planes = 12 * found.shape.gradient_numel
    assert pool_of(found).parts[0].held(Held.MODEL) == planes
    for name in ("rounds", "gradients on the GPU"):
        on_gpu = requirements(*JOBS[name])
        gradients = 2 * on_gpu.shape.gradient_numel
        assert pool_of(on_gpu).parts[0].held(Held.MODEL) == gradients


def test_a_border_that_moves_takes_its_bytes_along():
    """One more unit on the GPU takes from RAM what it took there."""
    config, on = JOBS["split"]
    found = requirements(config, on)
    shape = found.shape
    filler_choices = found.chosen.choices
    before, after = (_with_gpu_resident(found, count) for count in (3, 4))
    moved = [pool.parts[1].held(Held.MODEL) for pool in (before, after)]
    planes = 14 * shape.units[3].numel
    assert moved[0] - moved[1] == planes
    arrived = [pool.parts[0].held(Held.MODEL) for pool in (before, after)]
    assert arrived[1] - arrived[0] == planes
    assert filler_choices.gradients.main_grad == MainGrad.VERTICAL


def _with_gpu_resident(found: Requirements, count: int) -> Pool:
    choices = found.chosen.choices.changed(
        gpu_resident_units=count, device_updated_units=(), update_buffers=0
    )
    items = _items(found, Candidate(found.chosen.micro_batch_size, choices))
    chosen = Chosen(choices, found.chosen.micro_batch_size, 128, items, 0)
    return pool_of(Requirements(found.config, found.machine, found.shape, chosen, NOTHING_MORE))


def _items(found: Requirements, way: Candidate) -> tuple[Item, ...]:
    from engine.planning.fit.buffer_sizes import fixed_items

    return fixed_items(found.shape, way.choices, way.size * 1024 * found.shape.hidden_width)


# ---------------------------------------------------------------------- words


def test_units_are_named_from_embed_to_head():
    assert units_text(range(30), 30) == "the whole model"
    assert units_text(range(1), 30) == "embed"
    assert units_text(range(2), 30) == "embed and block 0"
    assert units_text(range(14), 30) == "embed and blocks 0 to 12"
    assert units_text(range(14, 30), 30) == "blocks 13 to 27 and head"
    assert units_text(range(28, 29), 30) == "block 27"
    assert units_text(range(29, 30), 30) == "head"
    assert units_text(range(1, 29), 30) == "blocks 0 to 27"
    assert units_text((0, 2, 4, 6), 30) == "embed and 3 of blocks 1 to 5"
    assert units_text((1, 3, 29), 30) == "2 of blocks 0 to 2 and head"


def test_neighbors_are_named_together():
    units = units_by_place(10, PlanChoices().changed(gpu_resident_units=3, blocks_kept_in_slots=2))
    words = ["embed and blocks 0 to 1", "blocks 2 to 5", "blocks 6 to 7", "head"]
    assert [each.words for each in units] == words
    assert together_text(units[1:]) == "blocks 2 to 7 and head"
    assert together_text([units[0], units[3]]) == "embed and blocks 0 to 1 and head"
    assert together_text([]) == ""


def test_where_optimizers_run_does_not_cut_a_range():
    device_updates = ("block 2", "block 4", "head")
    units = units_by_place(
        10,
        PlanChoices().changed(
            gpu_resident_units=3, device_updated_units=device_updates, update_buffers=4
        ),
    )
    assert [(each.words, each.updated_on_gpu) for each in units] == [
        ("embed and blocks 0 to 1", 3),
        ("blocks 2 to 7 and head", 3),
    ]


def test_every_kind_of_item_is_held_for_something():
    planes = {kind for kind in MemoryItem if held_by(kind) == Held.MODEL}
    assert MemoryItem.WEIGHT_HIGH in planes and MemoryItem.GPU_RESIDENT_UNITS in planes
    assert held_by(MemoryItem.KEPT_ACTIVATIONS) == Held.STEP
    assert held_by(MemoryItem.MAIN_GRADS) == Held.STEP
    assert held_by(MemoryItem.BLOCKS_KEPT_IN_SLOTS) == Held.COPY
    assert held_by(MemoryItem.STAGING_BUFFERS) == Held.FILES
    assert held_by(MemoryItem.RUNTIME) == held_by(MemoryItem.UNKNOWN) == Held.PROGRAM


def test_a_report_tells_of_its_pool_in_plain_data():
    config, on = JOBS["split"]
    report = estimate(config, on, entry_of(QWEN).shape("bfloat16"))
    found = json.loads(json.dumps(report.to_dict()))["pool"]
    assert list(found["parts"]) == ["gpu", "host", "disk"]
    for name, part in found["parts"].items():
        assert sum(share["bytes"] for share in part["shares"]) == getattr(report, name).total
    assert found["units"][0] | {"stop": 0, "count": 0, "units": ""} == {
        "units": "",
        "start": 0,
        "stop": 0,
        "count": 0,
        "weights": "gpu",
        "moments": "gpu",
        "gradient": "gpu",
        "copied": False,
        "updated_on_gpu": report.choices["gpu_resident_units"],
    }


def test_no_unit_lives_on_the_gpu_where_none_may(monkeypatch):
    monkeypatch.setattr(MemoryFiller, "_may_be_gpu_resident", lambda *_: False)
    pool = pool_of(requirements(*JOBS["split"]))
    assert not pool.living_in(GPU) and not pool.parts[0].held(Held.MODEL)


# ---------------------------------------------------------------------- suggestions move the border


def planned(choices: PlanChoices) -> Chosen:
    return Chosen(choices, 1, 128, (), 0)


def test_a_suggestion_says_how_the_border_moves():
    some, more = (
        PlanChoices().changed(gpu_resident_units=3),
        PlanChoices().changed(gpu_resident_units=14),
    )
    on_gpu = PlanChoices().changed(gradients_on_gpu=True)
    assert moves_text(some, planned(some), 30) == ""
    text = moves_text(some, planned(more), 30)
    assert text == "14 of 30 units then live on the GPU instead of 3."
    about = moves_text(None, planned(more), 30)
    assert about == "14 of 30 units then live on the GPU."
    assert moves_text(None, planned(on_gpu), 30) == "Gradients then wait on the GPU."
    back = moves_text(on_gpu, planned(PlanChoices().changed(gpu_resident_units=1)), 30)
    assert back == (
        "1 of 30 units then lives on the GPU instead of 0, and gradients then wait in RAM."
    )


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_settings_that_keep_all_in_ram_are_lifted_where_that_lacks():
    config = job(engine__states="host", engine__gradients="host")
    on = machine("H100 SXM", 98)
    shape = entry_of(QWEN).shape("bfloat16")
    report = with_times(estimate(config, on, shape), config, on, shape)
    suggestion = next(
        each for each in report.suggestions if each.changes == {"engine.states": "auto"}
    )
    assert suggestion.text.startswith(
        "Set engine.states to auto, so that units live on the GPU where it has room: "
    )
    lifted = requirements_of(config.with_values(suggestion.changes), on, shape)
    assert (
        f"{lifted.chosen.choices.placement.gpu_resident_units} of 30 units then live"
        in suggestion.places
    )
    assert suggestion.to_dict()["places"] == suggestion.places

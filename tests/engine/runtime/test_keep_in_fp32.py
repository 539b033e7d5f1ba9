"""Weights that transformers keeps in fp32 in a bf16 model: they are computed with in fp32, they are
counted to the byte, and any plan gives the same bits.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import fixed_items
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.shape.serialize import pack, unpack
from tests.support.bf16_parity import Bounds, Rows, compare_in_bf16
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.families import tiny_family_config
from tests.support.same_bits import BASE, DelayedBackend, assert_same_bits
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import plain_model, random_batches, streamed

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

KEEP = (
    "bailing_hybrid",
    "beam",
    "ernie4_5_moe",
    "flint",
    "hunyuan_v1_moe",
    "inkling_text",
    "olmo_hybrid",
)
"""Families with parameters that stay in fp32."""
PLANS = {
    "one slot": dict(slots=1, prefetch_depth=1),
    "three slots": dict(slots=3, prefetch_depth=2),
    "two resident": dict(blocks_kept_in_slots=2),
    "all kept": dict(blocks_without_recompute=3),
    "block inputs on the host": dict(offloaded_block_inputs=True),
}


def planes_after(choices: PlanChoices, backend=None, family="ernie4_5_moe") -> list[torch.Tensor]:
    """The planes after three steps in bf16, which are submitted without draining between them."""
    config = tiny_family_config(family, num_hidden_layers=3)
    run = streamed(plain_model(config), choices, backend=backend, dtype="bfloat16", config=config)
    assert any(layout.fp32_numel for layout in run.model.layouts)
    return run.planes_after(choices.batching.micro_batches, steps=3)


def test_any_plan_gives_the_same_bits():
    expected = planes_after(BASE)
    for name, changes in PLANS.items():
        assert_same_bits(planes_after(BASE.changed(**changes)), expected), name


@pytest.mark.parametrize("late", [(Lane.H2D,), (Lane.D2H, Lane.HOST), tuple(Lane)], ids=str)
def test_no_delay_changes_a_bit(late):
    assert_same_bits(planes_after(BASE, DelayedBackend(late)), planes_after(BASE))


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("device_updates", DEVICE_UPDATES)
def test_nor_do_buffers_where_the_optimizer_is_on_the_device(device_updates, resident):
    """The next forward pass fetches the new values, or finds them in the slot."""

    def run(buffers: int, late: tuple[Lane, ...] = ()) -> list[torch.Tensor]:
        choices = updated_on_device(
            DEVICE_UPDATES[device_updates], buffers, blocks_kept_in_slots=resident
        )
        return planes_after(choices, DelayedBackend(late))

    expected = run(1)
    assert_same_bits(run(3), expected)
    assert_same_bits(run(3, tuple(Lane)), expected)


@pytest.mark.parametrize("count", [2, 4])
def test_nor_does_where_units_live(count):
    """Also after their planes were filled anew, as from the best weights of a run."""
    config = tiny_family_config("ernie4_5_moe")
    found = []
    for choices in (BASE, BASE.changed(gpu_resident_units=count)):
        run = streamed(plain_model(config), choices, dtype="bfloat16", config=config)
        for step in (1, 2):
            run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
        run.engine.drain()
        for unit in run.model.blocks:
            for spec in unit.layout.parameters:
                if spec.keep_in_fp32:
                    run.host_states.parameters.write(
                        unit.name, spec.name, torch.full(spec.shape, 0.1001)
                    )
        losses = torch.tensor([run.engine.evaluate(random_batches(2, seed=9))])
        run.engine.train_step(3, random_batches(2, seed=3), 1e-2)
        run.engine.drain()
        found.append([losses, *run.kept_planes()])
        run.close()
    assert_same_bits(*found)


@pytest.mark.parametrize("resident", [0, 4])
@pytest.mark.parametrize("family", slow_but(KEEP, ("ernie4_5_moe", "flint"), FAMILY_SWEEP))
def test_the_device_has_the_masters_to_the_bit(family, resident):
    config = tiny_family_config(family)
    choices = PlanChoices().changed(micro_batches=1, blocks_kept_in_slots=resident)
    run = streamed(plain_model(config), choices, dtype="bfloat16", config=config)
    seen = 0
    for step in (1, 2):  # after the second step, the slots have the weights after the first
        before = {
            (unit.name, spec.name): run.host_states.parameters.master(unit.name, spec.name)
            for unit in run.model.blocks
            for spec in unit.layout.parameters
        }
        run.engine.train_step(step, random_batches(1, seed=step), 1e-2)
        run.engine.drain()
    for slot, names in run.engine.plan.slots.items():
        held = [name for name in names if slot_of(name) == slot] if resident else names
        for unit in (run.model.unit(name) for name in held if name.startswith("block")):
            for spec, parameter in zip(
                unit.layout.parameters, run.engine.templates.parameters(slot, unit)
            ):
                if spec.keep_in_fp32:
                    assert parameter.dtype == torch.float32
                    if resident:
                        assert torch.equal(parameter, before[unit.name, spec.name]), spec.name
                    seen += 1
                else:
                    assert parameter.dtype == torch.bfloat16
    assert seen
    run.close()


@pytest.mark.parametrize("family", slow_but(KEEP, ("ernie4_5_moe", "flint"), FAMILY_SWEEP))
def test_the_fit_report_counts_them_to_the_byte(family):
    config, tokens = tiny_family_config(family), 20
    choices = PlanChoices().changed(
        micro_batches=2, offloaded_block_inputs=True, blocks_kept_in_slots=1
    )
    run = streamed(plain_model(config), choices, dtype="bfloat16", tokens=tokens, config=config)
    shape = shape_of(run.model)
    shown = fixed_items(shape, choices, tokens * shape.hidden_size)
    assert run.engine.state.fixed_bytes() == sum(item.bytes for item in shown)
    plain = dataclasses.replace(
        shape, units=tuple(dataclasses.replace(unit, fp32_numel=0) for unit in shape.units)
    )
    less = fixed_items(plain, choices, tokens * shape.hidden_size)
    more = sum(a.bytes - b.bytes for a, b in zip(shown, less))
    held = run.engine.state.keep_in_fp32.values()
    assert more == sum(each.values.nbytes + each.low.nbytes for each in held) > 0
    assert run.host_states.ram.nbytes == shape.states.host_bytes == plain.states.host_bytes
    assert unpack(pack({"bfloat16": shape}), "bfloat16", "") == shape
    assert shape.in_dtype("float32").units == tuple(
        dataclasses.replace(unit, fp32_numel=0) for unit in shape.units
    )
    run.close()


def test_a_layout_says_where_they_are():
    specs = [
        ParameterSpec("a", "a", (3, 30), True),
        ParameterSpec("b", "b", (70,), False, keep_in_fp32=True),
        ParameterSpec("c", "c", (5,), True, keep_in_fp32=True),
    ]
    layout = lay_out("u", specs)  # a, c, b
    assert [(part.start, part.stop, part.place) for part in layout.fp32_parts] == [
        (128, 133, 0),
        (192, 262, 64),
    ]
    assert layout.fp32_numel == 64 + 128
    inside = [(part.start, part.stop, part.place) for part in layout.fp32_within(130, 200)]
    assert inside == [(130, 133, 2), (192, 200, 64)]
    assert layout.slot_bytes("bfloat16") == 2 * layout.numel + 6 * (64 + 128)


ROWS = Rows(count=2, length=12, loss_chunk=7)


TRAINED = ("beam", "ernie4_5_moe", "flint", "hunyuan_v1_moe", "olmo_hybrid")
"""The five steps of these families can be compared. In this tiny bailing_hybrid, the norm of plain
training in bf16 is 6 % off that in float32 by the fifth step. In inkling_text, the gradients of the
first step are 0.501 % apart, where the bound is 0.5 %.
"""


@pytest.mark.parametrize("family", slow_but(TRAINED, ("ernie4_5_moe", "olmo_hybrid"), FAMILY_SWEEP))
def test_training_in_bf16_is_that_of_plain_transformers(family):
    """Losses and norms of five steps, and the gradients of the first."""
    bounds = Bounds(norm=2e-2, update=0.15)
    compare_in_bf16(
        tiny_family_config(family), ROWS, PlanChoices().changed(micro_batches=2), bounds=bounds
    )

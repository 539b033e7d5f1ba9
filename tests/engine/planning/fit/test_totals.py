"""The total of a plan's device memory is that of its items, although parts of it are computed once
for many plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from engine.planning.fit.device_memory import DeviceMemory, Sizer
from engine.planning.fit.job import Job
from engine.planning.schedule.choices import GROUP_OF, EmbedAndHead, PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.text import GIB
from tests.support.chosen import big_shape, config

pytestmark = pytest.mark.computing

_IN_ROUNDS = PlanChoices().changed(micro_batches=4, rounds=4, main_grad=MainGrad.DEVICE)
_PARKED = PlanChoices().changed(gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT)
STARTS = (
    PlanChoices().changed(micro_batches=4),
    _IN_ROUNDS,
    _IN_ROUNDS.changed(gradients_on_gpu=True),
    _PARKED,
    _PARKED.changed(
        embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS, blocks_per_saved_input=2, slots=4
    ),
    PlanChoices().changed(
        blocks_without_recompute=12, device_updated_units=("head",), update_buffers=12
    ),
)
OTHERS = {
    "micro_batches": (4, 8),
    "ranks": (1, 2),
    "replicas": (1, 2),
    "nodes_per_replica": (1, 2),
    "unsharded_reads": (False, True),
    "rounds": (1, 2),
    "slots": (2, 5),
    "prefetch_depth": (1, 3),
    "blocks_kept_in_slots": (0, 1, 9, 28),
    "gpu_resident_units": (0, 1, 12, 30),
    "disk_offloaded_units": (0, 3),
    "disk_offloaded_block_inputs": (0, 2),
    "blocks_without_recompute": (0, 1, 2, 9, 28),
    "offloaded_block_inputs": (False, True),
    "gradients_on_gpu": (False, True),
    "embed_and_head": tuple(EmbedAndHead),
    "blocks_per_saved_input": (1, 2),
    "block_input_rings": (3, 5),
    "main_grad": tuple(MainGrad),
    "compiled": (False, True),
    "tile_tokens": (0, 4096),
    "attention_blocks": (0, 2),
    "attention_bytes": (0, 7280),
    "graphs": (False, True),
    "device_updated_units": ((), ("head",)),
    "update_buffers": (0, 8, 20),
    "update_chunks": (1, 7),
    "moments_after_weights": (False, True),
    "gpu_resident_apart": (False, True),
}


def check_totals(device, tied, together):
    """Changes so many choices at once, whatever they are, so that a total that was computed for one
    value of a choice and is taken for another would be found. Returns the number of plans.
    """
    assert OTHERS.keys() == GROUP_OF.keys()
    blocks = big_shape().units
    # No two blocks are alike, so that it matters which of them a buffer must hold.
    units = tuple(
        dataclasses.replace(unit, numel=unit.numel + 4096 * at) for at, unit in enumerate(blocks)
    )
    shape = dataclasses.replace(big_shape(), units=units, tied=tied)
    memory = DeviceMemory(device, 80 * GIB, 76 * GIB, 76 * GIB)
    sizer = Sizer(Job(shape, config(), 1024), memory, compiled=True)
    seen = 0
    for start, names in itertools.product(STARTS, itertools.combinations(OTHERS, together)):
        for values in itertools.product(*(OTHERS[name] for name in names)):
            choices = start.changed(**dict(zip(names, values)))
            if (
                choices.placement.blocks_kept_in_slots
                + max(0, choices.placement.gpu_resident_units - 1)
                > 28
            ):
                continue
            seen += 1
            for size in (1, 3):
                items = sizer.items(size, choices)
                assert sizer.total(size, choices) == sum(item.bytes for item in items), choices
    return seen


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_total_is_the_sum_of_the_items_whichever_choice_is_changed(device):
    assert check_totals(device, tied=False, together=1) > 400


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_total_is_the_sum_of_the_items_whatever_was_computed_before(device, tied):
    assert check_totals(device, tied, together=2) > 5000


def test_choices_are_changed_as_a_dataclass_is_replaced():
    pick = random.Random(5)
    choices = PlanChoices()
    for _ in range(100):
        name = pick.choice(list(OTHERS))
        value = pick.choice(OTHERS[name])
        before, group = choices, GROUP_OF[name]
        of_group = dataclasses.replace(getattr(choices, group), **{name: value})
        expected = dataclasses.replace(before, **{group: of_group})
        kept = dataclasses.asdict(before)
        choices = choices.changed(**{name: value})
        assert choices == expected and hash(choices) == hash(expected)
        assert dataclasses.asdict(before) == kept
    with pytest.raises(TypeError, match="kept_block"):
        choices.changed(kept_block=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choices.streaming.slots = 3

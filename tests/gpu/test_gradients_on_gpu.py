"""Kept gradients on lanes that run at once: the bits are those of a step with a plane of
gradients on the host, in any plan, whichever lane is late. Each test also runs without a GPU
(`tests.support.lanes`).
"""

from __future__ import annotations

import pytest

from engine.planning.schedule.ops import Lane
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.gradients_on_gpu import EMBED_AND_HEAD_FAMILIES, PLAN_FAMILIES, run
from tests.support.lanes import Lanes, find_missing_waits
from tests.support.same_bits import BASE, assert_same_bits, planes_after
from tests.support.sets import PLAN_SWEEP, slow_but

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("without a GPU it repeats tests/engine/runtime"),
]

ROUNDS = dict(micro_batches=4, rounds=2, main_grad="device")
SOME = dict(device_updated_units=DEVICE_UPDATES["some"], update_buffers=2)
PLANS = {
    "vertical": {},
    "rounds": ROUNDS,
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=2),
    "two kept": dict(blocks_without_recompute=2, slots=2, prefetch_depth=2),
    "some on the device": SOME,
    "all on the device": dict(device_updated_units=DEVICE_UPDATES["all"], update_buffers=3),
    "all at once": ROUNDS
    | SOME
    | dict(offloaded_block_inputs=True, blocks_kept_in_slots=1, blocks_without_recompute=1),
}
LATE = [
    (Lane.GRADIENTS_OUT,),
    (Lane.HOST,),
    (Lane.GRADIENTS_OUT, Lane.HOST),
    (Lane.COMPUTE, Lane.GRADIENTS_OUT),
    (Lane.H2D, Lane.D2H, Lane.GRADIENTS_OUT),
]
ON_GPU = dict(gradients_on_gpu=True)


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], ("float32",), PLAN_SWEEP))
@pytest.mark.parametrize("name", PLANS)
def test_the_bits_are_those_of_a_plane_on_the_host(lanes, name, dtype):
    choices = BASE.changed(**PLANS[name])
    expected = run(choices, backend=lanes(), dtype=dtype)
    families = [
        *PLAN_FAMILIES.values(),
        *(EMBED_AND_HEAD_FAMILIES.values() if choices.batching.rounds == 1 else ()),
    ]
    # Without a GPU, every plan family is compared in tests/engine/runtime.
    for plan_family in families if lanes is Lanes else families[-1:]:
        choices_of_family = choices.changed(**plan_family)
        assert_same_bits(run(choices_of_family, backend=lanes(), dtype=dtype), expected)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("name", ["vertical", "block inputs on the host", "all at once"])
def test_delays_on_the_way_to_the_host_change_nothing(lanes, monkeypatch, name, optimizer):
    # The matrices of a tiny model are kept in 8 bits.
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)
    choices = BASE.changed(**PLANS[name])
    expected = run(choices, backend=lanes(), optimizer=optimizer)
    choices_of_family = choices.changed(**PLAN_FAMILIES["both"])
    for slow in LATE:
        assert_same_bits(run(choices_of_family, backend=lanes(slow), optimizer=optimizer), expected)


@pytest.mark.parametrize("careless", [Lane.GRADIENTS_OUT, Lane.HOST])
def test_a_lane_that_does_not_wait_is_found(lanes, careless):
    """A gradient comes to a ring buffer that an update still reads, or an update reads it before it
    has come.
    """
    (slow,) = {Lane.GRADIENTS_OUT, Lane.HOST} - {careless}
    choices = BASE.changed(**ON_GPU)
    expected = planes_after(choices, lanes(), dtype="bfloat16")
    find_missing_waits(
        lambda: assert_same_bits(
            planes_after(choices, lanes((slow,), (careless,)), dtype="bfloat16"), expected
        )
    )


def test_tied_embeddings_keep_their_gradient_too(lanes):
    choices = updated_on_device(("block 1",), 2, gradients_on_gpu=True)
    plane = choices.changed(gradients_on_gpu=False)
    expected = run(plane, backend=lanes(), tied=True)
    assert_same_bits(run(choices, backend=lanes(), tied=True), expected)
    assert_same_bits(run(choices, backend=lanes((Lane.GRADIENTS_OUT,)), tied=True), expected)

"""Lanes that run at once: law 3, and errors in any lane.

Each test runs on a CUDA GPU and, so that it also runs without one, over streams that do their work
as it is launched (`tests.support.lanes`).
"""

from __future__ import annotations

import math
import threading

import pytest
import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import UPDATE_LANES, Lane
from engine.runtime.step.executor import Executor
from tests.support.lanes import Event, find_missing_waits
from tests.support.same_bits import BASE, SAME_BITS, assert_same_bits, planes_after
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.slow(
    "without a GPU it repeats what tests/engine/planning/schedule/test_laws.py shows"
)

RATE = 3e-3
CHOICES = PlanChoices().changed(micro_batches=2)
PLANS = (
    "base",
    "block inputs on the host",
    "block inputs on the host, one ring",
    "deep prefetch",
    "one kept",
    "pairs",
    "pairs on the host, all resident",
)


# ---------------------------------------------------------------------- law 3


@pytest.mark.parametrize("name", PLANS)
def test_delays_in_any_lane_change_nothing(lanes, name):
    choices = BASE.changed(**({"base": {}} | SAME_BITS)[name])
    expected = planes_after(BASE, lanes(), dtype="bfloat16")
    for slow in (
        (Lane.H2D,),
        (Lane.COMPUTE,),
        (Lane.D2H,),
        (Lane.HOST,),
        (Lane.H2D, Lane.D2H),
        (Lane.D2H, Lane.HOST),
        (Lane.H2D, Lane.HOST),
    ):
        assert_same_bits(planes_after(choices, lanes(slow), dtype="bfloat16"), expected)


DEVICE_UPDATES = ("embed", "block 0", "block 2", "head")


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(rounds=2, main_grad="device", blocks_without_recompute=3)],
    ids=["vertical", "device"],
)
def test_delays_change_nothing_where_optimizers_run_on_the_device(lanes, changes):
    """States travel through two buffers; summed over rounds, they lie where accumulators of blocks
    were.
    """
    device_updates = dict(device_updated_units=DEVICE_UPDATES, update_buffers=2)
    choices = BASE.changed(**device_updates | changes)
    expected = planes_after(choices, lanes(), dtype="bfloat16")
    for slow in (
        *((lane,) for lane in Lane),
        UPDATE_LANES,
        (Lane.H2D, Lane.STATES_OUT),
        (Lane.D2H, Lane.STATES_IN),
    ):
        assert_same_bits(planes_after(choices, lanes(slow), dtype="bfloat16"), expected)


def _find_missing_waits(lanes, careless: Lane, slow: tuple[Lane, ...]) -> None:
    expected = planes_after(BASE, lanes(), dtype="bfloat16")
    find_missing_waits(
        lambda: assert_same_bits(
            planes_after(BASE, lanes(slow, (careless,)), dtype="bfloat16"), expected
        )
    )


@pytest.mark.parametrize(
    "careless, slow",
    [(Lane.H2D, (Lane.COMPUTE, Lane.HOST)), (Lane.COMPUTE, (Lane.H2D,)), (Lane.HOST, (Lane.D2H,))],
    ids=lambda lane: lane if isinstance(lane, str) else "+".join(lane),
)
def test_a_lane_that_does_not_wait_is_found(lanes, careless, slow):
    """Without a GPU, COMPUTE is never behind the thread that prefetches: only a late update is
    found there.
    """
    _find_missing_waits(lanes, careless, slow)


@pytest.mark.parametrize("lanes", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_an_offload_that_does_not_wait_is_found(lanes):
    """Only where COMPUTE runs behind its launches can an offload come too early."""
    _find_missing_waits(lanes, Lane.D2H, (Lane.COMPUTE,))


# ---------------------------------------------------------------------- errors


def all_planes(run) -> list[torch.Tensor]:
    return [
        run.host_states.tensor(unit.name, plane).clone()
        for unit in run.model.units
        for plane in run.host_states.planes
        if plane != "grad"
    ]


def error_of(work) -> BaseException | None:
    """What `work` ends with; fails when it does not end within a minute."""
    errors: list[BaseException] = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return errors[0] if errors else None


def train(run, steps, device_updates=None, drain=True) -> None:
    for step in steps:
        run.engine.train_step(
            step,
            random_batches(2, seed=step),
            RATE,
            None if device_updates is None else device_updates.append,
        )
    if drain:
        run.engine.drain()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_non_finite_loss_applies_nothing(lanes, dtype):
    run = streamed(plain_model(tiny_config("qwen2")), CHOICES, backend=lanes(), dtype=dtype)
    train(run, [1])
    weight = run.host_states.tensor("block 1", "weight_high")
    sound = weight[7].clone()
    weight[7] = torch.nan
    before = all_planes(run)
    assert isinstance(error_of(lambda: train(run, [2, 3, 4])), NonFiniteError)
    error_of(run.engine.drain)
    assert_same_bits(all_planes(run), before)
    weight[7] = sound
    device_updates = []
    train(run, [2], device_updates)
    assert math.isfinite(device_updates[0].loss)
    assert error_of(run.close) is None


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.COMPUTE, Lane.D2H, Lane.HOST])
def test_an_error_in_a_lane_comes_out_and_hangs_nothing(lanes, lane, nth):
    run = streamed(plain_model(tiny_config("qwen2")), CHOICES, backend=lanes(broken=lane, nth=nth))
    error = error_of(lambda: train(run, [1, 2]))
    assert isinstance(error, RuntimeError) and str(error) == f"{lane} broke"
    error_of(run.engine.drain)
    assert error_of(run.close) is None


def test_a_step_is_home_although_the_next_one_breaks(lanes):
    """An error while step 2 is launched does not keep the updates of step 1 from being applied."""
    plain = plain_model(tiny_config("qwen2"))
    sound = streamed(plain, CHOICES, backend=lanes())
    train(sound, [1])
    computes = sum(op.lane == Lane.COMPUTE for op in sound.engine.plan.ops)
    broken = streamed(
        plain, CHOICES, backend=lanes(slow=(Lane.HOST,), broken=Lane.COMPUTE, nth=computes + 1)
    )
    device_updates = []
    assert (
        str(error_of(lambda: train(broken, [1, 2], device_updates, drain=False))) == "COMPUTE broke"
    )
    error_of(broken.engine.drain)
    assert [home.step for home in device_updates] == [1]
    assert_same_bits(all_planes(broken), all_planes(sound))
    sound.close()
    broken.close()


LOST = [
    # (the op that is running when the device is lost, units updated there, the step that the planes
    # then hold)
    ("backward", (), 1),
    ("clip", (), 1),
    ("update", (), 2),
    ("backward", DEVICE_UPDATES, 1),
    ("device_update", (*DEVICE_UPDATES, "block 1"), 1),
    ("offload_states", DEVICE_UPDATES, None),
]


@pytest.mark.parametrize("lanes", ["threads"], indirect=True)
@pytest.mark.parametrize(("kind", "device_updates", "step"), LOST)
def test_a_lost_device_leaves_whole_planes_unless_it_was_updating(
    lanes, monkeypatch, kind, device_updates, step
):
    """With every optimizer on the host, updates need no device once the first has begun: they are
    finished. With optimizers on the device, a device that is lost among the updates leaves a
    mixture, which is known as such.
    """
    changes = dict(device_updated_units=device_updates, update_buffers=2) if device_updates else {}
    choices = CHOICES.changed(**changes)
    plain = plain_model(tiny_config("qwen2"))
    expected = []
    sound = streamed(plain, choices, backend=lanes())
    for number in (1, 2):
        train(sound, [number])
        expected.append(all_planes(sound))
    sound.close()
    real = Executor.work

    def work(self, op, under_way):
        inner = real(self, op, under_way)
        if under_way.inputs.number != 2 or op.kind != kind:
            return inner

        def lose():
            inner()
            monkeypatch.setattr(Event, "lost", True)

        return lose

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "work", work)
        run = streamed(plain, choices, backend=lanes())
        assert "unspecified launch failure" in str(error_of(lambda: train(run, [1, 2, 3])))
        error_of(run.engine.drain)
    held = run.host_states.held
    assert held.is_mixed == (step is None)
    if step is not None:
        assert held.step == step
        assert_same_bits(all_planes(run), expected[step - 1])
    monkeypatch.setattr(Event, "lost", False)
    run.close()


def test_spans_follow_the_plan(lanes):
    """Every op begins after what it waits for has ended, on the one clock of all lanes."""
    run = streamed(plain_model(tiny_config("qwen2")), CHOICES, backend=lanes())
    device_updates = []
    train(run, [1, 2, 3], device_updates)
    previous = None
    for home in device_updates:
        for span in home.spans:
            assert span.start <= span.end
            waits = [home.spans[k] for k in span.op.waits]
            waits += [previous[k] for k in span.op.waits_previous] if previous else []
            assert all(wait.end <= span.start + 2e-4 for wait in waits), span.op.label
        previous = home.spans
    run.close()

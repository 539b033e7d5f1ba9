"""The optimizer on the device: equal to the host's to the bit, however its work is spread over
buffers and whichever lanes are late.
"""

from __future__ import annotations

import math

import pytest
import torch

from engine.config.optimizers import ADAMW, OptimizerSettings
from engine.errors import NonFiniteError
from engine.planning.layout.layout import planes_of
from engine.planning.schedule.choices import EmbedAndHead
from engine.planning.schedule.ops import UPDATE_LANES, Lane
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import HostStep
from engine.runtime.optimizer.device_adamw import StepFactors, clip_of, update
from tests.support.device_updates import (
    DEVICE_UPDATES,
    LATE,
    MAIN_GRAD_PLANS,
    one_unit,
    states_of,
    updated_on_device,
)
from tests.support.same_bits import BASE, DelayedBackend, assert_same_bits, planes_after
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing


# ---------------------------------------------------------------------- equal to the host's


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("main_grad", MAIN_GRAD_PLANS)
def test_states_have_the_host_s_bits(main_grad, dtype, tied):
    host = BASE.changed(**MAIN_GRAD_PLANS[main_grad])
    expected = planes_after(host, dtype=dtype, tied=tied, steps=3)
    for device_updates in DEVICE_UPDATES.values():
        for resident in (0, 2):
            choices = updated_on_device(device_updates, 2, main_grad, blocks_kept_in_slots=resident)
            found = planes_after(choices, dtype=dtype, tied=tied, steps=3)
            planes = len(planes_of(dtype, ADAMW))
            for unit in range(0, len(expected), planes):
                kept = slice(unit, unit + planes - 1)  # without gradients
                assert_same_bits(found[kept], expected[kept])


# ---------------------------------------------------------------------- to the bit


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("resident,tied", [(0, False), (2, True)])
@pytest.mark.parametrize("main_grad", slow_but(MAIN_GRAD_PLANS, ("vertical",), PLAN_SWEEP))
def test_neither_buffers_nor_delays_change_a_bit(main_grad, resident, tied):
    for name, device_updates in DEVICE_UPDATES.items():

        def run(buffers: int, late: tuple[str, ...] = ()) -> list[torch.Tensor]:
            choices = updated_on_device(
                device_updates,
                buffers,
                main_grad,
                blocks_kept_in_slots=resident,
                blocks_without_recompute=1,
            )
            return planes_after(choices, DelayedBackend(late), dtype="bfloat16", tied=tied)

        expected = run(1)
        for buffers in (2, 8):
            assert_same_bits(run(buffers), expected)
        for late in LATE if name == "all" else LATE[:1]:
            assert_same_bits(run(3, late), expected)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize(
    "plan_family", [{}, dict(gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT)]
)
def test_small_chunks_change_no_bit_whichever_lane_is_late(plan_family, slots):
    """Blocks that share a slot are updated in it chunk by chunk, while the next block is fetched to
    the same slot.
    """
    device_updates = ("embed", *(f"block {k}" for k in (0, 1, 3)), "head")

    def run(chunks: int, late: tuple[str, ...] = (), **changes) -> list[torch.Tensor]:
        choices = updated_on_device(
            device_updates, 4, slots=slots, update_chunks=chunks, **plan_family, **changes
        )
        return planes_after(choices, DelayedBackend(late), dtype="bfloat16", layers=5)

    expected = run(1)
    for late in (UPDATE_LANES, (Lane.H2D,), (Lane.COMPUTE,), Lane):
        assert_same_bits(run(3, late), expected)
    assert_same_bits(run(2, (Lane.COMPUTE,), blocks_per_saved_input=2), expected)


@pytest.mark.slow("it sweeps over many cases")
def test_buffers_over_main_grads_are_as_good_as_their_own():
    """Of eight blocks, the sums have space for two buffers and part of a third."""
    device_updates = tuple(f"block {k}" for k in (0, 1, 3, 4, 7))

    def run(
        buffers: int, late: tuple[str, ...] = (), main_grad: str = "device"
    ) -> list[torch.Tensor]:
        return planes_after(
            updated_on_device(device_updates, buffers, main_grad),
            DelayedBackend(late),
            dtype="bfloat16",
            layers=8,
        )

    expected = run(1)
    assert_same_bits(run(2, main_grad="vertical"), expected)
    for buffers in (2, 3):
        for late in (
            UPDATE_LANES,
            *((lane,) for lane in UPDATE_LANES),
            (Lane.COMPUTE,),
            (*UPDATE_LANES, Lane.H2D, Lane.D2H),
        ):
            assert_same_bits(run(buffers, late), expected)


@pytest.mark.parametrize("resident", [0, 2])
def test_what_runs_between_steps_changes_nothing(resident):
    """Weights that stay in a slot of their own are there again after an evaluation."""
    plain = plain_model(tiny_config("qwen3"))
    left = []
    for interrupted in (False, True):
        run = streamed(
            plain,
            updated_on_device(DEVICE_UPDATES["all"], 2, blocks_kept_in_slots=resident),
            dtype="bfloat16",
        )
        for step in (1, 2, 3):
            run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
            if interrupted:
                run.engine.drain()
                for slot in run.engine.state.slots.values():
                    slot.fill_(float("nan"))
                assert math.isfinite(run.engine.evaluate(random_batches(2, seed=9)))
        run.engine.drain()
        left.append(
            [
                run.host_states.tensor(unit.name, plane).clone()
                for unit in run.model.units
                for plane in run.host_states.planes
            ]
        )
        run.close()
    assert_same_bits(*left)


@pytest.mark.parametrize("main_grad", MAIN_GRAD_PLANS)
@pytest.mark.parametrize(
    "late",
    [(), (Lane.HOST,), (Lane.D2H, Lane.HOST), (*UPDATE_LANES, Lane.HOST)],
    ids=lambda late: "+".join(late) or "none",
)
def test_a_loss_that_is_not_finite_applies_nothing(late, main_grad):
    """Also where the update runs on the device before the host has seen the loss."""
    run = streamed(
        plain_model(tiny_config("qwen3")),
        updated_on_device(DEVICE_UPDATES["all"], 3, main_grad, blocks_kept_in_slots=1),
        backend=DelayedBackend(late),
        dtype="bfloat16",
    )
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()
    run.host_states.tensor("head", "weight_high")[3] = float("nan")
    kept = [
        (unit.name, plane)
        for unit in run.model.units
        for plane in run.host_states.planes
        if plane != "grad"
    ]
    before = [run.host_states.tensor(*key).clone() for key in kept]
    with pytest.raises(NonFiniteError, match="loss of step 2"):
        run.engine.train_step(2, random_batches(2, seed=2), 1e-2)
        run.engine.drain()
    for lane in Lane if late else ():  # what was under way when the error came
        held = run.backend._held[lane]
        while held and lane != Lane.HOST:
            run.backend.run_until(held[-1])
    assert_same_bits([run.host_states.tensor(*key) for key in kept], before)


# ---------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eps", [1e-8, 1e-12])
def test_a_chunk_is_updated_as_the_host_updates_it(dtype, eps):
    generator = torch.Generator().manual_seed(1)
    host, device = one_unit(dtype), one_unit(dtype)
    numel, decayed = host.layouts["unit"].numel, host.layouts["unit"].decay_numel
    for name, shape in (("weight", (70, 64)), ("norm", (640,))):
        values = torch.randn(shape, generator=generator)
        for states in (host, device):
            states.parameters.write("unit", name, values)
    adamw = HostAdamW(host, OptimizerSettings(0.9, 0.99, eps, 0.3), threads=1)
    for step in (1, 2, 3):
        # Of very different sizes; some zero, and moments that become subnormal.
        gradient = torch.randn(numel, generator=generator) * 10 ** (
            torch.rand(numel, generator=generator) * -30
        )
        gradient[::7] = 0.0
        if step == 3:
            gradient[5], gradient[decayed + 1] = float("inf"), float("nan")
        for states in (host, device):
            states.tensor("unit", "grad").copy_(gradient)
            if step == 2:
                states.tensor("unit", "exp_avg")[::7] = 1.2e-38
        adamw.update("unit", HostStep(step, 1e-2, 0.7))
        scalars, clip = torch.from_numpy(adamw.scalars(step, 1e-2)), torch.tensor([0.7, 1.0])
        for start, stop in ((0, 1000), (1000, decayed + 64), (decayed + 64, numel)):
            planes = {plane: device.tensor("unit", plane)[start:stop] for plane in device.planes}
            update(
                planes,
                planes.pop("grad"),
                StepFactors(clip, scalars),
                min(max(0, decayed - start), stop - start),
                compiled=False,
            )
        ours, theirs = (
            [states.tensor("unit", plane) for plane in states.planes] for states in (device, host)
        )
        assert_same_bits(ours[:-1], theirs[:-1])  # the last plane is the gradient
        for name, mine in states_of(ours, dtype)[0].items():
            if name == "exp_avg" or (
                name == "exp_avg_sq" and eps == 1e-8
            ):  # a smaller eps has no space for a bias
                assert not ((mine != 0) & (mine.abs() < 2.0**-126)).any()
    adamw.close()
    host.close()
    device.close()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_a_factor_that_forbids_it_nothing_changes(dtype, value):
    states = one_unit(dtype)
    states.parameters.write("unit", "weight", torch.randn(70, 64))
    states.tensor("unit", "exp_avg").fill_(1e-39)  # left as it is, subnormal or not
    states.tensor("unit", "grad").fill_(value)
    planes = {plane: states.tensor("unit", plane) for plane in states.planes}
    before = [plane.clone() for plane in planes.values()]
    scalars = torch.from_numpy(
        HostAdamW(states, OptimizerSettings(0.9, 0.99, 1e-8, 0.3), threads=1).scalars(1, 1e-2)
    )
    others = {name: plane for name, plane in planes.items() if name != "grad"}
    factors = StepFactors(torch.tensor([float("nan"), 0.0]), scalars)
    update(others, planes["grad"], factors, 4480, compiled=False)
    assert_same_bits(list(planes.values()), before)
    states.close()


@pytest.mark.parametrize("limit", [None, 0.5, 100.0])
def test_the_clip_factor_is_the_host_s(limit):
    squares, loss = [3.0, 1e-20, 6.0], 2.5
    factor, fine = clip_of(torch.tensor([*squares, loss]), limit, torch.ones(2)).tolist()
    norm = math.sqrt(sum(squares))
    assert fine == 1
    assert factor == pytest.approx(
        1.0 if limit is None else min(1.0, limit / (norm + 1e-6)), rel=1e-6
    )
    for bad in (float("nan"), float("inf")):
        assert clip_of(torch.tensor([*squares, bad]), limit, torch.ones(2))[1] == 0
        assert clip_of(torch.tensor([bad, 1.0, loss]), limit, torch.ones(2))[1] == 0

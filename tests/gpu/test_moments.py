"""Moments in bf16 and in 8 bits on a CUDA GPU: its optimizer rounds as that of the host, any plan
has the same bits, and a run that was resumed is the undisturbed one. Tests of single units and of
late lanes also run without a GPU.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.config.optimizers import MOMENTS, OptimizerSettings, StateFormat
from engine.planning.fit import requirements
from engine.planning.schedule.ops import UPDATE_LANES, Lane
from engine.runs.record.events import PlanBuilt
from engine.runtime.device.compiled import uncompiled_functions
from engine.runtime.device.cuda_backend import CudaBackend
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import HostStep
from engine.training.loop import planning
from engine.training.loop.run import resume_run, start_run
from tests.support.blockwise import RATE, update_on
from tests.support.device_updates import DEVICE_UPDATES, MAIN_GRAD_PLANS, updated_on_device
from tests.support.folders import make_config
from tests.support.moment_kernels import new_states, set_gradient
from tests.support.optimizers import ROUNDED
from tests.support.rounded_moments import assert_rounded_alike, trained
from tests.support.same_bits import BASE, SAME_BITS, assert_same_bits, planes_after
from tests.support.trained_runs import events_of, execute, planes_on_disk

pytestmark = pytest.mark.computing

DEVICE, BACKEND = "cuda", CudaBackend
PLACES = pytest.mark.parametrize(
    ("device", "compiled"),
    [
        ("cpu", False),
        pytest.param(DEVICE, False, marks=pytest.mark.gpu),
        pytest.param(DEVICE, True, marks=pytest.mark.gpu),
    ],
    ids=["eager, without a GPU", "eager", "compiled"],
)
CLIP = 0.7


@pytest.fixture(autouse=True)
def tiny_is_not_small(monkeypatch):
    """The matrices of a tiny model are kept in 8 bits, and its norms in fp32."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)


# ---------------------------------------------------------------- single units


def moments_in(states, kind: StateFormat) -> dict[str, np.ndarray]:
    """The bytes of both moments of the only unit that are kept in this way."""
    (unit,) = states.layouts
    ranges = states.layouts[unit].state_ranges(states.optimizer)["exp_avg"]
    places = [slice(part.place, part.place + part.bytes) for part in ranges if part.kind == kind]
    return {
        name: np.concatenate([states.array(unit, name)[place] for place in places] or [np.empty(0)])
        for name in MOMENTS
    }


@PLACES
@pytest.mark.parametrize("unit", ["block 0", "embed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_the_same_moments_are_rounded_to_the_same_bits(optimizer, dtype, unit, device, compiled):
    """With betas of 0, the moments before rounding are the gradient and its square."""
    host, other = (new_states(optimizer, dtype, unit) for _ in range(2))
    # So small an eps has no bias for squared gradients, which one processor may add at once.
    adamw = HostAdamW(host, OptimizerSettings(0.0, 0.0, 1e-12, 0.1, seed=7), threads=2)
    for step in range(1, 4):
        for states in (host, other):
            set_gradient(states, unit, step)
        adamw.update(unit, HostStep(step, RATE))
        update_on(device, other, adamw, step, compiled)
        for kind in StateFormat:
            ours, theirs = (moments_in(states, kind) for states in (other, host))
            for name in MOMENTS:
                assert np.array_equal(ours[name], theirs[name]), (step, kind, name)
    if compiled:
        assert uncompiled_functions() == []
    adamw.close()
    host.close()
    other.close()


@PLACES
@pytest.mark.parametrize("unit", ["block 0", "embed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_a_step_from_the_same_state_leaves_the_same_state(optimizer, dtype, unit, device, compiled):
    host, other = (new_states(optimizer, dtype, unit) for _ in range(2))
    adamw = HostAdamW(host, OptimizerSettings(0.9, 0.999, 1e-8, 0.1, seed=7), threads=2)
    for step in range(1, 5):
        for name in host.planes:
            other.array(unit, name)[:] = host.array(unit, name)
        for states in (host, other):
            set_gradient(states, unit, step)
        adamw.update(unit, HostStep(step, RATE, CLIP))
        update_on(device, other, adamw, step, compiled, CLIP)
        for name in host.planes:
            if name != "grad":
                assert np.array_equal(other.array(unit, name), host.array(unit, name)), (step, name)
    adamw.close()
    host.close()
    other.close()


# ---------------------------------------------------------------- engines


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "dtype", "compiled"),
    [
        ("adamw_bf16", "float32", False),
        ("adamw_8bit", "float32", False),
        ("adamw_bf16", "bfloat16", False),
        ("adamw_8bit", "bfloat16", False),
        ("adamw_8bit", "bfloat16", True),  # compiling the blocks takes longest
    ],
)
def test_optimizers_on_the_device_round_as_those_on_the_host(
    deterministic, optimizer, dtype, compiled
):
    base = BASE.changed(compiled=compiled)
    host, _ = trained(base, optimizer, dtype, 1, BACKEND())
    for device_updates in DEVICE_UPDATES.values():
        choices = updated_on_device(device_updates, 2, compiled=compiled)
        device, _ = trained(choices, optimizer, dtype, 1, BACKEND())
        for unit in host.host_states.layouts:
            if unit in device_updates:
                assert_rounded_alike(device.host_states, host.host_states, unit)
                continue
            for name in host.host_states.planes:
                ours, theirs = (run.host_states.tensor(unit, name) for run in (device, host))
                assert_same_bits([ours], [theirs])
        device.close()
    host.close()


@pytest.mark.gpu
@pytest.mark.parametrize("device_updates", ["none", "some", "all"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_any_plan_has_the_same_bits(deterministic, optimizer, device_updates):
    base = (
        updated_on_device(DEVICE_UPDATES[device_updates], 1) if device_updates != "none" else BASE
    )

    def after(**changes) -> list[torch.Tensor]:
        choices = base.changed(**changes)
        return planes_after(choices, BACKEND(), dtype="bfloat16", optimizer=optimizer)

    expected = after()
    for name in ("deep prefetch", "two kept, two slots", "block inputs on the host, one ring"):
        assert_same_bits(after(**SAME_BITS[name]), expected)
    if device_updates != "none":
        for buffers in (2, 5):
            assert_same_bits(after(update_buffers=buffers), expected)
        assert_same_bits(
            after(blocks_without_recompute=1, update_buffers=3, **MAIN_GRAD_PLANS["device"]),
            expected,
        )


@pytest.mark.parametrize("optimizer", ROUNDED)
def test_delays_change_nothing_where_optimizers_run_on_the_device(lanes, optimizer):
    """Rows of bytes travel through two buffers. The test also runs without a GPU."""
    choices = updated_on_device(DEVICE_UPDATES["all"], 2, blocks_without_recompute=1)
    expected = planes_after(choices, lanes(), dtype="bfloat16", optimizer=optimizer)
    for slow in (UPDATE_LANES, (Lane.STATES_OUT,), (Lane.H2D, Lane.STATES_OUT), (Lane.STATES_IN,)):
        planes = planes_after(choices, lanes(slow), dtype="bfloat16", optimizer=optimizer)
        assert_same_bits(planes, expected)


# ---------------------------------------------------------------- whole runs


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("device_updates", "gradients"),
    [
        ((), "gpu"),
        (DEVICE_UPDATES["some"], "host"),
        (DEVICE_UPDATES["some"], "gpu"),
        (DEVICE_UPDATES["all"], "gpu"),
    ],
    ids=["host", "both", "both, gradients on the GPU", "device"],
)
@pytest.mark.parametrize("optimizer", ["adamw", *ROUNDED])
def test_a_resumed_run_equals_the_undisturbed_one_to_the_bit(
    deterministic, monkeypatch, tmp_path, optimizer, device_updates, gradients
):
    choose = requirements.choose

    def with_homes(job, target, *coarse):
        chosen = choose(job, target, *coarse)
        buffers = dict(update_buffers=2 if device_updates else 0)
        places = dict(device_updated_units=device_updates, gpu_resident_units=0)
        choices = chosen.choices.changed(**places, **buffers)
        return dataclasses.replace(chosen, choices=choices)

    for planner in (requirements, planning):
        monkeypatch.setattr(planner, "choose", with_homes)
    values = {"train.optimizer": optimizer, "engine.gradients": gradients, "engine.device": DEVICE}
    values |= {"engine.kernels": "eager", "model.dtype": "bfloat16"}
    config = make_config(tmp_path).with_values(values)
    whole = start_run(config, tmp_path / "runs")
    assert execute(whole).state == "finished", whole.recorder.snapshot.reason
    (built,) = events_of(whole, PlanBuilt)
    assert tuple(built.choices["device_updated_units"]) == device_updates
    assert built.choices["gradients_on_gpu"] == (gradients == "gpu")
    part = start_run(config, tmp_path / "runs")
    assert execute(part, {3: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished", again.recorder.snapshot.reason
    assert planes_on_disk(again) == planes_on_disk(whole)

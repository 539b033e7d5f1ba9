"""Training with moments in bf16 and in 8 bits: any plan has the same bits, the device rounds as the
host does, and losses stay near those of fp32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.runtime.host.host_optimizer import HostStep
from engine.runtime.optimizer.moment_conversion import read_moments
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.optimizers import ROUNDED
from tests.support.rounded_moments import assert_rounded_alike, moments_of, trained
from tests.support.same_bits import BASE, SAME_BITS, assert_same_bits, planes_after

pytestmark = pytest.mark.computing


@pytest.fixture(autouse=True)
def tiny_is_not_small(monkeypatch):
    """The matrices of a tiny model are kept in 8 bits, and its norms in fp32."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_any_plan_has_the_same_bits(optimizer, dtype):
    expected = planes_after(BASE, dtype=dtype, optimizer=optimizer)
    for changes in SAME_BITS.values():
        choices = BASE.changed(**changes)
        assert_same_bits(planes_after(choices, dtype=dtype, optimizer=optimizer), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_the_device_rounds_as_the_host_does(optimizer, dtype):
    host, _ = trained(BASE, optimizer, dtype, 1)
    device, _ = trained(updated_on_device(DEVICE_UPDATES["all"], 2), optimizer, dtype, 1)
    for unit in host.host_states.layouts:
        assert_rounded_alike(device.host_states, host.host_states, unit)
    host.close()
    device.close()


@pytest.mark.parametrize("optimizer", ROUNDED)
def test_losses_stay_near_those_of_fp32(optimizer):
    exact, wanted = trained(BASE, "adamw", "float32", 12)
    run, losses = trained(BASE, optimizer, "float32", 12)
    assert wanted[-1] < 0.8 * wanted[0]
    assert losses == pytest.approx(wanted, rel=0.05) and losses != wanted
    for unit in run.host_states.layouts:
        for name, ours in moments_of(run.host_states, unit).items():
            theirs = moments_of(exact.host_states, unit)[name]
            assert np.corrcoef(ours, theirs)[0, 1] > 0.9, (unit, name)
    run.close()
    exact.close()


def test_a_second_moment_in_bf16_follows_small_changes():
    """With beta2 0.999, each step changes it by less than half of a step of bf16."""
    value, target = torch.tensor([1.0]), 2.0
    nearest = value.clone().bfloat16()
    for _ in range(2000):
        nearest = (nearest.float() * 0.999 + 0.001 * target).bfloat16()
    assert nearest == 1.0, "rounding to the nearest stalls"
    run, _ = trained(BASE, "adamw_bf16", "float32", 1)
    states, optimizer = run.host_states, run.optimizer
    unit = "block 1"
    part = states.layouts[unit].state_ranges("adamw_bf16")["exp_avg"][0]
    place = slice(part.place, part.place + part.bytes)
    grad = states.array(unit, "grad")
    grad[:] = np.float32(np.sqrt(target))
    halves = states.array(unit, "exp_avg_sq")[place].view(np.uint16)
    halves[:] = 0x3F80  # 1 in bf16
    for step in range(2, 2002):
        optimizer.update(unit, HostStep(step, 0.0))
    moments = read_moments(states.array(unit, "exp_avg_sq"), part, "exp_avg_sq")
    exact = target - (target - 1.0) * 0.999**2000
    assert moments.mean() == pytest.approx(exact, rel=2e-3)
    run.close()

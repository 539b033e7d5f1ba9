"""Units that live on the device, on lanes that run at once: the bits are those of planes in host
memory, in any plan, whichever lane is late. Each test also runs without a GPU, except for those of
kernels (`tests.support.lanes`).
"""

from __future__ import annotations

import pytest
import torch

from engine.config.optimizers import OptimizerSettings
from engine.planning.schedule.ops import Lane
from engine.runtime.device.compiled import uncompiled_functions
from engine.runtime.device.cuda_backend import cuda_available
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import HostStep
from engine.runtime.optimizer.device_adamw import StepFactors, update
from tests.support.device_updates import DEVICE_UPDATES, one_unit, updated_on_device
from tests.support.gpu_resident_units import PLAN_FAMILIES, UNITS, planes_after
from tests.support.same_bits import BASE, assert_same_bits

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("without a GPU it repeats tests/engine/runtime"),
]


@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
def test_the_bits_are_those_of_planes_in_host_memory(lanes, plan_family):
    base = BASE.changed(**PLAN_FAMILIES[plan_family])
    expected = planes_after(base, backend=lanes())
    for count in (1, 3, UNITS):
        choices = base.changed(gpu_resident_units=count)
        assert_same_bits(planes_after(choices, backend=lanes()), expected)


def test_where_an_optimizer_runs_changes_no_bit(lanes):
    expected = planes_after(BASE, backend=lanes())
    for device_updates in DEVICE_UPDATES.values():
        assert_same_bits(
            planes_after(updated_on_device(device_updates, 2), backend=lanes()), expected
        )


@pytest.mark.parametrize("late", [(Lane.COMPUTE,), (Lane.HOST,), (Lane.H2D, Lane.D2H)], ids=str)
def test_delays_change_nothing(lanes, late):
    choices = BASE.changed(gpu_resident_units=3)
    expected = planes_after(choices, backend=lanes())
    assert_same_bits(planes_after(choices, backend=lanes(late)), expected)


@pytest.mark.skipif(not cuda_available(), reason="the kernel runs on a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eps", [1e-8, 1e-12])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernel_of_the_gpu_has_the_bits_of_the_host_s(dtype, eps, compiled):
    generator = torch.Generator().manual_seed(1)
    host = one_unit(dtype)
    numel, decayed = host.layouts["unit"].numel, host.layouts["unit"].decay_numel
    for name, shape in (("weight", (70, 64)), ("norm", (640,))):
        values = torch.randn(shape, generator=generator)
        values.view(-1)[:8] = torch.tensor(
            [3.3895314e38, -3.3895314e38, 1.0039062, 1e-39, -1e-39, 0.0, -0.0, 3.3961775e38]
        )
        host.parameters.write("unit", name, values)
    planes = {plane: host.tensor("unit", plane).cuda() for plane in host.planes if plane != "grad"}
    adamw = HostAdamW(host, OptimizerSettings(0.9, 0.99, eps, 0.3), threads=1)
    for step in range(1, 6):
        gradient = torch.randn(numel, generator=generator) * 10 ** (
            torch.rand(numel, generator=generator) * -40 + 3
        )
        gradient[::7] = 0.0
        if step == 5:
            gradient[5], gradient[decayed + 1] = float("inf"), float("nan")
        host.tensor("unit", "grad").copy_(gradient)
        adamw.update("unit", HostStep(step, 1e-2, 0.7))
        scalars = torch.from_numpy(adamw.scalars(step, 1e-2)).cuda()
        factors = StepFactors(torch.tensor([0.7, 1.0]).cuda(), scalars)
        update(planes, host.tensor("unit", "grad").cuda(), factors, decayed, compiled)
        bad = torch.zeros(numel, dtype=torch.bool)
        if step == 5:
            bad[[5, decayed + 1]] = True
            # The bits of a NaN are those of the processor that made it.
            assert not torch.isfinite(planes["weight_high"].cpu()[bad].float()).any()
        for plane, values in planes.items():
            ours, theirs = values.cpu()[~bad], host.tensor("unit", plane)[~bad]
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (step, plane)
    assert not uncompiled_functions()
    adamw.close()
    host.close()

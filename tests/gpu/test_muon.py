"""Muon on a CUDA GPU: products of matrices there give torch's updates, plans with any buffers have
the same bits, and a step computes what a step on the CPU does. Tests of plans also run without a
GPU.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from engine.config.adapters import Adapters
from engine.config.optimizers import MOMENTS
from engine.planning.layout.layout import ParameterSpec, lay_out, planes_of
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import UPDATE_LANES, Lane
from engine.runtime.device.cuda_backend import CudaBackend
from engine.runtime.host.host_muon import HostMuon
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.device_adamw import StepFactors
from engine.runtime.optimizer.device_optimizer import DeviceChunk, DeviceStep
from engine.runtime.optimizer.muon import DeviceMuon
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.gpu_resident_units import planes_after as masters_after
from tests.support.optimizers import SETTINGS, exact_products, torch_optimizer
from tests.support.same_bits import BASE, assert_same_bits, planes_after
from tests.support.tiny import plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing

UNIT, RATE = "block 0", 3e-3
SHAPES = {
    "tall.weight": (1024, 512),
    "wide.weight": (768, 2048),
    "experts": (2, 64, 128),
    "norm.weight": (512,),
}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("products", "far"), [(exact_products, 2e-6), (nullcontext, 2e-2 * RATE)])
def test_updates_are_those_of_torch(products, far, compiled):
    specs = [ParameterSpec(n, f"model.0.{n}", shape, len(shape) > 1) for n, shape in SHAPES.items()]
    layout = lay_out(UNIT, specs)
    states = HostStates([layout], "float32", threads=1)
    states.allocate_weights()
    states.allocate_states(optimizer="muon")
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for spec in specs:
        values = torch.randn(spec.shape, generator=generator) * 0.05
        states.parameters.write(UNIT, spec.name, values)
        weights[spec.full_name] = torch.nn.Parameter(values.cuda())
    planes = {plane: states.tensor(UNIT, plane).cuda() for plane in states.planes}
    host, device = HostMuon(states, SETTINGS, 1), DeviceMuon()
    decayed = {spec.full_name for spec in specs if spec.decay}
    optimizer = torch_optimizer(weights, decayed, "muon", RATE)
    places = dict(zip((spec.name for spec in layout.parameters), layout.offsets))
    with products():
        for step in range(1, 6):
            for spec in specs:
                inside = slice(places[spec.name], places[spec.name] + spec.numel)
                gradient = torch.randn(spec.shape, generator=generator).cuda()
                planes["grad"][inside] = gradient.reshape(-1)
                weights[spec.full_name].grad = gradient * 0.5
            scalars = torch.from_numpy(host.scalars(step, RATE)).cuda()
            factors = StepFactors(torch.tensor([0.5, 1.0]).cuda(), scalars)
            chunk = DeviceChunk(
                layout,
                0,
                planes["grad"],
                {"weight_high": planes["weight_high"]},
                {name: planes[name] for name in MOMENTS},
            )
            device.update(chunk, DeviceStep(factors, 0, compiled))
            optimizer.step()
    for spec in specs:
        inside = slice(places[spec.name], places[spec.name] + spec.numel)
        off = planes["weight_high"][inside].view(spec.shape) - weights[spec.full_name].data
        most = far if len(spec.shape) == 2 else 2.4e-6
        assert off.square().mean().sqrt() < most, spec.name
        assert off.abs().max() < 10 * most, spec.name
    host.close()
    states.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_lane_that_is_late_changes_a_bit(lanes, dtype):
    def run(buffers: int, late: tuple[str, ...] = ()) -> list[torch.Tensor]:
        choices = updated_on_device(DEVICE_UPDATES["all"], buffers)
        return planes_after(choices, lanes(late), dtype=dtype, optimizer="muon")

    expected = run(1)
    for late in (UPDATE_LANES, (Lane.COMPUTE,), (Lane.H2D, Lane.D2H)):
        assert_same_bits(run(3, late), expected)


@pytest.mark.parametrize("resident", [2, 4])
def test_units_that_live_on_the_device_have_the_bits_of_streamed_ones(lanes, resident):
    def run(choices: PlanChoices) -> list[torch.Tensor]:
        return masters_after(choices, backend=lanes(), optimizer="muon")

    streamed = updated_on_device(DEVICE_UPDATES["all"], 2)
    choices = updated_on_device(DEVICE_UPDATES["all"][resident:], 2, gpu_resident_units=resident)
    assert_same_bits(run(choices), run(streamed))


@pytest.mark.gpu
def test_host_and_device_agree():
    """As far as products in bf16 do: three updates of a matrix change an element by about 6e-3."""
    on_host = planes_after(BASE, CudaBackend(), optimizer="muon", steps=3)
    choices = updated_on_device(DEVICE_UPDATES["all"], 2)
    on_device = planes_after(choices, CudaBackend(), optimizer="muon", steps=3)
    names = planes_of("float32", "muon")
    assert len(on_host) == len(on_device) == len(names) * 5
    for index, (one, other) in enumerate(zip(on_host, on_device)):
        # The device takes its gradients from buffers, and the plane of gradients stays empty.
        if names[index % len(names)] != "grad":
            off = (one - other).square().mean().sqrt()
            assert off < 2e-2 * one.square().mean().sqrt(), (index, names[index % len(names)])


@pytest.mark.parametrize("resident", [0, 2, 5])
def test_blocks_without_a_second_moment(lanes, resident):
    """Adapters are matrices alone, so a plane of their blocks has no bytes."""

    def weights(choices: PlanChoices, backend) -> list[torch.Tensor]:
        plain = plain_model(tiny_config("qwen3"))
        adapters = Adapters(rank=4, alpha=8.0)
        run = streamed(plain, choices, backend=backend, optimizer="muon", parts=adapters)
        sizes = run.model.layouts[1].plane_bytes("float32", "muon")
        assert sizes[MOMENTS[0]] > sizes[MOMENTS[1]] == 0
        return run.planes_after(choices.batching.micro_batches, 3)

    blocks = tuple(f"block {k}" for k in range(max(0, resident - 1), 3))
    with exact_products():
        choices = updated_on_device(blocks, 2, gpu_resident_units=resident)
        on_device = weights(choices, lanes())
        on_host = weights(BASE, lanes())
    for one, other in zip(on_device, on_host):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=1e-3)

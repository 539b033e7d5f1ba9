"""Muon on the host and on the device equals `torch.optim.Muon` for the matrices of blocks and
`torch.optim.AdamW` for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from engine.config.optimizers import MOMENTS
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.host.host_muon import HostMuon
from engine.runtime.host.host_optimizer import GradientChunk, HostStep
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.device_adamw import StepFactors
from engine.runtime.optimizer.device_optimizer import DeviceChunk, DeviceStep
from engine.runtime.optimizer.muon import DeviceMuon
from tests.support.optimizers import SETTINGS, exact_products, torch_optimizer

UNIT, RATE = "block 0", 3e-3
SHAPES = {
    "tall.weight": (150, 70),
    "experts": (3, 24, 40),
    "wide.weight": (37, 41),
    "norm.weight": (41,),
    "square.weight": (72, 72),
    "bias": (70,),
}


def new_states(dtype: str, unit: str = UNIT, shapes=SHAPES) -> HostStates:
    specs = [ParameterSpec(n, f"model.0.{n}", shape, len(shape) > 1) for n, shape in shapes.items()]
    states = HostStates([lay_out(unit, specs)], dtype, threads=1)
    states.allocate_weights()
    states.allocate_states(optimizer="muon")
    generator = torch.Generator().manual_seed(0)
    for spec in specs:
        values = torch.randn(spec.shape, generator=generator) * 0.05
        states.parameters.write(unit, spec.name, values)
    return states


def set_gradients(states: HostStates, step: int) -> dict[str, torch.Tensor]:
    """Returns the random gradients of a step, by the name of their parameters."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for unit, layout in states.layouts.items():
        for spec, offset in zip(layout.parameters, layout.offsets):
            plane = states.tensor(unit, "grad")[offset : offset + spec.numel].view(spec.shape)
            plane.copy_(torch.randn(spec.shape, generator=generator))
            found[spec.full_name] = plane.float()
    return found


def on_host(states: HostStates, threads: int = 2) -> Iterator[None]:
    """Applies a step whenever it is asked for the next one."""
    host = HostMuon(states, SETTINGS, threads)
    for step in range(1, 100):
        for unit in states.layouts:
            host.update(unit, HostStep(step, RATE, 0.5))
        yield
    host.close()


def on_device(states: HostStates) -> Iterator[None]:
    host, device = HostMuon(states, SETTINGS, 1), DeviceMuon()
    for step in range(1, 100):
        scalars = torch.from_numpy(host.scalars(step, RATE))
        for unit in states.layouts:
            device.update(chunk_of(states, unit), step_of(scalars, 1.0))
        yield
    host.close()


def step_of(scalars: torch.Tensor, flag: float) -> DeviceStep:
    return DeviceStep(StepFactors(torch.tensor([0.5, flag]), scalars), 0, False)


def chunk_of(states: HostStates, unit: str = UNIT, start: int = 0) -> DeviceChunk:
    names = [name for name in states.planes if name.startswith("weight")]
    weights = {name: states.tensor(unit, name)[start:] for name in names}
    kept = {name: states.tensor(unit, name) for name in MOMENTS}
    return DeviceChunk(
        states.layouts[unit], start, states.tensor(unit, "grad")[start:], weights, kept
    )


@pytest.mark.parametrize("updates", [on_host, on_device])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("products", "far"), [(exact_products, 1e-6), (nullcontext, 2e-2 * RATE)])
def test_equals_torch(products, far, dtype, updates):
    """Products in bf16 are as far off as their rounding; in fp32, the formula is seen to agree."""
    states = new_states(dtype)
    specs = states.layouts[UNIT].parameters
    weights = {
        spec.full_name: torch.nn.Parameter(states.parameters.master(UNIT, spec.name))
        for spec in specs
    }
    decayed = {spec.full_name for spec in specs if spec.decay}
    optimizer = torch_optimizer(weights, decayed, "muon", RATE)
    steps = updates(states)
    with products():
        for step in range(1, 6):
            gradients = set_gradients(states, step)
            next(steps)
            for name, weight in weights.items():
                weight.grad = gradients[name] * 0.5
            optimizer.step()
    for spec in specs:
        off = states.parameters.master(UNIT, spec.name) - weights[spec.full_name].data
        most = far if len(spec.shape) == 2 else 2.4e-6
        assert off.square().mean().sqrt() < most, spec.name
        assert off.abs().max() < 10 * most, spec.name
    steps.close()
    states.close()


def test_the_number_of_threads_changes_no_bit():
    found = []
    for threads in (1, 3):
        states = new_states("bfloat16", shapes={"big.weight": (300, 200), "wide.weight": (90, 130)})
        steps = on_host(states, threads)
        for step in range(1, 3):
            set_gradients(states, step)
            next(steps)
        found.append([states.tensor(UNIT, plane).clone() for plane in states.planes])
        steps.close()
        states.close()
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_step_that_is_not_applied_changes_no_bit():
    states, host = new_states("bfloat16"), None
    set_gradients(states, 1)
    before = [states.tensor(UNIT, plane).clone() for plane in states.planes]
    host = HostMuon(states, SETTINGS, 1)
    scalars = torch.from_numpy(host.scalars(1, RATE))
    DeviceMuon().update(chunk_of(states), step_of(scalars, 0.0))
    assert all(torch.equal(a, states.tensor(UNIT, b)) for a, b in zip(before, states.planes))
    host.close()
    states.close()


def test_a_matrix_is_never_cut():
    states = new_states("float32")
    host = HostMuon(states, SETTINGS, 1)
    grad = states.array(UNIT, "grad")
    with pytest.raises(ValueError, match="cut a matrix in two"):
        host.update(UNIT, HostStep(1, RATE), GradientChunk(64, grad[64:]))
    scalars = torch.from_numpy(host.scalars(1, RATE))
    with pytest.raises(ValueError, match="cuts a matrix in two"):
        chunk = chunk_of(states, start=64)
        DeviceMuon().update(chunk, step_of(scalars, 1.0))
    host.close()
    states.close()


def test_bytes_of_states():
    """A matrix of a block has one state, all other parameters have two."""
    shapes = {"a.weight": (64, 128), "experts": (2, 64, 64), "norm": (64,)}
    for unit, numel in (("block 0", 2 * 64 * 64 + 64), ("head", 64 * 128 + 2 * 64 * 64 + 64)):
        states = new_states("bfloat16", unit, shapes)
        sizes = states.layouts[unit].plane_bytes("bfloat16", "muon")
        assert sizes[MOMENTS[0]] == 4 * (64 * 128 + 2 * 64 * 64 + 64)
        assert sizes[MOMENTS[1]] == 4 * numel == states.array(unit, MOMENTS[1]).nbytes
        states.close()

"""Planes with rounded moments, and gradients for them."""

from __future__ import annotations

import numpy as np
import torch

from engine.config.optimizers import BLOCK
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.host.host_states import HostStates

SHAPES = {"w": (70, 128), "v": (4097,), "s": (100,), "b": (5000,), "n": (64,)}
"""A matrix of whole blocks, a vector whose last block is short, small ones, with and without
decay.
"""


def layout(unit="block 0"):
    return lay_out(
        unit,
        [ParameterSpec(name, name, shape, name in "wvs") for name, shape in SHAPES.items()],
    )


def new_states(optimizer, dtype="bfloat16", unit="block 0"):
    states = HostStates([layout(unit)], dtype, threads=1)
    states.allocate_weights()
    states.allocate_states(optimizer=optimizer)
    random = torch.Generator().manual_seed(1)
    for spec in states.layouts[unit].parameters:
        states.parameters.write(unit, spec.name, torch.randn(spec.shape, generator=random) * 0.02)
    return states


def gradients(numel, number):
    """Gradients of all kinds: smooth ones, zeros, one of a billion in its block, tiny ones."""
    random = np.random.default_rng(number)
    found = (random.standard_normal(numel) * 1e-3).astype(np.float32)
    found[:BLOCK] = 0
    found[3 * BLOCK : 4 * BLOCK] = 1e-9
    found[3 * BLOCK + 5] = 1.0
    found[5 * BLOCK : 6 * BLOCK] *= np.float32(1e-30)
    found[7 * BLOCK : 8 * BLOCK : 2] = 0
    return found


def set_gradient(states, unit, number):
    plane = states.tensor(unit, "grad")
    plane.copy_(torch.from_numpy(gradients(plane.numel(), number)))

"""Training with rounded moments, and how near its planes are."""

from __future__ import annotations

import numpy as np
import torch

from engine.config.optimizers import MOMENTS
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.moment_conversion import read_moments
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config


def moments_of(states: HostStates, unit: str) -> dict[str, np.ndarray]:
    """Both moments of a unit in fp32."""
    ranges = states.layouts[unit].state_ranges(states.optimizer)["exp_avg"]
    return {
        name: np.concatenate(
            [read_moments(states.array(unit, name).view(np.uint8), part, name) for part in ranges]
        )
        for name in MOMENTS
    }


def trained(choices, optimizer: str, dtype: str, steps: int, backend=None):
    """An engine after some steps, and the losses of these steps."""
    plain = plain_model(tiny_config("qwen3"))
    run = streamed(
        plain, choices, backend=backend, dtype=dtype, max_grad_norm=0.5, optimizer=optimizer
    )
    losses = []
    for step in range(1, steps + 1):
        batches = random_batches(choices.batching.micro_batches, seed=step % 3)
        run.engine.train_step(step, batches, 1e-2, lambda applied: losses.append(applied.loss))
    run.engine.drain()
    return run, losses


def assert_rounded_alike(device: HostStates, host: HostStates, unit: str) -> None:
    """After one step, nearly every byte is equal. Where a moment differs in its last bit, it may be
    rounded to the next number.
    """
    for name in MOMENTS:
        ours, theirs = (states.array(unit, name).view(np.uint8) for states in (device, host))
        assert theirs.any() and np.mean(ours != theirs) < 0.02, (unit, name)
        ours, theirs = (moments_of(states, unit)[name] for states in (device, host))
        assert np.abs(ours - theirs).max() <= 0.02 * np.abs(theirs).max(), (unit, name)
    ours, theirs = (states.tensor(unit, "weight_high").float() for states in (device, host))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)

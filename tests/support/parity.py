"""Streamed training of a small model against plain training with torch's optimizer."""

from __future__ import annotations

import pytest
import torch

from engine.config.optimizers import ADAMW, Optimizer
from engine.config.regularization import NO_REGULARIZATION, Regularization
from engine.planning.schedule.choices import PlanChoices
from tests.support.optimizers import decayed_in, exact_products, torch_optimizer
from tests.support.regularized import PlainStep, regularized_loss
from tests.support.tiny import Batch, plain_loss, plain_model, random_batches, streamed, tiny_config

STEPS = 10
RATE = 3e-3


def uneven(_: int, seed: int) -> list[Batch]:
    """Of three, two and two rows, each padded to a length of its own."""
    sizes = ((3, 12), (2, 9), (2, 5))
    return [random_batches(1, rows, length, 10 * seed + rows + length)[0] for rows, length in sizes]


@exact_products()
def compare(
    family: str,
    tied: bool,
    micro_batches: int,
    choices: PlanChoices,
    made=None,
    tokens: int = 24,
    regularization: Regularization = NO_REGULARIZATION,
    config=None,
    loss_of=plain_loss,
    optimizer: Optimizer = ADAMW,
) -> None:
    """`loss_of` is that of plain training without regularization."""
    config = config or tiny_config(family, tie_word_embeddings=tied)
    plain = plain_model(config)
    run = streamed(
        plain, choices, tokens=tokens, regularization=regularization, optimizer=optimizer
    )
    assert run.model.tied == tied
    decayed = decayed_in(run.model.layouts)
    oracle = torch_optimizer(dict(plain.named_parameters()), decayed, optimizer, RATE)
    names = {
        s.full_name: (u.name, s, o)
        for u in run.model.units
        for s, o in zip(u.layout.parameters, u.layout.offsets)
    }
    assert set(names) == {n for n, _ in plain.named_parameters()}
    for step in range(1, STEPS + 1):
        batches = (made or random_batches)(micro_batches, seed=step)
        device_updates = []
        run.engine.train_step(step, batches, RATE, device_updates.append)
        run.engine.drain()
        loss = loss_of(plain, batches)
        if regularization != NO_REGULARIZATION:
            loss = regularized_loss(plain, batches, PlainStep(regularization, step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        scale = min(1.0, 1.0 / (float(norm) + 1e-6))
        assert device_updates[0].loss == pytest.approx(loss.item(), rel=2e-5)
        assert device_updates[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
        for name, parameter in plain.named_parameters():
            unit, spec, offset = names[name]
            if unit in choices.updates.device_updated_units and unit in (
                "embed",
                "block 0",
                "block 1",
            ):
                parameter.grad.mul_(scale)
                continue  # updated from where it was summed: the weights at the end tell
            mine = run.host_states.tensor(unit, "grad")[offset : offset + spec.numel].view(
                spec.shape
            )
            error = (mine - parameter.grad).norm() / norm
            # After the first step the two sets of weights differ by rounding, which training
            # amplifies.
            bound = 1e-6 if step == 1 else 2e-5
            assert error < bound, (
                f"step {step}: gradient of {name} is off by {error:.1e} of the global norm"
            )
            parameter.grad.mul_(scale)
        oracle.step()
        oracle.zero_grad()
    for name, parameter in plain.named_parameters():
        unit, spec, _ = names[name]
        torch.testing.assert_close(
            run.host_states.parameters.master(unit, spec.name),
            parameter.detach(),
            rtol=1e-4,
            atol=2e-5,
            msg=lambda m: f"{name}: {m}",
        )
    run.close()

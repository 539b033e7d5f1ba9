"""A streamed engine and a plain model take the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.runtime.step.streaming_engine import StreamingEngine
from tests.support.tiny import Batch, plain_loss


def step_both(
    engine: StreamingEngine,
    plain: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    step: int,
) -> float:
    """Trains a step on both sides, with the rate of `optimizer` and gradients clipped to 1. Returns
    the streamed loss, which is the plain one.
    """
    device_updates: list[Any] = []
    engine.train_step(step, batches, optimizer.param_groups[0]["lr"], device_updates.append)
    engine.drain()
    loss = plain_loss(plain, batches)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert device_updates[0].loss == pytest.approx(loss.item(), rel=2e-5)
    return device_updates[0].loss

"""The planes that a plan leaves after steps that train adapters alone."""

from __future__ import annotations

import torch

from engine.config.adapters import Adapters
from engine.planning.schedule.choices import PlanChoices
from engine.training.weights.adapter_weights import initialize_adapters
from tests.support.tiny import plain_model, streamed, tiny_config

BASE = PlanChoices().changed(micro_batches=2)


def planes_after(
    choices: PlanChoices, adapters: Adapters, dtype: str, backend=None
) -> list[torch.Tensor]:
    """Every plane but gradients, after three steps that are submitted without draining."""
    plain = plain_model(tiny_config("qwen3"))
    run = streamed(plain, choices, dtype=dtype, parts=adapters, backend=backend)
    initialize_adapters(run.model, run.host_states, seed=7)
    return run.planes_after(2, steps=3)

"""Families whose blocks hand values to later blocks, and plans for training them."""

from __future__ import annotations

import torch

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.backend import Backend
from tests.support.families import tiny_family_config
from tests.support.tiny import plain_model, streamed

HANDING = ("gemma4_text", "zaya", "gemma3n_text", "glm_moe_dsa", "hy_v4")
BASE = PlanChoices().changed(micro_batches=2)
PLANS = {
    "all kept, one slot": dict(blocks_without_recompute=4, slots=1),
    "block inputs on the host": dict(offloaded_block_inputs=True),
    "pairs": dict(blocks_per_saved_input=2),
    "one resident, two kept": dict(blocks_kept_in_slots=1, blocks_without_recompute=2),
}


def planes_after(
    family: str, choices: PlanChoices, backend: Backend | None = None
) -> list[torch.Tensor]:
    plain = plain_model(tiny_family_config(family))
    run = streamed(plain, choices, backend=backend, dtype="bfloat16")
    return run.planes_after(choices.batching.micro_batches)

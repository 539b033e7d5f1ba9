"""Plans that train some units alone, and the planes that they leave."""

from __future__ import annotations

import torch

from engine.config.trained_parts import Parts
from engine.planning.schedule.choices import PlanChoices
from tests.support.tiny import plain_model, streamed, tiny_config

BASE = PlanChoices().changed(micro_batches=2)
PARTS = {
    "last block": Parts(last_blocks=1),
    "in the middle": Parts(("model.layers.1.mlp.*", "model.layers.2.self_attn.q_proj.*")),
    "around": Parts(("model.embed_tokens.weight", "model.layers.3.mlp.up_proj.*", "*.norm.weight")),
    "head": Parts(("model.norm.weight", "lm_head.weight")),
}


def planes_after(choices: PlanChoices, parts: Parts, backend=None, **how) -> list[torch.Tensor]:
    """Every plane but gradients, after two steps that are submitted without draining."""
    tied, dtype = how.pop("tied", False), how.pop("dtype", "float32")
    plain = plain_model(tiny_config("qwen3", num_hidden_layers=4, tie_word_embeddings=tied))
    run = streamed(
        plain, choices, backend=backend, dtype=dtype, parts=parts, max_grad_norm=0.5, **how
    )
    return run.planes_after(choices.batching.micro_batches)

"""Plans that keep gradients on the device, and the planes that they leave."""

from __future__ import annotations

import torch

from engine.planning.schedule.choices import EmbedAndHead
from tests.support.same_bits import DelayedBackend, planes_after

PLAN_FAMILIES = {
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "shared slot": dict(embed_and_head=EmbedAndHead.SHARED_SLOT),
    "both": dict(gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT),
    "pairs": dict(blocks_per_saved_input=2, slots=2),
    "all": dict(
        gradients_on_gpu=True,
        embed_and_head=EmbedAndHead.SHARED_SLOT,
        blocks_per_saved_input=2,
        slots=2,
    ),
}
EMBED_AND_HEAD = PLAN_FAMILIES["both"] | dict(embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS)
EMBED_AND_HEAD_FAMILIES = {
    "embed and head": EMBED_AND_HEAD,
    "embed and head, pairs": EMBED_AND_HEAD | PLAN_FAMILIES["pairs"],
}
TALL = 340
"""A vocabulary of this size makes a table of several chunks, which is larger than a block."""


def without_gradients(planes: list[torch.Tensor], dtype: str) -> list[torch.Tensor]:
    count = 5 if dtype == "bfloat16" else 4
    return [plane for place, plane in enumerate(planes) if place % count != count - 1]


def run(choices, late=(), dtype="bfloat16", backend=None, **options) -> list[torch.Tensor]:
    planes = planes_after(choices, backend or DelayedBackend(late), dtype=dtype, **options)
    return planes if choices.gradients.gradients_on_gpu else without_gradients(planes, dtype)

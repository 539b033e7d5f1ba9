"""Blocks that keep what attention returned have the bits of blocks whose attention runs again, and
its kernel runs once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine.plan.choices import PlanChoices
from engine.tiles.kept_attention import KERNELS, KeepsAttention, ReturnsAttention
from tests.engine.plan.test_laws import assert_same_bits, planes_after

pytestmark = pytest.mark.computing

ON_HOST = PlanChoices(micro_batches=2, tile_tokens=10, host_boundaries=True, boundary_rings=1)
FLOAT32, BF16 = 32 * 4 + 4 * 4, 32 * 2 + 4 * 4
"""Attention of a tiny model has 4 heads of 8 features."""


def keeping(blocks: int, of_token: int, **more) -> PlanChoices:
    return replace(ON_HOST, attention_blocks=blocks, attention_bytes=of_token, **more)


class Calls(TorchDispatchMode):
    """Counts how often kernels of attention run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in KERNELS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "of_token"), [("float32", FLOAT32), ("bfloat16", BF16)])
def test_no_bit_changes_whichever_blocks_keep_attention(dtype, of_token):
    right, counts = planes_after(ON_HOST, dtype=dtype), []
    for blocks in (0, 1, 3):
        with Calls() as calls:
            found = planes_after(keeping(blocks, of_token) if blocks else ON_HOST, dtype=dtype)
        assert_same_bits(found, right)
        counts.append(calls.count)
    # Two steps of two micro-batches: each of three blocks runs forward and is recomputed.
    assert counts == [24, 20, 12]

"""Blocks in tiles train as plain transformers does, and any plan gives the same bits."""

from __future__ import annotations

import pytest

from engine.plan.choices import PlanChoices
from tests.engine.runtime.test_parity import compare

pytestmark = pytest.mark.computing

TILES = PlanChoices(micro_batches=2, tile_tokens=10)


@pytest.mark.parametrize("family", ["llama","gpt2","mixtral","gemma3_text","qwen3_moe"])
def test_float32(family: str) -> None:
    compare(family, False, 2, TILES)

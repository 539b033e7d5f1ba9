"""How sampling shares the memory of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.planning.fit.sampling_memory import (
    PASS_TOKENS,
    blocks_kept,
    cache_room,
    pass_bytes_of_config,
)

GIB = 2**30
QWEN_7B = SimpleNamespace(hidden_size=3584, intermediate_size=18944, vocab_size=152064)
MIXTURE = SimpleNamespace(
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    vocab_size=152064,
)


@pytest.mark.parametrize(
    "free, many_rows, kept",
    [
        (40, False, 48),  # 27 of 40 GiB
        (40, True, 48),
        (23, True, 0),  # memory for rows saves more sweeps than blocks save of each
        (23, False, 15),  # half of it, beside the ends and two blocks under way
        (5, False, 0),
    ],
)
def test_blocks_stay_where_that_answers_faster(free, many_rows, kept):
    assert blocks_kept(free * GIB, 3 * GIB, [GIB // 2] * 48, many_rows) == kept


def test_a_pass_and_the_caches_share_what_is_free():
    of_pass = pass_bytes_of_config(QWEN_7B, 2)
    token = 57344
    for free in (4 * GIB, 8 * GIB, 100 * GIB):
        room = cache_room(free, token, of_pass)
        passed = room.pass_tokens * (token + of_pass.per_token) + of_pass.logits
        assert room.budget >= free // 2 and room.budget + passed <= free
    assert room.pass_tokens == PASS_TOKENS and room.budget > 90 * GIB


def test_experts_that_work_together_count_together():
    dense = SimpleNamespace(**{**vars(MIXTURE), "num_experts_per_tok": None})
    wide = SimpleNamespace(**{**vars(MIXTURE), "num_experts_per_tok": 16})
    of_mixture = pass_bytes_of_config(MIXTURE, 2)
    assert of_mixture == pass_bytes_of_config(dense, 2)  # 8 experts of 768 are as wide as 6144
    assert pass_bytes_of_config(wide, 2).per_token - of_mixture.per_token == 2 * 3 * 6144

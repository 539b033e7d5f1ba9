"""Blocks that keep what attention returned have the bits of blocks whose attention runs again, and
its kernel runs once.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as torch_functional

from engine.model.blocks import saved_attention
from engine.model.blocks.saved_attention import ReplaysAttention, SavesAttention
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import fixed_items, offloaded_input_bytes
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.saved_attention_sizes import attention_room, returned_bytes
from tests.support.attention_calls import AttentionCalls
from tests.support.same_bits import assert_same_bits, planes_after
from tests.support.sets import slow_but
from tests.support.tiny import plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing

ON_HOST = PlanChoices().changed(
    micro_batches=2, tile_tokens=10, offloaded_block_inputs=True, block_input_rings=1
)
ITEM = {"float32": 4, "bfloat16": 2}
SWEEP = "it trains more models; a plain run has one in bfloat16"


def keeping(blocks: int, dtype: str = "float32", **more) -> PlanChoices:
    """Attention of a tiny model has 4 heads of 8 features."""
    of_token = returned_bytes(32, 4, ITEM[dtype])
    return ON_HOST.changed(attention_blocks=blocks, attention_bytes=of_token, **more)


def counted(choices: PlanChoices, **more) -> tuple[list[torch.Tensor], int]:
    with AttentionCalls() as calls:
        planes = planes_after(choices, **more)
    return planes, calls.count


@pytest.mark.parametrize("dtype", slow_but(ITEM, ["bfloat16"], SWEEP))
def test_no_bit_changes_whichever_blocks_keep_attention(dtype):
    right = planes_after(ON_HOST, dtype=dtype)
    (one, many), (all_, few) = (counted(keeping(n, dtype), dtype=dtype) for n in (1, 3))
    assert_same_bits(one, right)
    assert_same_bits(all_, right)
    assert many - few == 2 * 2 * 2, "two blocks more, in two steps of two micro-batches"


@pytest.mark.slow(SWEEP)
@pytest.mark.parametrize("family", ["mixtral", "gemma3_text"])
def test_other_plans_and_families_keep_their_bits(family):
    right = planes_after(ON_HOST, family=family)
    assert_same_bits(planes_after(keeping(2, blocks_without_recompute=1), family=family), right)
    rounds = dict(micro_batches=4, rounds=2, main_grad="device", block_input_rings=2)
    in_rounds = ON_HOST.changed(**rounds)
    right, found = (planes_after(c, family=family) for c in (in_rounds, keeping(3, **rounds)))
    assert_same_bits(found, right)


def test_what_is_allocated_is_what_the_report_says():
    for choices in (keeping(1), keeping(2, blocks_without_recompute=1)):
        run = streamed(plain_model(tiny_config("llama")), choices, tokens=24)
        shape = shape_of(run.model)
        assert run.engine.block_input_bytes == offloaded_input_bytes(shape, choices, 24)
        more = attention_room(choices.activations.attention_bytes, 24)
        without = offloaded_input_bytes(shape, choices.changed(attention_blocks=0), 24)
        assert (
            run.engine.block_input_bytes
            == without + 2 * choices.activations.attention_blocks * more
        )
        shown = fixed_items(shape, choices, 24 * 32)
        assert sum(item.bytes for item in shown) == run.engine.state.fixed_bytes()
        run.close()


def heads(*shape: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def kept_of(room: torch.Tensor):
    with torch.no_grad(), SavesAttention(room) as keeping:
        torch_functional.scaled_dot_product_attention(*heads(1, 2, 8, 4), is_causal=True)
    return keeping.calls


def test_autograd_sees_the_tensors_that_were_kept():
    room = torch.zeros(attention_room(2 * 4 * 4 + 8, 8), dtype=torch.uint8)
    (call,) = kept_of(room)
    inputs = heads(1, 2, 8, 4)
    with AttentionCalls() as calls, ReplaysAttention(room, [call]):
        out = torch_functional.scaled_dot_product_attention(*inputs, is_causal=True)
    right = torch_functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(out, right) and calls.count == 0
    above = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(each, inputs, above) for each in (out, right))):
        assert torch.equal(one, other)


def test_attention_runs_again_where_it_could_not_be_kept():
    assert kept_of(torch.zeros(100, dtype=torch.uint8)) == [None], "there is no room"
    inputs = heads(1, 2, 8, 4)
    with ReplaysAttention(torch.zeros(0, dtype=torch.uint8), [None]):
        out = torch_functional.scaled_dot_product_attention(*inputs, is_causal=True)
    right = torch_functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(out, right)


@torch.library.custom_op("tests::drawing_attention", mutates_args={})
def drawing(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with dropout, as kernels of a GPU have it."""
    return query * torch.rand_like(query), query.sum(-1)


drawing.register_autograd(lambda ctx, above, _sums: above)


def test_dropout_behind_attention_draws_the_numbers_of_forward(monkeypatch):
    name = "tests::drawing_attention"
    monkeypatch.setattr(saved_attention, "KERNELS", {name: None})
    query, room = torch.ones(4, 8), torch.zeros(attention_room(36, 4), dtype=torch.uint8)
    generator = torch.random.get_rng_state()
    try:
        torch.manual_seed(3)
        with torch.no_grad(), SavesAttention(room) as keeping:
            right = torch_functional.dropout(torch.ops.tests.drawing_attention(query)[0], 0.5)
        torch.manual_seed(3)
        with ReplaysAttention(room, keeping.calls):
            found = torch_functional.dropout(torch.ops.tests.drawing_attention(query)[0], 0.5)
    finally:
        torch.random.set_rng_state(generator)
    assert torch.equal(found, right) and 0 < right.count_nonzero() < 32

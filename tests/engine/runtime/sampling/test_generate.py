"""Sampling: which token is picked, and greedy answers equal to transformers' generate."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from engine.config.settings import ModelConfig
from engine.errors import CacheError
from engine.model.blocks.block_inputs import BlockArguments
from engine.model.build.build import build_model
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.runtime.sampling.generate import AnswerLimits, Drawing, pick
from engine.runtime.sampling.kv_cache import cache_bytes
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.same_bits import DelayedBackend, assert_same_bits
from tests.support.tiny import FAMILIES, VOCAB, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing


def test_temperature_zero_is_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert pick(logits, 0.0, 1.0, torch.Generator()) == [1, 0]


def test_top_p_draws_only_from_the_nucleus_and_follows_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, -1)
    drawn = torch.tensor(pick(logits, 1.0, 0.75, torch.Generator().manual_seed(0)))
    counts = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(counts, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.02, rtol=0)
    everything = torch.bincount(
        torch.tensor(pick(logits, 1.0, 1.0, torch.Generator().manual_seed(0))), minlength=4
    )
    assert (everything > 0).all()


def test_a_lower_temperature_sharpens():
    logits = torch.log(torch.tensor([[0.6, 0.4]])).expand(20_000, -1)
    drawn = torch.tensor(pick(logits, 0.5, 1.0, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(
        (drawn == 0).float().mean(), torch.tensor(0.36 / 0.52), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_generate(family, tied):
    plain = plain_model(tiny_config(family, tie_word_embeddings=tied)).eval()
    run = streamed(plain, PlanChoices())
    assert run.sampler.cache_cost is not None
    assert run.sampler.generate(PROMPTS, AnswerLimits(20, {2})) == [
        plain_answer(plain, prompt, 20) for prompt in PROMPTS
    ]
    run.close()


@pytest.fixture
def qwen3():
    run = streamed(plain_model(tiny_config("qwen3")).eval(), PlanChoices())
    yield run
    run.close()


@pytest.fixture
def seen(monkeypatch):
    """Shapes of the hidden states that blocks are called with, in order."""
    shapes: list[tuple[int, int]] = []
    call = BlockArguments.call

    def counted(arguments, block, hidden):
        shapes.append(tuple(hidden.shape[:2]))
        return call(arguments, block, hidden)

    monkeypatch.setattr(BlockArguments, "call", counted)
    return shapes


def test_blocks_see_a_prompt_once_and_then_one_token_a_step(qwen3, seen):
    assert qwen3.sampler.cache_cost is not None
    seen.clear()
    answers = qwen3.sampler.generate(PROMPTS, AnswerLimits(5, set()))
    assert [len(answer) for answer in answers] == [5] * 4
    # Two of the prompts have one length: they are one micro-batch.
    assert seen == 3 * [(1, 3), (2, 7), (1, 11)] + 4 * 3 * [(1, 1), (2, 1), (1, 1)]
    seen.clear()
    # With so many new tokens, prompts of 3 and 7 tokens are one: the longer ones' last four are fed
    # a step each.
    assert [
        answer[:5] for answer in qwen3.sampler.generate(PROMPTS, AnswerLimits(8, set()))
    ] == answers
    assert seen == 3 * [(3, 3), (1, 11)] + 7 * 3 * [(3, 1), (1, 1)] + 4 * 3 * [(3, 1)]


def test_rows_that_end_leave_the_others_as_they_are(qwen3):
    free = qwen3.sampler.generate(PROMPTS, AnswerLimits(12, set()))
    ends = {free[0][4], free[2][2]}
    stopped = [
        next((answer[:n] for n, token in enumerate(answer) if token in ends), answer)
        for answer in free
    ]
    assert len({len(answer) for answer in stopped}) > 1
    assert qwen3.sampler.generate(PROMPTS, AnswerLimits(12, ends)) == stopped
    assert [
        qwen3.sampler.generate([prompt], AnswerLimits(12, ends))[0] for prompt in PROMPTS
    ] == stopped
    longest = qwen3.sampler.generate(PROMPTS, AnswerLimits(12, set(), 14))
    assert longest == [answer[: 14 - len(prompt)] for prompt, answer in zip(PROMPTS, free)]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_drawn_tokens_are_those_drawn_without_a_cache(qwen3, monkeypatch, top_p):
    cached = qwen3.sampler.generate(
        PROMPTS, AnswerLimits(20, set()), Drawing(temperature=0.7, top_p=top_p, seed=3)
    )
    assert (
        qwen3.sampler.generate(
            PROMPTS, AnswerLimits(20, set()), Drawing(temperature=0.7, top_p=top_p, seed=3)
        )
        == cached
    )
    assert (
        qwen3.sampler.generate(
            PROMPTS, AnswerLimits(20, set()), Drawing(temperature=0.7, top_p=top_p, seed=4)
        )
        != cached
    )
    monkeypatch.setitem(vars(qwen3.sampler), "cache_cost", None)
    assert (
        qwen3.sampler.generate(
            PROMPTS, AnswerLimits(20, set()), Drawing(temperature=0.7, top_p=top_p, seed=3)
        )
        == cached
    )


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_stream_is_the_answer_token_by_token(qwen3, monkeypatch, has_cache, temperature):
    drawn = Drawing(temperature=temperature, top_p=0.9, seed=5)
    expected = [
        qwen3.sampler.generate([prompt], AnswerLimits(12, {2}), drawn)[0] for prompt in PROMPTS
    ]
    if not has_cache:
        monkeypatch.setitem(vars(qwen3.sampler), "cache_cost", None)
    assert [
        list(qwen3.sampler.stream(prompt, AnswerLimits(12, {2}), drawn)) for prompt in PROMPTS
    ] == expected
    # Another answer, or anything else, between two tokens changes none of them.
    pairs = list(
        zip(
            *(
                qwen3.sampler.stream(prompt, AnswerLimits(12, set()), drawn)
                for prompt in PROMPTS[:2]
            )
        )
    )
    assert [list(row) for row in zip(*pairs)] == [
        qwen3.sampler.generate([prompt], AnswerLimits(12, set()), drawn)[0]
        for prompt in PROMPTS[:2]
    ]
    assert len(list(qwen3.sampler.stream(PROMPTS[0], AnswerLimits(12, set(), 5)))) == 2
    assert not list(qwen3.sampler.stream(PROMPTS[0], AnswerLimits(12, set(), 3)))


def test_a_stream_goes_on_without_a_cache_that_fails(qwen3, monkeypatch):
    expected = qwen3.sampler.generate([PROMPTS[1]], AnswerLimits(8, set()))[0]
    cached_logits, calls = qwen3.engine.cached_logits, []

    def failing(tokens, caches):
        calls.append(len(tokens))
        if len(calls) > 3:
            raise CacheError("no memory for this cache")
        return cached_logits(tokens, caches)

    monkeypatch.setattr(qwen3.engine, "cached_logits", failing)
    assert list(qwen3.sampler.stream(PROMPTS[1], AnswerLimits(8, set()))) == expected
    assert len(calls) == 4


@pytest.mark.parametrize(
    "choices",
    [dict(slots=1), dict(slots=3, prefetch_depth=2), dict(blocks_kept_in_slots=2)],
    ids=repr,
)
def test_any_plan_and_any_legal_order_answer_alike(qwen3, choices):
    expected = qwen3.sampler.generate(PROMPTS, AnswerLimits(8, {2}))
    plain = plain_model(tiny_config("qwen3")).eval()
    for backend in (
        None,
        *(
            DelayedBackend(lanes)
            for lanes in ((Lane.H2D,), (Lane.COMPUTE,), (Lane.H2D, Lane.COMPUTE))
        ),
    ):
        run = streamed(plain, PlanChoices().changed(**choices), backend=backend)
        assert run.sampler.generate(PROMPTS, AnswerLimits(8, {2})) == expected
        run.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_with_the_same_bits_after_sampling(dtype):
    planes = []
    for samples in (False, True):
        plain = plain_model(tiny_config("gpt2", resid_pdrop=0.1, attn_pdrop=0.1))
        run = streamed(plain, PlanChoices().changed(micro_batches=2), dtype=dtype)
        for step in range(1, 4):
            run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
            run.engine.drain()
            if samples:
                assert run.sampler.cache_cost is not None
                run.sampler.generate(PROMPTS, AnswerLimits(5, {2}), Drawing(temperature=0.5))
        planes.append(
            [
                run.host_states.tensor(unit.name, plane).clone()
                for unit in run.model.units
                for plane in run.host_states.planes
            ]
        )
        run.close()
    assert_same_bits(*planes)


def test_a_run_in_another_thread_keeps_the_generator_of_its_dropout(monkeypatch, qwen3):
    """Estimating a model and sampling from one draw nothing from torch's own generator and never
    set it.
    """

    def never(*_, **__):
        raise AssertionError("torch's generator was touched")

    before = torch.get_rng_state()
    for place in ("torch.random.fork_rng", "torch.manual_seed", "torch.set_rng_state"):
        monkeypatch.setattr(place, never)
    monkeypatch.setattr(qwen3.backend, "seed", never)
    build_model(
        tiny_config("gpt2", resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.3),
        ModelConfig(source="tiny", dtype="float32"),
    )
    qwen3.sampler.generate(PROMPTS, AnswerLimits(5, {2}), Drawing(temperature=0.7))
    qwen3.engine.evaluate(random_batches(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cache_that_loses_a_token_is_never_used(monkeypatch, seen):
    def forgetful(layer, keys, values, *args, **kwargs):
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys = torch.cat([layer.keys[:, :, 1:], keys], dim=-2)
        layer.values = torch.cat([layer.values[:, :, 1:], values], dim=-2)
        return layer.keys, layer.values

    plain = plain_model(tiny_config("qwen3")).eval()
    expected = [plain_answer(plain, prompt, 5) for prompt in PROMPTS]
    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    run = streamed(plain, PlanChoices())
    assert run.sampler.cache_cost is None
    seen.clear()
    assert run.sampler.generate(PROMPTS, AnswerLimits(5, {2})) == expected
    assert all(tokens > 1 for _, tokens in seen)
    run.close()


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_cache_that_fails_on_the_way_costs_no_answer(qwen3, monkeypatch, fails_at):
    """And gives its memory back before the rows go on without it."""
    expected = qwen3.sampler.generate(PROMPTS, AnswerLimits(8, {2}))
    cached_logits, last_logits, calls, given = (
        qwen3.engine.cached_logits,
        qwen3.engine.last_logits,
        [],
        [],
    )

    def failing(tokens, caches):
        calls.append(len(tokens))
        if len(calls) > fails_at:
            monkeypatch.setattr(BlockArguments, "call", refused)
        try:
            return cached_logits(tokens, caches)
        finally:
            monkeypatch.setattr(BlockArguments, "call", call)
            given.extend(weakref.ref(cache) for cache in caches if cache is not None)

    def without_cache(rows):
        assert given and all(cache() is None for cache in given)
        return last_logits(rows)

    def refused(*_):
        raise torch.OutOfMemoryError("no memory for this cache")

    call = BlockArguments.call
    monkeypatch.setattr(qwen3.engine, "cached_logits", failing)
    monkeypatch.setattr(qwen3.engine, "last_logits", without_cache)
    found: list[int] = []
    gc.collect()
    gc.disable()
    try:
        assert (
            qwen3.sampler.generate(
                PROMPTS, AnswerLimits(8, {2}), on_token=lambda row, _: found.append(row)
            )
            == expected
        )
    finally:
        gc.enable()
    assert len(calls) == fails_at + 1
    assert len(found) == sum(map(len, expected))


def test_caches_stay_within_half_of_the_free_memory(qwen3, monkeypatch):
    expected = qwen3.sampler.generate(PROMPTS, AnswerLimits(8, set()))
    cost = qwen3.sampler.cache_cost
    free = 2 * (cost.of(3 + 8 + 4) + cost.of(7 + 8 + 4))
    monkeypatch.setattr(qwen3.backend, "free_memory", lambda: free)
    cached_logits, held = qwen3.engine.cached_logits, []

    def watched(tokens, caches):
        logits = cached_logits(tokens, caches)
        held.append(sum(map(cache_bytes, caches)))
        return logits

    monkeypatch.setattr(qwen3.engine, "cached_logits", watched)
    assert qwen3.sampler.generate(PROMPTS, AnswerLimits(8, set())) == expected
    # The first two rows in one wave, twelve passes; the third and the fourth each alone.
    assert len(held) == 12 + 8 + 8 and max(held) <= free // 2
    monkeypatch.setattr(qwen3.backend, "free_memory", lambda: 100)
    held.clear()
    assert qwen3.sampler.generate(PROMPTS, AnswerLimits(8, set())) == expected
    assert not held


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cache_takes_more_than_its_cost(family):
    run = streamed(plain_model(tiny_config(family)).eval(), PlanChoices())
    for rows, length in ((1, 5), (3, 20), (2, 40)):
        caches = [None]
        ids = np.random.default_rng(0).integers(3, VOCAB, (rows, length))
        run.engine.cached_logits([ids[:, : length - 1]], caches)
        run.engine.cached_logits([ids[:, length - 1 :]], caches)
        assert 0 < cache_bytes(caches[0]) <= rows * run.sampler.cache_cost.of(length)
    run.close()

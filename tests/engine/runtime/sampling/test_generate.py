"""Sampling: greedy answers equal transformers' generate, and every way of decoding gives the same
answers.
"""

from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from engine.config.settings import ModelConfig
from engine.errors import CacheError
from engine.model.blocks.block_inputs import BlockArguments
from engine.model.build.build import build_model
from engine.planning.fit.sampling_memory import CacheCost
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.drawing import Drawing
from engine.runtime.sampling.kv_cache import NoCache, cache_bytes
from engine.runtime.sampling.rows_cache import RowsCache
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.same_bits import DelayedBackend, assert_same_bits
from tests.support.tiny import FAMILIES, VOCAB, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing


NOT_TO_BE_USED = NoCache("it is not to be used")
WAYS = ("one cache", "the model's caches", "no cache")


def decode(sampler, way: str) -> None:
    """Makes a sampler decode in one of `WAYS`, whatever its trials have found."""
    known = vars(sampler)
    known.pop("rows_cost", None)
    known.pop("cache_cost", None)
    if way != "one cache":
        known["rows_cost"] = NOT_TO_BE_USED
    if way == "no cache":
        known["cache_cost"] = NOT_TO_BE_USED


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_generate(family, tied):
    plain = plain_model(tiny_config(family, tie_word_embeddings=tied)).eval()
    run = streamed(plain, PlanChoices())
    assert isinstance(run.sampler.rows_cost, CacheCost)
    assert isinstance(run.sampler.cache_cost, CacheCost) and not run.sampler.slow_note
    expected = [plain_answer(plain, prompt, 20) for prompt in PROMPTS]
    for way in WAYS:
        decode(run.sampler, way)
        assert run.sampler.generate(PROMPTS, AnswerLimits(20, {2})) == expected
    run.close()


@pytest.fixture
def qwen3():
    run = streamed(plain_model(tiny_config("qwen3")).eval(), PlanChoices())
    yield run
    run.close()


@pytest.fixture
def grouped(qwen3):
    """A run that decodes with the model's own caches."""
    decode(qwen3.sampler, "the model's caches")
    return qwen3


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


def test_blocks_see_a_prompt_once_and_then_one_token_a_step(grouped, seen):
    assert isinstance(grouped.sampler.cache_cost, CacheCost)
    seen.clear()
    answers = grouped.sampler.generate(PROMPTS, AnswerLimits(5, set()))
    assert [len(answer) for answer in answers] == [5] * 4
    # Two of the prompts have one length: they are one micro-batch.
    assert seen == 3 * [(1, 3), (2, 7), (1, 11)] + 4 * 3 * [(1, 1), (2, 1), (1, 1)]
    seen.clear()
    # With so many new tokens, prompts of 3 and 7 tokens are one: the longer ones' last four are fed
    # a step each.
    assert [
        answer[:5] for answer in grouped.sampler.generate(PROMPTS, AnswerLimits(8, set()))
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
def test_drawn_tokens_are_those_drawn_without_a_cache(qwen3, top_p):
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
    for way in WAYS[1:]:
        decode(qwen3.sampler, way)
        assert (
            qwen3.sampler.generate(
                PROMPTS, AnswerLimits(20, set()), Drawing(temperature=0.7, top_p=top_p, seed=3)
            )
            == cached
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_stream_is_the_answer_token_by_token(qwen3, way, temperature):
    drawn = Drawing(temperature=temperature, top_p=0.9, seed=5)
    expected = [
        qwen3.sampler.generate([prompt], AnswerLimits(12, {2}), drawn)[0] for prompt in PROMPTS
    ]
    decode(qwen3.sampler, way)
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


def test_a_stream_goes_on_without_a_cache_that_fails(grouped, monkeypatch):
    expected = grouped.sampler.generate([PROMPTS[1]], AnswerLimits(8, set()))[0]
    cached_logits, calls = grouped.engine.cached_logits, []

    def failing(tokens, caches):
        calls.append(len(tokens))
        if len(calls) > 3:
            raise CacheError("no memory for this cache")
        return cached_logits(tokens, caches)

    monkeypatch.setattr(grouped.engine, "cached_logits", failing)
    assert list(grouped.sampler.stream(PROMPTS[1], AnswerLimits(8, set()))) == expected
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
        keys, values = keys.clone(), values.clone()
        keys[:, :, :1] = values[:, :, :1] = 0
        if layer.keys.numel():
            keys = torch.cat([layer.keys, keys], dim=-2)
            values = torch.cat([layer.values, values], dim=-2)
        layer.keys, layer.values = keys, values
        return layer.keys, layer.values

    plain = plain_model(tiny_config("qwen3")).eval()
    expected = [plain_answer(plain, prompt, 5) for prompt in PROMPTS]
    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    run = streamed(plain, PlanChoices())
    assert re.fullmatch(
        r"Answers of qwen3 models are slow, .* cannot be used \(logits with it differ by .* %\)\.",
        run.sampler.slow_note,
    )
    seen.clear()
    assert run.sampler.generate(PROMPTS, AnswerLimits(5, {2})) == expected
    assert all(tokens > 1 for _, tokens in seen)
    run.close()


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_cache_that_fails_on_the_way_costs_no_answer(grouped, monkeypatch, fails_at):
    """And gives its memory back before the rows go on without it."""
    expected = grouped.sampler.generate(PROMPTS, AnswerLimits(8, {2}))
    cached_logits, last_logits, calls, given = (
        grouped.engine.cached_logits,
        grouped.engine.last_logits,
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
    monkeypatch.setattr(grouped.engine, "cached_logits", failing)
    monkeypatch.setattr(grouped.engine, "last_logits", without_cache)
    found: list[int] = []
    gc.collect()
    gc.disable()
    try:
        assert (
            grouped.sampler.generate(
                PROMPTS, AnswerLimits(8, {2}), on_token=lambda row, _: found.append(row)
            )
            == expected
        )
    finally:
        gc.enable()
    assert len(calls) == fails_at + 1
    assert len(found) == sum(map(len, expected))


def test_memory_of_rows_is_free_once_it_is_not_needed(qwen3, monkeypatch):
    """No garbage collection is waited for: the next decoding plans with the memory at once."""
    made: list[weakref.ref] = []
    empty = RowsCache._empty

    def watched(cache, like):
        tensor = empty(cache, like)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(RowsCache, "_empty", watched)
    assert isinstance(qwen3.sampler.rows_cost, CacheCost)
    made.clear()
    a_cache = 2 * len(qwen3.engine.model.blocks)
    gc.collect()
    gc.disable()
    try:
        with qwen3.sampler.decoding() as decoding:
            decoding.add(PROMPTS[0], AnswerLimits(8, set()))
            decoding.step()
            assert len(made) == a_cache and all(each() is not None for each in made)
            for prompt in PROMPTS:
                decoding.add(prompt, AnswerLimits(8, set()))
            decoding.step()
            assert len(made) == 2 * a_cache  # it has grown
            assert all(each() is None for each in made[:a_cache])
        assert all(each() is None for each in made)
    finally:
        gc.enable()


def test_caches_stay_within_half_of_the_free_memory(grouped, monkeypatch):
    expected = grouped.sampler.generate(PROMPTS, AnswerLimits(8, set()))
    cost = grouped.sampler.cache_cost
    free = 2 * (cost.of(3 + 8 + 4) + cost.of(7 + 8 + 4))
    monkeypatch.setattr(grouped.backend, "free_memory", lambda: free)
    cached_logits, held = grouped.engine.cached_logits, []

    def watched(tokens, caches):
        logits = cached_logits(tokens, caches)
        held.append(sum(map(cache_bytes, caches)))
        return logits

    monkeypatch.setattr(grouped.engine, "cached_logits", watched)
    assert grouped.sampler.generate(PROMPTS, AnswerLimits(8, set())) == expected
    # The first two rows in one wave, twelve passes; the third and the fourth each alone.
    assert len(held) == 12 + 8 + 8 and max(held) <= free // 2
    monkeypatch.setattr(grouped.backend, "free_memory", lambda: 100)
    held.clear()
    assert grouped.sampler.generate(PROMPTS, AnswerLimits(8, set())) == expected
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


# ---------------------------------------------------------------------- one cache for all rows


def test_a_shared_prompt_is_computed_once_and_then_a_token_a_row(qwen3, seen):
    assert isinstance(qwen3.sampler.rows_cost, CacheCost)
    seen.clear()
    prompts = [PROMPTS[1]] * 3 + [PROMPTS[3]]
    answers = qwen3.sampler.generate(prompts, AnswerLimits(4, set()))
    # Prompts of different lengths share a micro-batch; its rows are padded to 11 tokens.
    assert seen == 3 * [(2, 11)] + 3 * 3 * [(4, 1)]
    assert answers[0] == answers[1] == answers[2]


def test_rows_come_and_go_without_changing_the_others(qwen3):
    expected = [qwen3.sampler.generate([prompt], AnswerLimits(9, {2}))[0] for prompt in PROMPTS]
    with qwen3.sampler.decoding() as decoding:
        answers: dict[int, list[int]] = {}
        finished = {}

        def step():
            for sampled in decoding.step():
                finished[sampled.row] = sampled.finish
                if sampled.finish != "stop":
                    answers.setdefault(sampled.row, []).append(sampled.token)

        rows = []
        for prompt in PROMPTS:
            rows.append(decoding.add(prompt, AnswerLimits(9, {2})))
            cancelled = decoding.add(PROMPTS[0], AnswerLimits(50, set()))
            step()
            decoding.cancel(cancelled)
        late = decoding.add(PROMPTS[2], AnswerLimits(9, {2}))
        while not decoding.is_idle:
            step()
        assert [answers[row] for row in rows] == expected
        assert answers[late] == expected[2]
        assert all(len(answers[row]) <= 1 for row in answers if row not in (*rows, late))
        assert {finished[row] for row in rows} <= {"stop", "length"}


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_those_of_a_pass_over_the_whole_row(qwen3, way):
    decode(qwen3.sampler, way)
    found = []
    with qwen3.sampler.decoding() as decoding:
        for number, prompt in enumerate(PROMPTS):
            decoding.add(prompt, AnswerLimits(6, set()), Drawing(0.9, seed=number), number)
        while not decoding.is_idle:
            found += decoding.step()
    for number, prompt in enumerate(PROMPTS):
        own = [each for each in found if each.row == number]
        row = [*prompt, *(each.token for each in own)]
        logits = qwen3.engine.last_logits([row[:end] for end in range(len(prompt), len(row))])
        logs = torch.log_softmax(logits, -1)
        assert [each.logprob for each in own] == pytest.approx(
            [log[each.token].item() for log, each in zip(logs, own)], abs=1e-4
        )
        for log, each in zip(logs, own):
            assert [token for token, _ in each.top] == log.topk(number).indices.tolist()


def test_more_rows_than_the_memory_takes_wait_for_places(qwen3, monkeypatch, seen):
    prompts = PROMPTS * 3
    expected = qwen3.sampler.generate(prompts, AnswerLimits(8, {2}))
    # Three rows of a cache of 64 positions, and half of the free memory.
    monkeypatch.setattr(
        qwen3.backend, "free_memory", lambda: 2 * 3 * qwen3.sampler.rows_cost.of(64)
    )
    seen.clear()
    assert qwen3.sampler.generate(prompts, AnswerLimits(8, {2})) == expected
    assert max(rows for rows, _ in seen) == 3
    # A row that would need more than all of it is answered without a cache.
    seen.clear()
    assert len(qwen3.sampler.generate(PROMPTS[:1], AnswerLimits(200, set()))[0]) == 200
    assert all(tokens > 1 for _, tokens in seen)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_cache_of_rows_that_fails_on_the_way_costs_no_answer(qwen3, monkeypatch, fails_at):
    expected = qwen3.sampler.generate(PROMPTS, AnswerLimits(8, {2}))
    next_logits, calls = qwen3.engine.next_logits, []

    def failing(*given):
        calls.append(given)
        if len(calls) >= fails_at:
            raise CacheError("no memory for this cache")
        return next_logits(*given)

    monkeypatch.setattr(qwen3.engine, "next_logits", failing)
    assert qwen3.sampler.generate(PROMPTS, AnswerLimits(8, {2})) == expected
    assert len(calls) == fails_at


def test_a_sliding_window_is_that_of_each_row():
    config = tiny_config("gemma3_text", sliding_window=5)
    plain = plain_model(config).eval()
    run = streamed(plain, PlanChoices(), config=config)
    assert isinstance(run.sampler.rows_cost, CacheCost)
    assert run.sampler.generate(PROMPTS, AnswerLimits(20, {2})) == [
        plain_answer(plain, prompt, 20) for prompt in PROMPTS
    ]
    run.close()


# ---------------------------------------------------------------------- recorded steps


class ReplayingRecorder:
    """Records a step by keeping its work, and replays it by running the work again, over the rows
    and positions that it was recorded with.
    """

    def __init__(self, monkeypatch):
        self.recorded = self.replayed = 0
        self._entered = None
        enter = RowsCache.enter

        def entered(cache, at, positions):
            self._entered = lambda: enter(cache, at, positions)
            enter(cache, at, positions)

        monkeypatch.setattr(RowsCache, "enter", entered)

    def record(self, work):
        self.recorded += 1
        return _Replayed(self, self._entered, work)

    def wait(self):
        """Nothing runs on its own."""

    clear = wait


class _Replayed:
    def __init__(self, recorder, enter, work):
        self._recorder, self._enter, self._work = recorder, enter, work

    def replay(self):
        self._recorder.replayed += 1
        self._enter()
        self._work()


def test_recorded_steps_draw_the_same_tokens(monkeypatch):
    """Rows come, end and leave gaps while a step is always under way."""
    run = streamed(
        plain_model(tiny_config("qwen3")).eval(), PlanChoices().changed(blocks_kept_in_slots=3)
    )
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 90, random.integers(2, 30)).tolist() for _ in range(40)]
    limits = [AnswerLimits(int(random.integers(1, 40)), {2}) for _ in prompts]

    def answers():
        found = {}
        with run.sampler.decoding() as decoding:
            for number, (prompt, limit) in enumerate(zip(prompts, limits)):
                drawing = Drawing(0.9, top_k=number % 2 * 5, seed=number)
                decoding.add(prompt, limit, drawing if number % 3 else Drawing(), number % 4)
                while decoding.is_idle is False and number % 7 == 6 and len(found) < number:
                    for each in decoding.step():
                        found.setdefault(each.row, []).append(each)
            while not decoding.is_idle:
                for each in decoding.step():
                    found.setdefault(each.row, []).append(each)
        return found

    expected = answers()
    recorder = ReplayingRecorder(monkeypatch)
    vars(run.sampler)["_recorder"] = recorder
    found = answers()
    assert recorder.recorded > 1 and recorder.replayed > 10
    assert found.keys() == expected.keys() == set(range(40))
    for row, own in expected.items():
        assert [each.token for each in found[row]] == [each.token for each in own]
        assert found[row][-1].finish == own[-1].finish
        assert [each.logprob for each in found[row]] == pytest.approx(
            [each.logprob for each in own], abs=1e-4
        )
        assert [[token for token, _ in each.top] for each in found[row]] == [
            [token for token, _ in each.top] for each in own
        ]
    run.close()

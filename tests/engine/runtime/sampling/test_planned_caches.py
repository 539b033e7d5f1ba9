"""What the fit report says of answers is what the sampler then takes."""

from __future__ import annotations

import pytest

from engine.model.build.measure_shape import shape_of
from engine.planning.fit.sampling_memory import (
    CacheCost,
    host_cache_room,
    positions_for,
    shared_bytes,
)
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.kv_cache import cache_bytes
from tests.support.families import tiny_family_config
from tests.support.tiny import plain_model, streamed

pytestmark = pytest.mark.computing
PROMPTS = [[5, 9, 11, number + 3] for number in range(9)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3n_text", "mixtral", "deepseek_v3", "mamba"])
def test_the_cache_is_as_large_as_the_shape_of_the_model_says(family, dtype):
    config = tiny_family_config(family)
    run = streamed(plain_model(config).eval(), PlanChoices(), config=config, dtype=dtype)
    shape = shape_of(run.model)
    predicted = CacheCost(0, shape.cache_numel * shape.item_bytes)
    if family == "mamba":
        assert not shape.cache_numel and not isinstance(run.sampler.rows_cost, CacheCost)
    else:
        assert run.sampler.rows_cost == predicted
    run.close()


def test_a_cache_keeps_to_its_room_whatever_rows_follow_others(monkeypatch):
    """Many short rows, then few long ones while a short one goes on, then many short ones."""
    run = streamed(plain_model(tiny_family_config("qwen3")).eval(), PlanChoices())
    kinds = [(PROMPTS, 3), ([PROMPTS[4]], 45), (PROMPTS[:2], 180), (PROMPTS, 4)]
    alone = [run.sampler.generate(prompts, AnswerLimits(most, set())) for prompts, most in kinds]
    cost = run.sampler.rows_cost
    room = 10 * cost.of(64)
    monkeypatch.setattr(run.backend, "free_memory", lambda: 2 * room)
    answers, sizes = {}, []
    with run.sampler.decoding() as decoding:
        waiting = [[decoding.add(p, AnswerLimits(m, set())) for p in ps] for ps, m in kinds[:2]]
        for steps, (prompts, most) in zip((8, 185), kinds[2:]):
            for _ in range(steps):
                for each in decoding.step():
                    answers.setdefault(each.row, []).append(each.token)
                cache = decoding._decoder._cache
                sizes.append((cache.rows, cache.positions))
            waiting.append([decoding.add(p, AnswerLimits(most, set())) for p in prompts])
        while not decoding.is_idle:
            for each in decoding.step():
                answers.setdefault(each.row, []).append(each.token)
            cache = decoding._decoder._cache
            sizes.append((cache.rows, cache.positions))
    assert [[answers[row] for row in rows] for rows in waiting] == alone
    assert max(rows * cost.of(positions) for rows, positions in sizes) <= room
    assert list(dict.fromkeys(sizes)) == [(10, 64), (3, 192), (9, 64)]
    run.close()


@pytest.mark.parametrize(("rows", "allocated"), [(9, 9), (40, 16), (3, 3)])
def test_as_many_rows_are_drawn_at_once_as_predicted(monkeypatch, rows, allocated):
    """Memory for `rows` of them: all, with room to grow, and some."""
    run = streamed(plain_model(tiny_family_config("qwen3")).eval(), PlanChoices())
    shape = shape_of(run.model)
    cost = CacheCost(0, shape.cache_numel * shape.item_bytes)
    longest = len(PROMPTS[0]) + 70
    free = 2 * rows * cost.of(positions_for(longest))
    monkeypatch.setattr(run.backend, "free_memory", lambda: free)
    room = host_cache_room(free)
    at_once = room.at_once(cost, len(PROMPTS), longest)
    with run.sampler.decoding() as decoding:
        for prompt in PROMPTS:
            decoding.add(prompt, AnswerLimits(70, set()))
        decoding.step()
        decoder = decoding._decoder
        assert len(decoder.rows) == at_once == min(rows, len(PROMPTS))
        taken = cache_bytes([[layer.keys, layer.values] for layer in decoder._cache.layers])
        assert room.allocated(cost, at_once, longest) == decoder._cache.rows == allocated
        assert taken == shared_bytes(cost, allocated, longest) <= free // 2
    run.close()

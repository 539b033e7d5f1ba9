"""Sampling on a GPU: answers with a key-value cache are those without one, also where the cache
does not fit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cuda_backend import CudaBackend
from engine.runtime.sampling.answers import AnswerLimits
from tests.support.tiny import FAMILIES, VOCAB, plain_model, streamed, tiny_config

pytestmark = pytest.mark.gpu

PROMPTS = [
    [5, 9, 11],
    [7, 3, 8, 20, 33, 4, 50],
    [12, 60, 4, 90, 41, 6, 77],
    [6, 7, 8, 9, 10, 21, 22, 23, 24, 25, 26],
]


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_answers_equal_those_without_a_cache(family, monkeypatch):
    run = streamed(plain_model(tiny_config(family)).eval(), PlanChoices(), backend=CudaBackend())
    assert run.sampler.cache_cost is not None
    cached = run.sampler.generate(PROMPTS, AnswerLimits(20, {2}))
    monkeypatch.setitem(vars(run.sampler), "cache_cost", None)
    assert run.sampler.generate(PROMPTS, AnswerLimits(20, {2})) == cached
    run.close()


def test_a_cache_that_runs_out_of_device_memory_costs_no_answer(monkeypatch):
    """64 blocks' caches of 2,000 tokens take 2 x 64 x 2,000 x 512 floats, 500 MiB; a pass without
    them takes less.
    """
    plain = plain_model(
        tiny_config(
            "qwen3",
            hidden_size=256,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            num_hidden_layers=64,
            max_position_embeddings=4096,
        )
    ).eval()
    prompt = np.random.default_rng(0).integers(3, VOCAB, 2000).tolist()
    backend = CudaBackend()
    run = streamed(plain, PlanChoices(), backend=backend)
    expected = run.sampler.generate([prompt], AnswerLimits(3, set()))
    needs = {}
    for name, job in {
        "pass": lambda: run.engine.last_logits([[*prompt, 3, 3]]),
        "cache": lambda: run.engine.cached_logits([np.array([prompt])], [None]),
    }.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        job()
        needs[name] = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    assert needs["cache"] > needs["pass"] + (100 << 20), needs
    shapes, call = [], BlockArguments.call
    monkeypatch.setattr(
        BlockArguments,
        "call",
        lambda arguments, block, hidden: (
            shapes.append(hidden.shape[1]),
            call(arguments, block, hidden),
        )[1],
    )
    backend.limit_memory(needs["pass"] + (64 << 20))
    try:
        # What the free memory allows is heeded; and where it promised too much, the rows go on
        # without a cache.
        assert run.sampler.generate([prompt], AnswerLimits(3, set())) == expected
        assert min(shapes) == 2000
        shapes.clear()
        monkeypatch.setattr(backend, "free_memory", lambda: 1 << 40)
        assert run.sampler.generate([prompt], AnswerLimits(3, set())) == expected
        assert len(shapes) > 3 * 64 and min(shapes) == 2000, "the cache was meant not to fit"
    finally:
        backend.limit_memory(backend.memory()["total"])
        run.close()

"""Sampling on a GPU: answers with a key-value cache are those without one, also where the cache
does not fit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.planning.fit.sampling_memory import CacheCost
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cuda_backend import CudaBackend
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.drawing import Drawing
from engine.runtime.sampling.kv_cache import NoCache
from tests.support.tiny import FAMILIES, VOCAB, plain_model, streamed, tiny_config

pytestmark = pytest.mark.gpu

NOT_TO_BE_USED = NoCache("it is not to be used")
PROMPTS = [
    [5, 9, 11],
    [7, 3, 8, 20, 33, 4, 50],
    [12, 60, 4, 90, 41, 6, 77],
    [6, 7, 8, 9, 10, 21, 22, 23, 24, 25, 26],
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_decoding_gives_the_same_answers(family, dtype):
    """With recorded steps, with steps that fetch weights, with the model's own caches, and without
    any. In bfloat16 the ways differ by rounding, so the logarithms are compared as far as tokens
    agree.
    """
    plain = plain_model(tiny_config(family)).eval()
    run = streamed(
        plain, PlanChoices().changed(blocks_kept_in_slots=3), backend=CudaBackend(), dtype=dtype
    )
    assert isinstance(run.sampler.rows_cost, CacheCost)
    assert isinstance(run.sampler.cache_cost, CacheCost)
    drawing = Drawing(0.8, top_p=0.9, min_p=0.02)
    answers = {}
    for way in ("recorded", "rows", "groups", "uncached"):
        known = vars(run.sampler)
        if way == "groups":
            known["rows_cost"] = NOT_TO_BE_USED
        if way == "uncached":
            known["cache_cost"] = NOT_TO_BE_USED
        with run.sampler.decoding() as decoding:
            if way == "rows":
                decoding._decoder._can_record = False
            for number, prompt in enumerate(PROMPTS * 3):
                drawn = drawing.with_seed(number) if number % 2 else Drawing()
                decoding.add(prompt, AnswerLimits(20, {2}), drawn)
            found = []
            while not decoding.is_idle:
                found += decoding.step()
            if way == "recorded":
                kept = [each for each in decoding._decoder._recordings.values() if each]
                # In float32 a mixture reads on the host which experts have tokens.
                reads = dtype == "float32" and family in ("mixtral", "qwen3_moe")
                assert bool(kept) == (not reads)
        answers[way] = {
            row: [(each.token, each.logprob) for each in found if each.row == row]
            for row in range(3 * len(PROMPTS))
        }
    for way in ("rows", "groups", "uncached"):
        compared = 0
        for row, expected in answers["recorded"].items():
            for (token, logprob), (other, theirs) in zip(expected, answers[way][row]):
                if token != other:
                    assert dtype == "bfloat16", (way, row)
                    break
                assert logprob == pytest.approx(theirs, abs=1e-3 if dtype == "float32" else 0.05)
                compared += 1
        assert compared > 60, (way, compared)
    run.close()


def test_steps_are_recorded_again_whenever_the_cache_has_grown():
    """A server's requests come one after another. A step that is not recorded takes many times as
    long.
    """
    run = streamed(
        plain_model(tiny_config("qwen3")).eval(),
        PlanChoices().changed(blocks_kept_in_slots=3),
        backend=CudaBackend(),
    )
    expected = run.sampler.generate(PROMPTS * 3, AnswerLimits(30, set()))
    found: dict[int, list[int]] = {}
    with run.sampler.decoding() as decoding:
        kept = []
        for prompt in PROMPTS * 3:
            decoding.add(prompt, AnswerLimits(30, set()))
            for _ in range(4):
                for each in decoding.step():
                    found.setdefault(each.row, []).append(each.token)
            kept.append(len(decoding._decoder._recordings))
        assert all(kept), kept
        while not decoding.is_idle:
            for each in decoding.step():
                found.setdefault(each.row, []).append(each.token)
    assert [found[row] for row in range(len(expected))] == expected
    run.close()


def test_nothing_is_left_on_the_device():
    run = streamed(
        plain_model(tiny_config("qwen3")).eval(),
        PlanChoices().changed(blocks_kept_in_slots=3),
        backend=CudaBackend(),
    )
    # Torch's libraries keep some workspace of the first time.
    run.sampler.generate(PROMPTS * 30, AnswerLimits(40, set()))
    before = torch.cuda.memory_allocated()
    run.sampler.generate(PROMPTS * 30, AnswerLimits(40, set()))
    assert torch.cuda.memory_allocated() == before
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
    vars(run.sampler)["rows_cost"] = NOT_TO_BE_USED  # this is about the model's own cache
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

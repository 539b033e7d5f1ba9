"""Sampling: which token is picked, and greedy answers equal to transformers' generate."""

from __future__ import annotations

import pytest
import torch

from engine.generate import generate, pick
from engine.planner import PlanChoices
from tests.tiny import FAMILIES, plain_model, streamed, tiny_config


def test_temperature_zero_is_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert pick(logits, 0.0, 1.0, torch.Generator()) == [1, 0]


def test_top_p_draws_only_from_the_nucleus_and_follows_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, -1)
    drawn = torch.tensor(pick(logits, 1.0, 0.75, torch.Generator().manual_seed(0)))
    counts = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(counts, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.02, rtol=0)
    everything = torch.bincount(torch.tensor(pick(logits, 1.0, 1.0, torch.Generator().manual_seed(0))), minlength=4)
    assert (everything > 0).all()


def test_a_lower_temperature_sharpens():
    logits = torch.log(torch.tensor([[0.6, 0.4]])).expand(20_000, -1)
    drawn = torch.tensor(pick(logits, 0.5, 1.0, torch.Generator().manual_seed(0)))
    torch.testing.assert_close((drawn == 0).float().mean(), torch.tensor(0.36 / 0.52), atol=0.02, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_generate(family):
    plain = plain_model(tiny_config(family)).eval()
    run = streamed(plain, PlanChoices())
    prompts = [[5, 9, 11], [7, 3, 8, 20, 33, 4, 50]]
    ours = generate(run.engine, prompts, 8, {2})
    for prompt, answer in zip(prompts, ours):
        out = plain.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0)
        theirs = out[0, len(prompt):].tolist()
        assert answer == (theirs[:theirs.index(2)] if 2 in theirs else theirs)
    run.close()

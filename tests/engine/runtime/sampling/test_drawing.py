"""Tokens are drawn from the distribution that transformers' `generate` draws from, each row with
its own random numbers.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.runtime.sampling.drawing import Drawing, DrawingState, Work, uniform

DRAWS = 20_000
LOGITS = torch.log(torch.tensor([0.4, 0.02, 0.25, 0.13, 0.01, 0.09, 0.1]))


def drawn(logits, drawings, top=False):
    """What is drawn for each row of logits, with the drawing of the same place."""
    state = DrawingState(len(drawings), torch.device("cpu"))
    state.set(range(len(drawings)), drawings, [0] * len(drawings))
    return state.draw(logits, max(each.work for each in drawings), top)


def probabilities_of_transformers(drawing: Drawing) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(drawing.temperature)])
    if drawing.top_k:
        warpers.append(TopKLogitsWarper(drawing.top_k))
    if drawing.top_p < 1:
        warpers.append(TopPLogitsWarper(drawing.top_p))
    if drawing.min_p:
        warpers.append(MinPLogitsWarper(drawing.min_p))
    return torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.long), LOGITS[None]), -1)[0]


@pytest.mark.parametrize(
    "drawing",
    [
        Drawing(1.0),
        Drawing(0.5),
        Drawing(1.7),
        Drawing(1.0, top_p=0.7),
        Drawing(1.0, top_k=3),
        Drawing(1.0, min_p=0.3),
        Drawing(0.8, top_p=0.85, top_k=4, min_p=0.05),
        Drawing(1.0, top_k=1),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_of_generate(drawing):
    rows = LOGITS.expand(DRAWS, -1)
    tokens = drawn(rows, [drawing.with_seed(seed) for seed in range(DRAWS)]).tokens
    found = torch.bincount(tokens, minlength=len(LOGITS)) / DRAWS
    expected = probabilities_of_transformers(drawing)
    assert ((found > 0) == (expected > 0)).all()
    # Five standard deviations of a share.
    bound = 5 * (expected * (1 - expected) / DRAWS).sqrt()
    assert ((found - expected).abs() <= bound).all(), (found, expected)


def test_temperature_zero_is_the_likeliest_token_beside_rows_that_draw():
    rows = LOGITS.expand(200, -1)
    drawings = [Drawing(1.0, top_p=0.9, seed=n) if n % 2 else Drawing() for n in range(200)]
    tokens = drawn(rows, drawings).tokens
    assert (tokens[::2] == 0).all() and len(tokens[1::2].unique()) > 2


@pytest.mark.parametrize("work", Work)
def test_whatever_the_logits_and_numbers_are_a_token_is_one_of_the_vocabulary(work):
    torch.manual_seed(0)
    logits = 100 * torch.randn(4, 1000)
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[3, 7] = 0.0
    state = DrawingState(4, logits.device)
    cold = Drawing(temperature=1e-300, top_p=1e-300 if work == Work.ORDERED else 1.0)
    state.set(range(4), [cold, Drawing(temperature=1e-38, min_p=1e-300), cold, cold], [0] * 4)
    tokens = state.draw(logits, work, top=True).tokens
    if work != Work.PLAIN:
        assert tokens[[0, 1, 3]].tolist() == logits[[0, 1, 3]].argmax(-1).tolist()
    assert 0 <= tokens[2] < 1000


def test_logprobs_are_those_of_the_model_whatever_is_filtered():
    drawings = [Drawing(0.3, top_k=2, seed=5), Drawing(), Drawing(2.0, min_p=0.2, seed=1)]
    found = drawn(LOGITS.expand(3, -1), drawings, top=True)
    expected = torch.log_softmax(LOGITS, -1)
    torch.testing.assert_close(found.logprobs, expected[found.tokens])
    torch.testing.assert_close(found.top_tokens[1], expected.argsort(descending=True))
    torch.testing.assert_close(found.top_logprobs[1], expected.sort(descending=True).values)


def test_a_row_draws_the_same_wherever_it_stands():
    rows = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    drawings = [Drawing(1.0, seed=seed) for seed in range(300)]
    tokens = drawn(rows, drawings).tokens
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn(rows[order], [drawings[n] for n in order]).tokens, tokens[order])
    assert torch.equal(drawn(rows[7:8], drawings[7:8]).tokens, tokens[7:8])


def test_a_row_draws_the_same_whatever_work_others_are():
    rows = 3 * torch.randn(300, 5000, generator=torch.Generator().manual_seed(0))
    plain = [Drawing(1.0, seed=seed) if seed % 3 else Drawing() for seed in range(299)]
    works = [Drawing(), Drawing(0.7, min_p=0.1), Drawing(0.7, top_p=0.5)]
    assert [each.work for each in works] == list(Work)
    alone, *beside = [drawn(rows, [*plain, other]) for other in works]
    for each in beside:
        assert torch.equal(each.tokens[:299], alone.tokens[:299])
        assert torch.equal(each.logprobs[:299], alone.logprobs[:299])


def test_random_numbers_are_even_and_independent():
    seeds, counts = torch.arange(400).repeat_interleave(100), torch.arange(100).repeat(400)
    table = uniform(seeds, counts).view(400, 100)
    assert table.min() >= 0 and table.max() < 1
    assert table.mean().item() == pytest.approx(0.5, abs=0.01)
    assert table.var().item() == pytest.approx(1 / 12, abs=0.002)
    for pairs in (
        torch.stack([table[:-1].flatten(), table[1:].flatten()]),
        torch.stack([table[:, :-1].flatten(), table[:, 1:].flatten()]),
    ):
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.02
    big = uniform(torch.tensor([2**63 - 1, -(2**63)]), torch.tensor([0, 0]))
    assert big[0] != big[1]

"""The losses of pairs and marks are the formulas of their papers, computed in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from engine.config.preference_settings import Objective
from engine.runtime.step.preference import AnswerSums, Comparison, log_odds, pair_loss

pytestmark = pytest.mark.computing

ANSWER = [-12.5, -30.25, -7.0, -6.5]
"""Chosen and rejected in turn: two pairs."""
REFERENCE = [-13.0, -29.0, -6.0, -8.0]
TOKENS = [5.0, 9.0, 4.0, 2.0]
GOOD = [True, False, False, True]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def loss_with(divergence: float = 0.0, marked: bool = False, **settings) -> float:
    sums = AnswerSums(torch.tensor(ANSWER), torch.tensor(ANSWER) - 1.0, torch.tensor(TOKENS))
    desirable = torch.tensor(GOOD) if marked else None
    compared = Comparison(
        Objective(**settings), torch.tensor(REFERENCE), 8, 40, desirable, divergence
    )
    return float(pair_loss(sums, compared))


def margins() -> list[float]:
    ratios = [ours - theirs for ours, theirs in zip(ANSWER, REFERENCE, strict=True)]
    return [chosen - rejected for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True)]


def test_dpo_has_the_sigmoid_of_the_margin():
    expected = -sum(log_sigmoid(0.3 * margin) for margin in margins()) / 8
    assert loss_with(name="dpo", beta=0.3) == pytest.approx(expected, rel=1e-6)
    more = 2.0 * -((ANSWER[0] - 1) + (ANSWER[2] - 1)) / 40  # of the lines of chosen answers
    found = loss_with(name="dpo", beta=0.3, sft_weight=2.0)
    assert found == pytest.approx(expected + more, rel=1e-6)


def test_robust_dpo_takes_the_wrong_pairs_into_account():
    expected = 0.0
    for margin in margins():
        straight, turned = log_sigmoid(0.3 * margin), log_sigmoid(-0.3 * margin)
        expected -= (0.8 * straight - 0.2 * turned) / 0.6 / 8
    found = loss_with(name="dpo", beta=0.3, loss="robust", label_smoothing=0.2)
    assert found == pytest.approx(expected, rel=1e-6)


def test_ipo_wants_a_margin_of_the_means_of_tokens():
    ratios = [
        (ours - theirs) / tokens
        for ours, theirs, tokens in zip(ANSWER, REFERENCE, TOKENS, strict=True)
    ]
    apart = [ratios[0] - ratios[1], ratios[2] - ratios[3]]
    expected = sum((each - 1 / (2 * 0.3)) ** 2 for each in apart) / 8
    assert loss_with(name="dpo", beta=0.3, loss="ipo") == pytest.approx(expected, rel=1e-6)


def test_orpo_adds_the_odds_to_the_likelihood():
    means = [answer / tokens for answer, tokens in zip(ANSWER, TOKENS, strict=True)]
    odds = [mean - math.log1p(-math.exp(mean)) for mean in means]
    likelihood = -((ANSWER[0] - 1) + (ANSWER[2] - 1)) / 40
    ratio = log_sigmoid(odds[0] - odds[1]) + log_sigmoid(odds[2] - odds[3])
    found = loss_with(name="orpo", beta=0.3)
    assert found == pytest.approx(likelihood - 0.3 * ratio / 8, rel=1e-6)


def test_kto_weights_good_and_bad_answers():
    expected = 0.0
    for ours, theirs, desirable in zip(ANSWER, REFERENCE, GOOD, strict=True):
        ahead = 0.3 * (ours - theirs - 0.75)
        weight, sign = (1.5, 1.0) if desirable else (0.5, -1.0)
        expected += weight * (1 - 1 / (1 + math.exp(-sign * ahead))) / 8
    found = loss_with(
        0.75, True, name="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5
    )
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("x", [-1e-7, -1e-3, -0.5, -0.7, -3.0, -40.0])
def test_odds_keep_their_digits_near_certainty_and_far_from_it(x):
    other = -1.25
    expected = (x - other) - (math.log(-math.expm1(x)) - math.log(-math.expm1(other)))
    found = log_odds(torch.tensor([x], dtype=torch.float32), torch.tensor([other]))
    assert float(found) == pytest.approx(expected, rel=2e-6)

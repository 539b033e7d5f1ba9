"""The losses of pairs of answers, DPO's and ORPO's, and of answers with a mark, KTO's, as TRL
defines them.

All of them are functions of one number for each answer: the sum of the log-probabilities of its
tokens. So the gradient of every token is that of its cross-entropy, times a weight that all tokens
of an answer share (`engine.runtime.step.preference_head` applies it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from engine.config.preference_settings import Objective

_LOG_HALF = -0.6931471805599453
"""Log of 1/2. Below it, 1 - exp(x) is computed one way, and above it another way, so that no digits
are lost.
"""


@dataclass(frozen=True)
class AnswerSums:
    """Sums of a micro-batch of B lines, chosen and rejected in turn."""

    answer: torch.Tensor
    """The log-probabilities of the tokens of each answer are summed, float32 [B]."""
    line: torch.Tensor
    """Those of all labels of a line are, float32 [B]."""
    tokens: torch.Tensor
    """Number of tokens of each answer, float32 [B]."""


@dataclass(frozen=True)
class Comparison:
    """What a micro-batch of pairs is compared with, and its part of the step."""

    objective: Objective
    reference: torch.Tensor
    """The model that answers are compared with has these sums, float32 [B]."""
    pairs: int
    """Number of pairs of the whole step."""
    chosen_tokens: int
    """Number of labels of the lines of chosen answers in the whole step."""
    desirable: torch.Tensor | None = None
    """Whether the answer of each line is marked as good, bool [B]; None for pairs."""
    divergence: float = 0.0
    """Mean log-ratio by which answers of other prompts have become likelier (KTO)."""


def pair_loss(sums: AnswerSums, compared: Comparison) -> torch.Tensor:
    """Returns what the pairs of a micro-batch add to the loss of the step: a scalar, with gradients
    where those of `sums` [B] are wanted.
    """
    objective = compared.objective
    if compared.desirable is not None:
        return kto_losses(sums, compared, compared.desirable).sum() / compared.pairs
    if objective.name == "orpo":
        likelihood = -sums.line[0::2].sum() / max(1, compared.chosen_tokens)
        chosen, rejected = (sums.answer / sums.tokens).view(-1, 2).unbind(1)
        return likelihood - objective.beta * logsigmoid(log_odds(chosen, rejected)).sum() / (
            compared.pairs
        )
    loss = dpo_losses(sums, compared).sum() / compared.pairs
    if objective.sft_weight:
        chosen_sequence = sums.line[0::2].sum() / max(1, compared.chosen_tokens)
        loss = loss - objective.sft_weight * chosen_sequence
    return loss


def dpo_losses(sums: AnswerSums, compared: Comparison) -> torch.Tensor:
    """Returns the loss of each pair, float32 [B / 2], without the SFT term."""
    objective = compared.objective
    ratios = sums.answer - compared.reference
    if objective.loss == "ipo":
        chosen, rejected = (ratios / sums.tokens.clamp(min=1.0)).view(-1, 2).unbind(1)
        return (chosen - rejected - 1 / (2 * objective.beta)) ** 2
    chosen, rejected = ratios.view(-1, 2).unbind(1)
    margin = objective.beta * (chosen - rejected)
    if objective.loss == "robust":
        wrong = objective.label_smoothing
        straight = -(1 - wrong) * logsigmoid(margin)
        return (straight + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)
    return -logsigmoid(margin)


def kto_losses(sums: AnswerSums, compared: Comparison, desirable: torch.Tensor) -> torch.Tensor:
    """Returns the loss of each answer, float32 [B]; desirable: which are, bool [B]."""
    objective = compared.objective
    ahead = objective.beta * (sums.answer - compared.reference - compared.divergence)
    of_desirable = objective.desirable_weight * (1 - torch.sigmoid(ahead))
    of_bad = objective.undesirable_weight * (1 - torch.sigmoid(-ahead))
    return torch.where(desirable, of_desirable, of_bad)


def log_odds(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of the ratio of the odds of two answers, float32 [pairs], from the
    means of their log-probabilities, float32 [pairs].
    """
    return (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))


def _log_of_rest(x: torch.Tensor) -> torch.Tensor:
    """Returns log(1 - exp(x)) of x [pairs] below 0, without loss of digits."""
    return torch.where(x < _LOG_HALF, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))

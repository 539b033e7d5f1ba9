"""A `PairSums` tells the figures of a step or an evaluation of pairs, under the names of TRL.

- `rewards/chosen` and `rewards/rejected` are beta times how much likelier answers have become than
  they are for the model they are compared with; `rewards/margins` is their difference, and
  `rewards/accuracies` the share of pairs whose chosen answer has the larger reward.
- `logps/chosen` and `logps/rejected` are the log-probabilities of answers: sums over the tokens,
  and with ORPO means.
- ORPO has `nll_loss`, `log_odds_ratio` and `log_odds_chosen`, too.
- KTO has `kl`, too, and no `rewards/accuracies`. Good answers are its chosen ones.

All are means over pairs. Sums are rounded once, so that they do not depend on how the pairs were
spread over micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from engine.config.preference_settings import Objective
from engine.data.batches.rows import PairTargets
from engine.runtime.step.preference import AnswerSums, Comparison, log_odds, pair_loss


@dataclass(frozen=True)
class PairSums:
    """Holds what is known of the answers of some pairs, in the order of their lines: the chosen
    answer of a pair, then the rejected one.
    """

    objective: Objective
    answer: np.ndarray
    """The log-probabilities of each answer's tokens are summed, float32 [lines]."""
    line: np.ndarray
    """Those of all labels of a line are, float32 [lines]."""
    tokens: np.ndarray
    """Number of tokens of each answer, int64 [lines]."""
    reference: np.ndarray
    """The answers are compared with these sums, float32 [lines]."""
    chosen_tokens: int
    """Number of labels of the lines of chosen answers."""
    desirable: np.ndarray | None = None
    """Whether the answer of each line is marked as good, bool [lines]; None for pairs."""
    divergence: float = 0.0
    """Mean log-ratio by which answers of other prompts have become likelier (KTO)."""

    @classmethod
    def of(cls, targets: list[PairTargets], sums: np.ndarray) -> PairSums:
        """Returns the sums of micro-batches with these targets. `sums`, float32 [lines, 2], has
        those of each answer and of each line.
        """
        return cls(
            targets[0].objective,
            sums[:, 0],
            sums[:, 1],
            np.concatenate([each.answer_tokens for each in targets]),
            np.concatenate([each.reference for each in targets]),
            sum(int(np.count_nonzero(each.labeled[0::2])) for each in targets),
            _joined([each.desirable for each in targets]),
            targets[0].divergence,
        )

    @property
    def pairs(self) -> int:
        return len(self.answer) // 2 if self.desirable is None else len(self.answer)

    def diverged(self) -> float:
        """Returns by how much answers have become likelier in the mean, and at least 0."""
        return max(0.0, _mean(self.answer.astype(np.float64) - self.reference))

    def loss(self) -> float:
        """Returns the mean loss of the pairs, as that of one step of all of them."""
        sums = AnswerSums(
            torch.from_numpy(self.answer.astype(np.float64)),
            torch.from_numpy(self.line.astype(np.float64)),
            torch.from_numpy(self.tokens.astype(np.float64)),
        )
        reference = torch.from_numpy(self.reference.astype(np.float64))
        desirable = None if self.desirable is None else torch.from_numpy(self.desirable)
        compared = Comparison(
            objective=self.objective,
            reference=reference,
            pairs=self.pairs,
            chosen_tokens=self.chosen_tokens,
            desirable=desirable,
            divergence=self.divergence,
        )
        return float(pair_loss(sums, compared))

    def metrics(self) -> dict[str, float]:
        """Returns the figures by their names, in seven digits."""
        if self.desirable is not None:
            found = self._kto(self.desirable)
        else:
            found = self._orpo() if self.objective.name == "orpo" else self._dpo()
        return {name: float(f"{value:.7g}") for name, value in found.items()}

    def _dpo(self) -> dict[str, float]:
        answer = self.answer.astype(np.float64)
        return _means(self.objective.beta * (answer - self.reference), answer)

    def _kto(self, desirable: np.ndarray) -> dict[str, float]:
        answer = self.answer.astype(np.float64)
        rewards = self.objective.beta * (answer - self.reference)
        found = {"kl": self.divergence}
        for name, of in (("chosen", desirable), ("rejected", ~desirable)):
            if of.any():
                found |= {f"rewards/{name}": _mean(rewards[of]), f"logps/{name}": _mean(answer[of])}
        if desirable.any() and not desirable.all():
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def _orpo(self) -> dict[str, float]:
        answer = self.answer.astype(np.float64) / self.tokens
        odds = log_odds(torch.from_numpy(answer[0::2]), torch.from_numpy(answer[1::2]))
        return {
            **_means(self.objective.beta * answer, answer),
            "nll_loss": -math.fsum(self.line[0::2]) / max(1, self.chosen_tokens),
            "log_odds_ratio": _mean(logsigmoid(odds).numpy()),
            "log_odds_chosen": _mean(odds.numpy()),
        }


def _joined(marks: list[np.ndarray | None]) -> np.ndarray | None:
    """Returns the marks of all micro-batches, bool [lines]; None for pairs, which have none."""
    found = [each for each in marks if each is not None]
    return np.concatenate(found) if found else None


def _means(rewards: np.ndarray, logps: np.ndarray) -> dict[str, float]:
    """Returns the figures of rewards and log-probabilities, float64 [lines] each."""
    chosen, rejected = rewards[0::2], rewards[1::2]
    return {
        "rewards/chosen": _mean(chosen),
        "rewards/rejected": _mean(rejected),
        "rewards/accuracies": _mean(chosen > rejected),
        "rewards/margins": _mean(chosen - rejected),
        "logps/chosen": _mean(logps[0::2]),
        "logps/rejected": _mean(logps[1::2]),
    }


def _mean(values: np.ndarray) -> float:
    """Returns the mean of values [n], whose sum is rounded once."""
    return math.fsum(values.tolist()) / len(values)


def sequence_sums(batches: list[PairTargets], losses: list[np.ndarray]) -> np.ndarray:
    """Returns the sums of `PairSums.of`, float32 [lines, 2], of micro-batches with these targets.
    Each has the cross-entropies of its positions with a label, float32 [n], in `losses`.
    """
    found = []
    for targets, each in zip(batches, losses):
        label = targets.labeled
        sequences = np.nonzero(label)[0]
        minus = -each.astype(np.float64)
        of_answer = np.where(targets.answer[label], minus, 0.0)
        count = len(label)
        sums = [np.bincount(sequences, values, minlength=count) for values in (of_answer, minus)]
        found.append(np.stack(sums, axis=1))
    return np.concatenate(found).astype(np.float32)

"""Rows for the tokens that a user adds (`data.add_tokens`) to weights of a smaller vocabulary.

The rules are those of `resize_token_embeddings` in transformers (`modeling_utils.py`, with its
default `mean_resizing`, after https://nlp.stanford.edu/~johnhew/vocab-expansion.html): a new row is
drawn from a normal distribution with the mean of the old rows and 1e-9 of their covariance. Where
that covariance is not positive definite, as with fewer rows than columns, it is the mean. A new
number of a bias has the mean of the old ones and 1e-9 of their standard deviation. So the
probabilities of the other tokens hardly change.

Transformers draws from torch's global generator. Here each parameter has a generator of its own,
which depends on the seed of the run and on nothing else. Sums are made in fp32 as there, but over
chunks of the rows, so that no second copy of all rows is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.planning.schedule.buffers import EMBED

_SCALE = 1e-9
_CHUNK = 1 << 22  # elements that are summed at once


@dataclass(frozen=True)
class ResizedEmbeddings:
    """Adds rows to the weights of a vocabulary."""

    before: int
    """Number of tokens that the weights have rows for."""
    after: int
    """Number of tokens that the model has rows for."""
    seed: int

    def are_for(self, there: Sequence[int], here: tuple[int, ...]) -> bool:
        """Returns whether a parameter has the shape `there` in the weights and the shape `here` in
        the model because of its vocabulary alone.
        """
        is_larger = self.before < self.after
        return is_larger and (*there,) == (self.before, *here[1:]) and here[:1] == (self.after,)

    def grown(self, old: torch.Tensor, unit: str) -> torch.Tensor:
        """Returns old rows [before, width] of a unit, or an old bias [before], followed by the new
        ones, in the dtype of the old.
        """
        generator = torch.Generator().manual_seed(self.seed + (unit != EMBED))
        drawn = _bias if old.dim() == 1 else _rows
        with torch.no_grad():
            return torch.cat([old, drawn(old, self.after - self.before, generator).to(old.dtype)])


def _rows(old: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Returns new rows [count, width] in fp32, for old ones [before, width]."""
    width = old.shape[1]
    chunks = old.split(max(1, _CHUNK // width))
    mean = torch.zeros(width)
    for chunk in chunks:
        mean += chunk.float().sum(0)
    mean /= len(old)
    covariance = torch.zeros(width, width)
    for chunk in chunks:
        centered = chunk.float() - mean
        covariance.addmm_(centered.T, centered)
    covariance *= _SCALE / len(old)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        return mean.expand(count, width)
    return mean + torch.randn(count, width, generator=generator) @ factor.T


def _bias(old: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Returns new numbers [count] in fp32, for the old ones [before] of a bias."""
    values = old.float()
    return values.mean() + _SCALE * values.std() * torch.randn(count, generator=generator)

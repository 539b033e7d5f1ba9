"""How the next tokens are drawn from logits, on the device that has computed them.

Each row draws with its own random numbers: one for each token, computed from the row's seed and the
number of tokens that it has drawn. So an answer depends on its seed, its prompt and the weights. It
depends on other rows only by the rounding of logits, and on the way in which it is computed not at
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch

MOST_TOP_LOGPROBS = 20
"""Most likeliest tokens that can be returned with a drawn one."""
_ROWS_AT_ONCE = 128
"""Rows whose weights exist at once, since those of a large vocabulary take much memory."""
_COLDEST = 1e-5
"""Lowest temperature by which logits are divided; they could be infinite otherwise."""
_BLOCK = 512
"""Tokens whose probabilities are summed at once."""
_MASK_53 = (1 << 53) - 1


class Work(IntEnum):
    """What drawing from logits takes. Rows that are drawn at once take the most of any, and each
    gets the same token as by less.
    """

    PLAIN = 0
    """The logits are weighed as they are."""
    WEIGHED = 1
    """They are divided by temperatures, or tokens are left out by min-p."""
    ORDERED = 2
    """Also, they are sorted."""


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn from logits. A temperature of 0 takes the likeliest token.

    The filters are those of transformers' `generate`, in its order: the `top_k` likeliest tokens (0
    for all), then the smallest set of likeliest tokens whose probabilities reach `top_p` (nucleus
    sampling, arXiv 1904.09751), then those with at least `min_p` times the probability of the
    likeliest one (arXiv 2407.01082).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def with_seed(self, seed: int) -> Drawing:
        """Returns the same way of drawing with another seed."""
        return replace(self, seed=seed)

    @property
    def work(self) -> Work:
        """What drawing a token takes."""
        if self.temperature <= 0:
            return Work.PLAIN
        if self.top_p < 1 or self.top_k > 0:
            return Work.ORDERED
        return Work.PLAIN if self.temperature == 1 and self.min_p <= 0 else Work.WEIGHED


GREEDY = Drawing()
"""Greedy drawing takes the likeliest token each time."""


class Drawn(NamedTuple):
    """Tokens drawn for some rows."""

    tokens: torch.Tensor
    """Token ids, int64 [rows]."""
    logprobs: torch.Tensor
    """Natural logarithm of each token's probability according to the model, at a temperature of 1
    and without filters: float32 [rows].
    """
    top_tokens: torch.Tensor | None
    """The likeliest tokens, int64 [rows, MOST_TOP_LOGPROBS]; None if nobody asked for them."""
    top_logprobs: torch.Tensor | None
    """Their logarithms of probabilities, likeliest first, float32 of the same shape."""


class DrawingState:
    """The drawing of each of `rows` rows, as tensors on `device` that stay where they are."""

    def __init__(self, rows: int, device: torch.device):
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        """Number of tokens that each row has drawn."""
        self.numbers = torch.zeros(rows, 4, dtype=torch.float64, device=device)
        """Temperature, top-p, top-k and min-p of each row."""

    def set(self, places: Sequence[int], drawings: Sequence[Drawing], drawn: Sequence[int]) -> None:
        """Sets the drawing of the rows at `places`, which have drawn this many tokens so far."""
        device = self.seeds.device
        at = torch.tensor(list(places), dtype=torch.int64).to(device)
        seeds = [(each.seed + 2**63) % 2**64 - 2**63 for each in drawings]
        numbers = [[each.temperature, each.top_p, each.top_k, each.min_p] for each in drawings]
        self.seeds[at] = torch.tensor(seeds, dtype=torch.int64).to(device)
        self.drawn[at] = torch.tensor(list(drawn), dtype=torch.int64).to(device)
        self.numbers[at] = torch.tensor(numbers, dtype=torch.float64).to(device)

    def draw(self, logits: torch.Tensor, work: Work, top: bool) -> Drawn:
        """Draws a token for each of the first rows from `logits`, float32 [rows, vocabulary], and
        counts it. It does not wait for the device.

        work: the most that any of the rows takes. top: whether to return the likeliest tokens.
        """
        rows = logits.shape[0]
        uniforms = uniform(self.seeds[:rows], self.drawn[:rows])
        parts = []
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = slice(start, min(rows, start + _ROWS_AT_ONCE))
            parts.append(_drawn(logits[part], self.numbers[part], uniforms[part], work, top))
        self.drawn[:rows] += 1
        if len(parts) == 1:
            return parts[0]
        return Drawn(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            _joined([part.top_tokens for part in parts]),
            _joined([part.top_logprobs for part in parts]),
        )


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Returns the parts of some rows as one tensor; None if there are none."""
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def _drawn(
    logits: torch.Tensor, numbers: torch.Tensor, uniforms: torch.Tensor, work: Work, top: bool
) -> Drawn:
    """Draws a token for each row of `logits`, float32 [rows, vocabulary].

    numbers: temperature, top-p, top-k and min-p of each row, float64 [rows, 4]. uniforms: a random
    number from [0, 1) for each row, float64 [rows]. The token is the first at which the sum of
    probabilities so far exceeds that share of them all. It is one of the vocabulary whatever the
    logits are: an index beyond it would end the use of a GPU by this process.
    """
    temperature = numbers[:, 0]
    likeliest = logits.argmax(-1, keepdim=True)
    most = logits.gather(-1, likeliest)
    # Weights are probabilities times a number, so that of the likeliest token is 1. Large
    # vocabularies make each pass over them dear, so there are few, and most are in place.
    weights = _less(logits, most).exp_()
    ends = _sums_of_blocks(weights)
    total = most.squeeze(-1) + ends[:, -1].log().float()
    if work >= Work.WEIGHED:
        weights = _less(logits, most)
        divisor = torch.where(temperature > 0, temperature.clamp(min=_COLDEST), 1.0)
        weights /= divisor.float()[:, None]
        weights.exp_()
        if work == Work.ORDERED:
            weights = _within_top(weights, numbers[:, 1], numbers[:, 2])
        weights *= weights >= numbers[:, 3].float()[:, None]
        ends = _sums_of_blocks(weights)
    drawn = _first_beyond(weights, ends, uniforms)
    is_drawn = (temperature > 0) & (drawn < logits.shape[-1])  # it is not where logits are NaN
    tokens = torch.where(is_drawn, drawn, likeliest.squeeze(-1))
    logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - total
    if not top:
        return Drawn(tokens, logprobs, None, None)
    best = logits.topk(min(MOST_TOP_LOGPROBS, logits.shape[-1]), -1)
    return Drawn(tokens, logprobs, best.indices, best.values - total[:, None])


def _less(logits: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Returns `logits` less `most`, of shape [rows, 1], with as many more as make whole blocks,
    which are of no weight.
    """
    rows, count = logits.shape
    less = logits.new_empty(rows, -(-count // _BLOCK) * _BLOCK)
    less[:, count:] = -torch.inf
    torch.sub(logits, most, out=less[:, :count])
    return less


def _sums_of_blocks(weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum of weights [rows, n] up to the end of each block, float64 [rows, blocks]."""
    # Sums in float64 grow from element to element wherever there is a weight.
    blocks = weights.view(weights.shape[0], -1, _BLOCK)
    return blocks.sum(-1, dtype=torch.float64).cumsum(-1)


def _first_beyond(weights: torch.Tensor, ends: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Returns the first index at which the sum of `weights`, float32 [rows, n], exceeds a share of
    the whole, float64 [rows]: int64 [rows].

    The sums of blocks, `ends`, show in which block it is, so only that one is summed element by
    element.
    """
    rows, blocks = ends.shape
    sought = (shares * ends[:, -1])[:, None]
    block = torch.searchsorted(ends, sought, right=True).clamp_(max=blocks - 1)
    within = weights.view(rows, blocks, _BLOCK)
    within = within.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    before = ends.gather(-1, block) - within.sum(-1, dtype=torch.float64, keepdim=True)
    sums = before + within.double().cumsum(-1)
    # Rounding may put the sum of a block beyond that of its elements: then it is the last of them
    # that has a weight.
    last = (_BLOCK - 1) - (within > 0).flip(-1).int().argmax(-1, keepdim=True)
    place = torch.minimum(torch.searchsorted(sums, sought, right=True), last)
    return (block * _BLOCK + place).squeeze(-1)


def _within_top(weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Returns `weights` [rows, vocabulary] with those of tokens that top-k and top-p leave out set
    to 0.
    """
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = torch.where((top_k > 0)[:, None] & (rank >= top_k[:, None]), 0.0, ordered)
    sums = ordered.double().cumsum(-1)
    before = sums - ordered
    # At 1 nothing is left out, though sums may reach 1 before the last token.
    beyond = (before >= top_p[:, None] * sums[:, -1:]) & (top_p < 1)[:, None]
    ordered = torch.where(beyond, 0.0, ordered)
    return torch.zeros_like(weights).scatter_(-1, tokens, ordered)


def uniform(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns a random number from [0, 1) for each pair of a seed and a count, int64 [n]: float64
    [n]. It is a hash of the two, by the rounds of SplitMix64 (https://doi.org/10.1145/2660193.
    2660195), so it is the same on every device.
    """
    mixed = _mixed(_mixed(seeds + 1) + counts * -0x61C8864680B583EB)
    return (_shifted(mixed, 11) & _MASK_53).double() * 2.0**-53


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    # The constants are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers.
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Returns int64 `bits` shifted to the right, with zeros coming in."""
    return (bits >> places) & ((1 << (64 - places)) - 1)

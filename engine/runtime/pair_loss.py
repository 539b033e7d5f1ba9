"""The loss of a micro-batch of pairs is computed at the head in three parts.

- A pass over the chunks of positions gives the cross-entropy of each, and so the sum of each
  answer.
- The loss is a function of these sums (`engine.losses.pair_losses`). Its derivatives are the
  weights of the positions.
- A second pass gives the gradients, with these weights. Where all positions fit one chunk, its
  logits are kept and no second pass is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, pad

from engine.losses.pair_losses import AnswerSums, Comparison, pair_loss
from engine.model.skeleton import Skeleton
from engine.runtime.compiled import compiled_function
from engine.runtime.loss import UNCOMPILED, LossChunks, TailGradients, filled_up
from engine.runtime.step import DeviceBatch, DevicePairs

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def each_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of each position, float32 [n], for logits [n, vocabulary] and the
    labels int64 [n].
    """
    return cross_entropy(logits.float(), labels, reduction="none")


@dataclass(frozen=True)
class PairResult:
    """A `PairResult` is what a micro-batch of pairs gives in training."""

    loss: torch.Tensor
    """It adds this to the loss of the step: a float32 scalar."""
    gradient: torch.Tensor | None
    """The hidden states [lines, tokens, width] have this gradient; None where none is wanted."""
    sums: torch.Tensor
    """The log-probabilities of each answer and of each line are summed: float32 [lines, 2]."""


def loss_of_pairs(
    skeleton: Skeleton,
    hidden: torch.Tensor,
    batch: DeviceBatch,
    chunks: LossChunks,
    tail: TailGradients,
) -> PairResult:
    """Returns the loss of the pairs of `batch`, whose last block gave `hidden` [lines, tokens,
    width], with its gradient. The gradients of the tail go to `tail`.
    """
    assert batch.pairs is not None
    states = hidden.detach().reshape(-1, hidden.shape[-1])
    selected = states.index_select(0, batch.loss_index)
    size, labels = chunks.size, batch.labels
    compiled = compiled_function(each_loss, "The loss of pairs") if chunks.compiled else None
    if compiled is not None and compiled.problem:
        compiled, size = None, max(1, size // UNCOMPILED)
    losses_of: Losses = each_loss if compiled is None else compiled
    if compiled is not None:
        selected, labels = filled_up(selected, labels, size)
    head = _Head(skeleton, losses_of, tail)
    try:
        return head.run(selected, labels, size, _Lines(batch, batch.pairs, hidden.shape))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Nothing was added up yet where the first chunk could not be compiled.
        if compiled is None or head.has_added:
            raise
        compiled.give_up(error)
        return head.run(selected, labels, size, _Lines(batch, batch.pairs, hidden.shape))


@dataclass(frozen=True)
class _Lines:
    """Says to which line and part of it each position belongs."""

    batch: DeviceBatch
    pairs: DevicePairs
    shape: torch.Size

    def sums(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sums of `PairResult`, and how many tokens each answer has, float32 [lines],
        from cross-entropies [n]. They are added up in double precision, line by line.
        """
        minus = -losses.double()
        answers = torch.stack([minus * self.pairs.answer, minus, self.pairs.answer.double()])
        lines, tokens = self.shape[0], self.shape[1]
        places = torch.zeros(3, lines * tokens, dtype=torch.float64, device=losses.device)
        places.index_copy_(1, self.batch.loss_index, answers)
        found = places.view(3, lines, tokens).sum(dim=2).float()
        return found[:2].t().contiguous(), found[2]

    def weights(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the loss of the micro-batch, its derivative by each of these cross-entropies [n],
        and the sums of `PairResult`.
        """
        sums, tokens = self.sums(losses)
        with torch.enable_grad():
            given = sums.detach().requires_grad_()
            both = AnswerSums(given[:, 0], given[:, 1], tokens)
            loss = pair_loss(both, self._compared)
            (by_sum,) = torch.autograd.grad(loss, [given])
        of_line = by_sum.index_select(0, self.batch.loss_index // self.shape[1])
        return loss.detach(), -(of_line[:, 0] * self.pairs.answer + of_line[:, 1]), sums

    @property
    def _compared(self) -> Comparison:
        pairs = self.pairs
        totals = pairs.pairs, pairs.chosen_tokens
        return Comparison(pairs.form, pairs.reference, *totals, pairs.good, pairs.divergence)


class _Head:
    """Runs the tail over chunks of positions. `has_added` says whether gradients were added up."""

    def __init__(self, skeleton: Skeleton, losses_of: Losses, tail: TailGradients):
        self._skeleton = skeleton
        self._losses_of = losses_of
        self._tail = tail
        self.has_added = False

    def run(
        self, selected: torch.Tensor, labels: torch.Tensor, size: int, lines: _Lines
    ) -> PairResult:
        """Returns the result for the hidden states of positions `selected` [n, width] with their
        `labels` [n], of which the first have a place and the rest fills the last chunk.
        """
        count = len(lines.batch.loss_index)
        starts = range(0, count, size)
        pieces = [
            (selected[start : start + size].detach(), labels[start : start + size])
            for start in starts
        ]
        at_once = len(pieces) == 1
        graphs = []
        each = torch.empty(len(selected), dtype=torch.float32, device=selected.device)
        for start, (piece, wanted) in zip(starts, pieces):
            with torch.set_grad_enabled(at_once):
                given = piece.requires_grad_(at_once and self._tail.of_hidden)
                found = self._losses_of(self._skeleton.logits(given), wanted)
            each[start : start + size] = found.detach()
            graphs.append((given, found))
        loss, weights, sums = lines.weights(each[:count])
        weights = pad(weights, (0, len(selected) - count))
        gradient = None
        if self._tail.of_hidden:
            flat = lines.shape[0] * lines.shape[1]
            gradient = torch.zeros(
                flat, lines.shape[2], dtype=selected.dtype, device=selected.device
            )
        for place, start in enumerate(starts):
            if not at_once:
                graphs[place] = self._again(*pieces[place])
            self._add(lines, gradient, start, (*graphs[place], weights[start : start + size]))
        whole = None if gradient is None else gradient.view(lines.shape)
        return PairResult(loss, whole, sums)

    def _again(
        self, piece: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a chunk [n, width] and its cross-entropies [n] with a graph behind them."""
        with torch.enable_grad():
            given = piece.detach().requires_grad_(self._tail.of_hidden)
            return given, self._losses_of(self._skeleton.logits(given), labels)

    def _add(
        self,
        lines: _Lines,
        gradient: torch.Tensor | None,
        start: int,
        chunk: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Adds up the gradients of a chunk: its states [n, width], cross-entropies [n] and weights
        [n].
        """
        given, losses, weights = chunk
        of_piece = [given] if self._tail.of_hidden else []
        found = torch.autograd.grad(
            losses, [*of_piece, *self._tail.parameters], weights, allow_unused=True
        )
        self.has_added = True
        if gradient is not None:
            places = lines.batch.loss_index[start : start + len(given)]
            assert found[0] is not None  # the logits depend on the hidden states
            gradient.index_copy_(0, places, found[0][: len(places)])
            found = found[1:]
        self._tail.accumulate(found)

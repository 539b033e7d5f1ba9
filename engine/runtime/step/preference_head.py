"""The loss of a micro-batch of pairs is computed at the head in three parts.

- A pass over the chunks of positions gives the cross-entropy of each, and so the sum of each
  answer.
- The loss is a function of these sums (`engine.runtime.step.preference`). Its derivatives are the
  weights of the positions.
- A second pass gives the gradients, with these weights.

A pair, or an answer with a mark, adds to the loss what its own sums say. So each chunk takes whole
pairs where their positions fit: then its logits are kept until the weights are known, and no second
pass is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import cross_entropy, pad

from engine.model.build.skeleton import Skeleton
from engine.runtime.device.compiled import CompiledFunction, compiled_function
from engine.runtime.step.cross_entropy import UNCOMPILED, LossChunks, TailGradients, filled_up
from engine.runtime.step.preference import AnswerSums, pair_loss
from engine.runtime.step.step import DeviceBatch, DevicePairs

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def each_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of each position, float32 [n], for logits [n, vocabulary] and the
    labels int64 [n].
    """
    return cross_entropy(logits.float(), labels, reduction="none")


@dataclass(frozen=True)
class PairResult:
    """Results of a micro-batch of pairs in training."""

    loss: torch.Tensor
    """What it adds to the loss of the step, a float64 scalar."""
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
    gradient = torch.zeros_like(hidden) if tail.of_hidden else None
    found = []
    for group in _groups(batch.pairs, hidden.shape[1], chunks):
        own = None if gradient is None else gradient[group.sequences].view(-1, hidden.shape[-1])
        part = _part(batch, batch.pairs, group)
        found.append(_loss_of_group(skeleton, hidden[group.sequences], part, chunks, tail, own))
    losses, sums = zip(*found)
    return PairResult(torch.stack(losses).sum(dtype=torch.float64), gradient, torch.cat(sums))


@dataclass(frozen=True)
class _Group:
    """Positions of some pairs, or of some answers with marks, one behind the other."""

    positions: slice
    """Positions in `DeviceBatch.loss_index`."""
    sequences: slice
    """Lines that they are in."""
    first: int
    """The first line begins at this flat position."""


def _groups(pairs: DevicePairs, tokens: int, chunks: LossChunks) -> list[_Group]:
    """Returns the groups of a micro-batch with lines of `tokens` tokens. As many pairs are in a
    group as have their positions in one chunk, and at least one.
    """
    size, of_row = _size_of(chunks), pairs.compared.objective.sequences
    cuts, taken = [0], 0
    for row, count in enumerate(pairs.labels_of_rows):
        if taken and taken + count > size:
            cuts.append(row)
            taken = 0
        taken += count
    ends = list(itertools.accumulate(pairs.labels_of_rows, initial=0))
    cuts.append(len(ends) - 1)
    return [
        _Group(
            slice(ends[start], ends[stop]),
            slice(of_row * start, of_row * stop),
            of_row * start * tokens,
        )
        for start, stop in itertools.pairwise(cuts)
    ]


def _compiled() -> CompiledFunction:
    return compiled_function(each_loss, "The loss of pairs")


def _size_of(chunks: LossChunks) -> int:
    """Returns how many positions the head computes at once."""
    fails = chunks.compiled and bool(_compiled().problem)
    return max(1, chunks.size // UNCOMPILED) if fails else chunks.size


def _part(batch: DeviceBatch, pairs: DevicePairs, group: _Group) -> DeviceBatch:
    """Returns what the loss needs of a group of a micro-batch, as if it were one by itself."""
    compared = pairs.compared
    marks = None if compared.desirable is None else compared.desirable[group.sequences]
    reference = compared.reference[group.sequences]
    own = replace(
        pairs,
        compared=replace(compared, reference=reference, desirable=marks),
        answer=pairs.answer[group.positions],
    )
    index = batch.loss_index[group.positions] - group.first
    return replace(batch, loss_index=index, labels=batch.labels[group.positions], pairs=own)


def _loss_of_group(
    skeleton: Skeleton,
    hidden: torch.Tensor,
    batch: DeviceBatch,
    chunks: LossChunks,
    tail: TailGradients,
    gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of a group, a scalar, and its sums, as in `PairResult`. `hidden` [lines,
    tokens, width] and `batch` are those of the group. The gradients of the tail go to `tail`, and
    that of `hidden` into `gradient` [positions, width].
    """
    assert batch.pairs is not None
    states = hidden.detach().reshape(-1, hidden.shape[-1])
    selected = states.index_select(0, batch.loss_index)
    size, labels, compiled = _size_of(chunks), batch.labels, None
    if chunks.compiled and not _compiled().problem:
        compiled = _compiled()
    losses_of: Losses = each_loss if compiled is None else compiled
    if compiled is not None:
        selected, labels = filled_up(selected, labels, size)
    head = _Head(skeleton, losses_of, tail)
    sequences = _Lines(batch, batch.pairs, hidden.shape, gradient)
    try:
        return head.run(selected, labels, size, sequences)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Nothing was added up yet where the first chunk could not be compiled.
        if compiled is None or head.has_added:
            raise
        compiled.abort(error)
        return head.run(selected, labels, size, sequences)


@dataclass(frozen=True)
class _Lines:
    """Says to which line and part of it each position belongs."""

    batch: DeviceBatch
    pairs: DevicePairs
    shape: torch.Size
    gradient: torch.Tensor | None
    """The hidden states [positions, width] get their gradient here; None where none is wanted."""

    def sums(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sums of `PairResult`, and how many tokens each answer has, float32 [lines],
        from cross-entropies [n]. They are added up in double precision, line by line.
        """
        minus = -losses.double()
        answers = torch.stack([minus * self.pairs.answer, minus, self.pairs.answer.double()])
        sequences, tokens = self.shape[0], self.shape[1]
        places = torch.zeros(3, sequences * tokens, dtype=torch.float64, device=losses.device)
        places.index_copy_(1, self.batch.loss_index, answers)
        found = places.view(3, sequences, tokens).sum(dim=2).float()
        return found[:2].t().contiguous(), found[2]

    def weights(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the loss of the micro-batch, its derivative by each of these cross-entropies [n],
        and the sums of `PairResult`.
        """
        sums, tokens = self.sums(losses)
        with torch.enable_grad():
            given = sums.detach().requires_grad_()
            both = AnswerSums(given[:, 0], given[:, 1], tokens)
            loss = pair_loss(both, self.pairs.compared)
            (by_sum,) = torch.autograd.grad(loss, [given])
        of_line = by_sum.index_select(0, self.batch.loss_index // self.shape[1])
        return loss.detach(), -(of_line[:, 0] * self.pairs.answer + of_line[:, 1]), sums


class _Head:
    """Runs the tail over chunks of positions. `has_added` says whether gradients were added up."""

    def __init__(self, skeleton: Skeleton, losses_of: Losses, tail: TailGradients):
        self._skeleton = skeleton
        self._losses_of = losses_of
        self._tail = tail
        self.has_added = False

    def run(
        self, selected: torch.Tensor, labels: torch.Tensor, size: int, sequences: _Lines
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, a scalar, and the sums of `PairResult`, for the hidden states of
        positions `selected` [n, width] with their `labels` [n], of which the first have a place and
        the rest fills the last chunk.
        """
        count = len(sequences.batch.loss_index)
        starts = range(0, count, size)
        chunks = [
            (selected[start : start + size].detach(), labels[start : start + size])
            for start in starts
        ]
        at_once = len(chunks) == 1
        graphs = []
        each = torch.empty(len(selected), dtype=torch.float32, device=selected.device)
        for start, (chunk, wanted) in zip(starts, chunks):
            with torch.set_grad_enabled(at_once):
                given = chunk.requires_grad_(at_once and self._tail.of_hidden)
                found = self._losses_of(self._skeleton.logits(given), wanted)
            each[start : start + size] = found.detach()
            graphs.append((given, found))
        loss, weights, sums = sequences.weights(each[:count])
        weights = pad(weights, (0, len(selected) - count))
        for place, start in enumerate(starts):
            if not at_once:
                graphs[place] = self._again(*chunks[place])
            self._add(sequences, start, *graphs[place], weights[start : start + size])
        return loss, sums

    def _again(
        self, chunk: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a chunk [n, width] and its cross-entropies [n] with a graph behind them."""
        with torch.enable_grad():
            given = chunk.detach().requires_grad_(self._tail.of_hidden)
            return given, self._losses_of(self._skeleton.logits(given), labels)

    def _add(
        self,
        sequences: _Lines,
        start: int,
        given: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Adds up the gradients of a chunk with the states `given` [n, width], their
        cross-entropies `losses` [n] and `weights` [n].
        """
        of_chunk = [given] if self._tail.of_hidden else []
        found = torch.autograd.grad(
            losses, [*of_chunk, *self._tail.parameters], weights, allow_unused=True
        )
        self.has_added = True
        if sequences.gradient is not None:
            places = sequences.batch.loss_index[start : start + len(given)]
            assert found[0] is not None  # the logits depend on the hidden states
            sequences.gradient.index_copy_(0, places, found[0][: len(places)])
            found = found[1:]
        self._tail.accumulate(found)

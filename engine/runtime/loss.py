"""Cross-entropy is computed in chunks, so that the logits of a micro-batch are never all in memory.

- The positions that contribute to the loss are gathered into one tensor and cut into chunks.
- A chunk goes through the model's tail (final norm, head), its logits are upcast to float32 as
  transformers does it, and their cross-entropies are summed.
- In training, the backward of a chunk follows at once. It gives the gradients of the chunk's hidden
  states, and of the tail's parameters, which the caller adds up.
- A compiled loss reads the logits once and writes their gradient once, in their own dtype. Kernels
  are compiled for each size of a chunk, so the last chunk is padded to one of a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import pad

from engine.model.skeleton import Skeleton
from engine.runtime.compiled import compiled_function

SHAPES = 16
"""Compiled chunks have at most this many different sizes, since kernels are compiled for each."""
UNCOMPILED = 4
"""Without a compiler, the loss of a chunk takes this many times as much memory. The chunk that was
planned for a compiled loss is then divided by this number.
"""
IGNORED = -100
"""Torch's cross-entropy ignores positions with this label."""


@dataclass(frozen=True)
class LossTargets:
    """The loss of a micro-batch is computed at these positions."""

    index: torch.Tensor
    """The flat positions are int64 [n]."""
    labels: torch.Tensor
    """The target tokens are int64 [n]."""
    scale: float
    """The sum of cross-entropies is multiplied by this."""


@dataclass(frozen=True)
class LossChunks:
    """The loss is computed in chunks of this size."""

    size: int
    """The logits of this many positions exist at once."""
    compiled: bool = False
    """The loss of given logits is compiled."""


@dataclass(frozen=True)
class TailGradients:
    """The gradients of the tail's parameters are passed to `accumulate` chunk by chunk."""

    parameters: list[nn.Parameter]
    accumulate: Callable[[tuple[torch.Tensor | None, ...]], None]
    """The function receives the gradients of `parameters`, in the same order and shapes."""


@dataclass(frozen=True)
class _ChunkLoss:
    """Computes the loss of one chunk with its gradients."""

    skeleton: Skeleton
    scale: float
    parameters: list[nn.Parameter]

    def gradients(
        self,
        piece: torch.Tensor,
        labels: torch.Tensor,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Returns the scaled loss (scalar) of a chunk `piece` [n, width] with the targets `labels`
        [n], and its gradients with respect to `piece` and to each parameter.
        """
        with torch.enable_grad():
            loss = loss_of(self.skeleton.logits(piece), labels) * self.scale
        own, *others = torch.autograd.grad(loss, [piece, *self.parameters], allow_unused=True)
        return loss, own, tuple(others)


def chunked_loss(
    skeleton: Skeleton,
    hidden: torch.Tensor,
    targets: LossTargets,
    chunks: LossChunks,
    tail: TailGradients | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scaled sum of cross-entropies (scalar) and its gradient with respect to `hidden`
    [rows, tokens, width], the last block's output.

    Without `tail` no gradient is computed and the second result is None.
    """
    states = hidden.detach().reshape(-1, hidden.shape[-1])
    selected = states.index_select(0, targets.index)
    if tail is None:
        return _loss_alone(skeleton, selected, targets, chunks), None
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    size, labels = chunks.size, targets.labels
    compiled_loss = compiled_function(cross_entropy, "The loss") if chunks.compiled else None
    if compiled_loss is not None and compiled_loss.problem:
        compiled_loss = None
        size = max(1, size // UNCOMPILED)
    if compiled_loss is not None:
        selected, labels = _filled_up(selected, labels, size)
    loss_of = cross_entropy if compiled_loss is None else compiled_loss
    chunk_loss = _ChunkLoss(skeleton, targets.scale, tail.parameters)
    gradient = torch.zeros_like(states)
    for start in range(0, len(targets.index), size):
        piece = selected[start : start + size].detach().requires_grad_()
        piece_labels = labels[start : start + size]
        try:
            loss, piece_gradient, parameter_gradients = chunk_loss.gradients(
                piece, piece_labels, loss_of
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if compiled_loss is None:
                raise
            # Backward is compiled when it first runs, so compiling may have failed here. After
            # `give_up` the function runs uncompiled, so an error with another cause is raised
            # again.
            compiled_loss.give_up(error)
            loss, piece_gradient, parameter_gradients = chunk_loss.gradients(
                piece, piece_labels, loss_of
            )
        total += loss.detach()
        places = targets.index[start : start + size]
        gradient.index_copy_(0, places, piece_gradient[: len(places)])
        tail.accumulate(parameter_gradients)
    return total, gradient.view_as(hidden)


def _loss_alone(
    skeleton: Skeleton, selected: torch.Tensor, targets: LossTargets, chunks: LossChunks
) -> torch.Tensor:
    """Returns the scaled loss (scalar) of the positions `selected` [n, width], without
    gradients.
    """
    size, labels = chunks.size, targets.labels
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy
    if chunks.compiled:
        compiled_loss = compiled_function(_cross_entropy_alone, "The loss of an evaluation")
        if compiled_loss.problem:
            size = max(1, size // UNCOMPILED)
        else:
            loss_of = compiled_loss
            selected, labels = _filled_up(selected, labels, size)
    total = torch.zeros((), dtype=torch.float32, device=selected.device)
    with torch.no_grad():
        for start in range(0, len(targets.index), size):
            logits = skeleton.logits(selected[start : start + size])
            total += loss_of(logits, labels[start : start + size])
    return total * targets.scale


def _filled_up(
    selected: torch.Tensor, labels: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `selected` [n, width] and `labels` [n], padded with ignored positions at the end so
    that the last chunk has one of at most SHAPES sizes.
    """
    step = -(-size // SHAPES)
    rest = len(labels) % size
    missing = min(size, -(-rest // step) * step) - rest
    return pad(selected, (0, 0, 0, missing)), pad(labels, (0, missing), value=IGNORED)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of cross-entropies (scalar) in float32. The logits [n, vocabulary] may have
    any dtype; the labels are int64 [n].
    """
    return torch_cross_entropy(logits.float(), labels, reduction="sum")


def _cross_entropy_alone(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the same as `cross_entropy` for logits [n, vocabulary] and labels [n].

    It is another function so that it is compiled apart: should that fail, training goes on with its
    own kernels.
    """
    return cross_entropy(logits, labels)

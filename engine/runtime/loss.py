"""Chunked cross-entropy: the logits of a micro-batch are never all in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.model.skeleton import Skeleton
from engine.runtime.compiled import compiled_function

SHAPES = 16
"""Compiled chunks have one of so many sizes at most: kernels are made for each."""
UNCOMPILED = 4
"""Logits of a loss that is not compiled take so many times the memory: a chunk that was planned for
a compiled one is as much smaller.
"""
IGNORED = -100
"""Label that torch's cross-entropy leaves out."""


def chunked_loss(
    skeleton: Skeleton,
    hidden: torch.Tensor,
    index: torch.Tensor,
    labels: torch.Tensor,
    scale: float,
    chunk: int,
    parameters: list[nn.Parameter],
    accumulate: Callable[[tuple[torch.Tensor | None, ...]], None] | None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum of cross-entropies times `scale`, and its gradient with respect to `hidden`.

    hidden: [batch, tokens, width], the last block's output. index: int64 [n], flat positions that
    carry loss. labels: int64 [n], their targets. chunk: positions whose logits exist at once.
    `accumulate` receives the gradients of `parameters` chunk by chunk; without it no gradient is
    computed and the second result is None. The logits are upcast to float32 for the loss, as
    transformers does. compiled: the loss of given logits is compiled, and they are read and their
    gradient written once, in their own dtype.
    """
    states = hidden.detach().reshape(-1, hidden.shape[-1])
    selected = states.index_select(0, index)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    if accumulate is None:
        chunk = max(1, chunk // UNCOMPILED) if compiled else chunk
        with torch.no_grad():
            for start in range(0, len(index), chunk):
                logits = skeleton.logits(selected[start : start + chunk])
                total += cross_entropy(logits, labels[start : start + chunk])
        return total * scale, None
    loss_of, positions = compiled_function(cross_entropy) if compiled else cross_entropy, len(index)
    if compiled and loss_of.problem:
        loss_of, compiled, chunk = cross_entropy, False, max(1, chunk // UNCOMPILED)
    if compiled:
        # Positions that count for nothing fill the last chunk, so that it has one of few sizes.
        step = -(-chunk // SHAPES)
        missing = min(chunk, -(-(positions % chunk) // step) * step) - positions % chunk
        selected, labels = (
            F.pad(selected, (0, 0, 0, missing)),
            F.pad(labels, (0, missing), value=IGNORED),
        )
    gradient = torch.zeros_like(states)
    for start in range(0, positions, chunk):
        piece = selected[start : start + chunk].detach().requires_grad_()
        targets = labels[start : start + chunk]
        try:
            loss, piece_gradient, *parameter_gradients = _gradients(
                skeleton, piece, targets, scale, parameters, loss_of
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not compiled:
                raise
            loss_of.give_up(
                error
            )  # backward is compiled when it first runs; an error of another kind comes again
            loss, piece_gradient, *parameter_gradients = _gradients(
                skeleton, piece, targets, scale, parameters, loss_of
            )
        total += loss.detach()
        of = index[start : start + chunk]
        gradient.index_copy_(0, of, piece_gradient[: len(of)])
        accumulate(tuple(parameter_gradients))
    return total, gradient.view_as(hidden)


def _gradients(
    skeleton: Skeleton,
    piece: torch.Tensor,
    labels: torch.Tensor,
    scale: float,
    parameters: list[nn.Parameter],
    loss_of: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """The scaled loss of a chunk, and its gradients with respect to `piece` and to each parameter."""
    with torch.enable_grad():
        loss = loss_of(skeleton.logits(piece), labels) * scale
    return loss, *torch.autograd.grad(loss, [piece, *parameters], allow_unused=True)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the positions of logits [positions, vocabulary] of any dtype, in float32."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")

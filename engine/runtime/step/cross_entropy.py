"""Cross-entropy is computed in chunks, so that the logits of a micro-batch are never all in memory.

- The positions that contribute to the loss are gathered into one tensor and cut into chunks.
- A chunk goes through the model's tail (final norm, head), its logits are upcast to float32 as
  transformers does it, and their cross-entropies are summed.
- In training, the backward of a chunk follows at once. It gives the gradients of the chunk's hidden
  states, and of the tail's parameters, which the caller adds up.
- Without gradients, the cross-entropy of each position is returned too, so that the host can tell
  the loss of each row. The log-probabilities are computed once for both.
- A compiled loss reads the logits once and writes their gradient once, in their own dtype. Kernels
  are compiled for each size of a chunk, so the last chunk is padded to one of a few sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import log_softmax, nll_loss, pad

from engine.model.build.skeleton import Skeleton
from engine.runtime.device.compiled import compiled_function

SHAPES = 16
"""Most different sizes of compiled chunks, since kernels are compiled for each."""
UNCOMPILED = 4
"""Factor by which the loss of a chunk takes more memory without a compiler. The chunk that was
planned for a compiled loss is then divided by it.
"""
IGNORED = -100
"""Label of positions that torch's cross-entropy ignores."""


@dataclass(frozen=True)
class LossTargets:
    """The loss of a micro-batch is computed at these positions."""

    index: torch.Tensor
    """Flat positions, int64 [n]."""
    labels: torch.Tensor
    """Target tokens, int64 [n]."""
    scale: float
    """Factor of the sum of cross-entropies."""
    smoothing: float = 0.0
    """Fraction of a target's probability that is spread evenly over the vocabulary in training."""
    weights: torch.Tensor | None = None
    """Factors of the losses of the positions, float32 [n]; None for 1."""


@dataclass(frozen=True)
class LossChunks:
    """The loss is computed in chunks of this size."""

    size: int
    """Number of positions whose logits exist at once."""
    compiled: bool = False
    """Whether the loss of given logits is compiled."""


@dataclass(frozen=True)
class TailGradients:
    """The gradients of the tail's parameters are passed to `accumulate` chunk by chunk."""

    parameters: list[nn.Parameter]
    accumulate: Callable[[tuple[torch.Tensor | None, ...]], None]
    """The function receives the gradients of `parameters`, in the same order and shapes."""
    of_hidden: bool = True
    """The hidden states have a gradient too, since something below the tail is trained."""


@dataclass(frozen=True)
class _ChunkLoss:
    """Computes the loss of one chunk with its gradients."""

    skeleton: Skeleton
    scale: float
    tail: TailGradients

    def gradients(
        self,
        chunk: torch.Tensor,
        wanted: tuple[torch.Tensor, ...],
        loss_of: Callable[..., torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
        """Returns the scaled loss (scalar) of a chunk `chunk` [n, width], and its gradients with
        respect to `chunk`, where that is asked for, and to each parameter. `wanted` has the labels
        [n] and, where the loss is weighted, their weights [n].
        """
        with torch.enable_grad():
            loss = loss_of(self.skeleton.logits(chunk), *wanted) * self.scale
        of_chunk = [chunk] if self.tail.of_hidden else []
        found = torch.autograd.grad(loss, [*of_chunk, *self.tail.parameters], allow_unused=True)
        if not self.tail.of_hidden:
            return loss, None, found
        return loss, found[0], found[1:]


def chunked_loss(
    skeleton: Skeleton,
    hidden: torch.Tensor,
    targets: LossTargets,
    chunks: LossChunks,
    tail: TailGradients,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scaled sum of cross-entropies (a float64 scalar), smoothed and weighted as
    `targets` say, and its gradient with respect to `hidden` [rows, tokens, width], the last block's
    output. The gradient is None where `tail` asks for none.
    """
    states = hidden.detach().reshape(-1, hidden.shape[-1])
    selected = states.index_select(0, targets.index)
    # A long micro-batch has so many chunks that a sum in fp32 would lose digits.
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    size, labels, weights = chunks.size, targets.labels, targets.weights
    plain_loss = _loss_of(targets)
    compiled_loss = compiled_function(plain_loss, "The loss") if chunks.compiled else None
    if compiled_loss is not None and compiled_loss.problem:
        compiled_loss = None
        size = max(1, size // UNCOMPILED)
    if compiled_loss is not None:
        selected, labels = filled_up(selected, labels, size)
    wanted = (labels,) if weights is None else (labels, _filled_up_to(labels, weights))
    loss_of = plain_loss if compiled_loss is None else compiled_loss
    chunk_loss = _ChunkLoss(skeleton, targets.scale, tail)
    gradient = torch.zeros_like(states) if tail.of_hidden else None
    for start in range(0, len(targets.index), size):
        chunk = selected[start : start + size].detach().requires_grad_(tail.of_hidden)
        of_chunk = tuple(each[start : start + size] for each in wanted)
        try:
            loss, chunk_gradient, parameter_gradients = chunk_loss.gradients(
                chunk, of_chunk, loss_of
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if compiled_loss is None:
                raise
            # Backward is compiled when it first runs, so compiling may have failed here. After
            # `abort` the function runs uncompiled, so an error with another cause is raised
            # again.
            compiled_loss.abort(error)
            loss, chunk_gradient, parameter_gradients = chunk_loss.gradients(
                chunk, of_chunk, loss_of
            )
        total += loss.detach()
        places = targets.index[start : start + size]
        if gradient is not None and chunk_gradient is not None:
            gradient.index_copy_(0, places, chunk_gradient[: len(places)])
        tail.accumulate(parameter_gradients)
    return total, None if gradient is None else gradient.view_as(hidden)


def loss_without_gradients(
    skeleton: Skeleton, hidden: torch.Tensor, targets: LossTargets, chunks: LossChunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scaled and weighted sum of cross-entropies (a float64 scalar) for `hidden` [rows,
    tokens, width], and the cross-entropy of each position in `targets`, float32 [n], without scale
    and weight.
    """
    selected = hidden.detach().reshape(-1, hidden.shape[-1]).index_select(0, targets.index)
    size, labels = chunks.size, targets.labels
    loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]] = cross_entropies
    if chunks.compiled:
        compiled_loss = compiled_function(cross_entropies, "The loss of an evaluation")
        if compiled_loss.problem:
            size = max(1, size // UNCOMPILED)
        else:
            loss_of = compiled_loss
            selected, labels = filled_up(selected, labels, size)
    count = len(targets.index)
    total = torch.zeros((), dtype=torch.float64, device=selected.device)
    each = torch.empty(count, dtype=torch.float32, device=selected.device)
    with torch.no_grad():
        for start in range(0, count, size):
            logits = skeleton.logits(selected[start : start + size])
            loss, losses = loss_of(logits, labels[start : start + size])
            each[start : start + size] = losses[: count - start]
            if targets.weights is not None:
                own = slice(start, min(start + size, count))
                loss = (each[own] * targets.weights[own]).sum()
            total += loss
    return total * targets.scale, each


def scores(
    skeleton: Skeleton, hidden: torch.Tensor, targets: LossTargets, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cross-entropy of each target, float32 [n], and whether no token is likelier than
    it, bool [n], for `hidden` [rows, tokens, width]. A position may have several targets. The
    logits of at most `chunk` // UNCOMPILED of them exist at once.
    """
    selected = hidden.reshape(-1, hidden.shape[-1])
    each = torch.empty(len(targets.index), dtype=torch.float32, device=hidden.device)
    likeliest = torch.empty(len(targets.index), dtype=torch.bool, device=hidden.device)
    size = max(1, chunk // UNCOMPILED)
    with torch.no_grad():
        for start in range(0, len(targets.index), size):
            part = slice(start, start + size)
            logits = skeleton.logits(selected.index_select(0, targets.index[part]))
            each[part] = cross_entropies(logits, targets.labels[part])[1]
            likeliest[part] = logits.argmax(-1) == targets.labels[part]
    return each, likeliest


def filled_up(
    selected: torch.Tensor, labels: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `selected` [n, width] and `labels` [n], padded with ignored positions at the end so
    that the last chunk has one of at most SHAPES sizes.
    """
    step = -(-size // SHAPES)
    rest = len(labels) % size
    missing = min(size, -(-rest // step) * step) - rest
    return pad(selected, (0, 0, 0, missing)), pad(labels, (0, missing), value=IGNORED)


def _filled_up_to(labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns `weights` [n], padded with 0 to as many as the padded `labels` are."""
    return pad(weights, (0, len(labels) - len(weights)))


def _loss_of(targets: LossTargets) -> Callable[..., torch.Tensor]:
    """Returns the function that computes the loss of a chunk from its logits [n, vocabulary], its
    labels [n] and, where they are weighted, their weights [n].
    """
    if targets.weights is not None:
        return weighted(targets.smoothing)
    return smoothed(targets.smoothing) if targets.smoothing else cross_entropy


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of cross-entropies (scalar) in float32. The logits [n, vocabulary] may have
    any dtype; the labels are int64 [n].
    """
    return torch_cross_entropy(logits.float(), labels, reduction="sum")


@functools.cache
def smoothed(smoothing: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns `cross_entropy` with label smoothing: of each position, (1 - smoothing) times its
    cross-entropy, and smoothing times the mean of -log(p) over the vocabulary. It takes logits [n,
    vocabulary] and labels [n], and returns a scalar. There is one function for each number, so that
    it is compiled once.
    """

    def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch_cross_entropy(
            logits.float(), labels, reduction="sum", label_smoothing=smoothing
        )

    return smoothed_cross_entropy


@functools.cache
def weighted(
    smoothing: float,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns `smoothed`, or with 0 `cross_entropy`, with a weight for each position: the losses
    are multiplied by the weights, float32 [n], before they are summed.
    """

    def weighted_cross_entropy(
        logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        each = torch_cross_entropy(
            logits.float(), labels, reduction="none", label_smoothing=smoothing
        )
        return (each * weights).sum()

    return weighted_cross_entropy


def cross_entropies(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of cross-entropies (scalar), with the bits of `cross_entropy`, and each of
    them, float32 [n], for logits [n, vocabulary] and labels [n].

    It is another function so that it is compiled apart: should that fail, training continues with
    its own kernels.
    """
    logs = log_softmax(logits.float(), dim=-1)
    return nll_loss(logs, labels, reduction="sum"), nll_loss(logs, labels, reduction="none")

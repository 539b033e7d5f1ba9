"""Mixtures of experts may have a further loss that balances how often their experts are chosen.

Transformers (`load_balancing_loss_func`) takes the routers of all layers together. Over all tokens
and layers, `f` of an expert is how often it is chosen, and `p` is its mean probability; the loss is
`coefficient * experts * sum of f * p`. It is not a sum over blocks, but its gradient is known to
each block once all blocks have gone forward:

- `f` has no gradient, since it is counted. Forward counts it, block by block.
- The gradient of a probability is `coefficient * experts * f`, over the tokens and layers. A block
  goes backward after the forward of all blocks, so it reads the whole `f` then.

A router returns its logits and the scores of the experts that it chooses. Its scores pass through
`_Balanced`, which leaves them as they are; in backward it gives the logits their gradient.

As in transformers, the loss is taken of each micro-batch, without padding. A micro-batch counts as
much as its share of the step's trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from engine.model.build.units import RouterLoss


class Batch(Protocol):
    """A micro-batch on the device, as `engine.runtime.step.step.DeviceBatch` describes."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def lengths(self) -> torch.Tensor | None: ...
    @property
    def loss_weight(self) -> float: ...


@dataclass(frozen=True)
class BalancedTokens:
    """Those of a micro-batch for which routers are balanced."""

    own: torch.Tensor
    """1.0 for a token of a row and 0.0 for padding, float32 [rows x tokens]."""
    weight: float
    """The micro-batch has this share of the step's trained tokens."""
    counted: torch.Tensor
    """Numbers of tokens that have chosen each expert, and the sums of their probabilities, which
    each layer fills in its forward: float32 [2, layers, experts].
    """


class _Balanced(torch.autograd.Function):
    """Passes scores on, and gives router logits the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, logits: torch.Tensor, of_probabilities: _Gradient
    ) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.of_probabilities = of_probabilities
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        probabilities = logits.float().softmax(-1)
        given = ctx.of_probabilities()
        inner = (probabilities * given).sum(-1, keepdim=True)
        return gradient, (probabilities * (given - inner)).to(logits.dtype), None


@dataclass(frozen=True)
class _Gradient:
    """Gradient of the probabilities of a micro-batch, once all blocks have counted."""

    balance: RouterAuxLoss
    tokens: BalancedTokens

    def __call__(self) -> torch.Tensor:
        """Returns the gradient, float32 [rows x tokens, experts]."""
        balance, tokens = self.balance, self.tokens
        chosen = balance.means(tokens)[0]
        scale = balance.scale * tokens.weight / balance.rows_of(tokens)
        return tokens.own.unsqueeze(1) * (chosen * scale)


class RouterAuxLoss:
    """Watches the routers of an engine's templates while blocks run."""

    def __init__(self, loss: RouterLoss):
        self._loss = loss
        self.scale = loss.coefficient * loss.experts
        self._layers = {unit: layer for layer, unit in enumerate(loss.routers)}
        self._now: tuple[int, BalancedTokens, bool] | None = None
        """The layer and the tokens that run; whether they are counted."""

    def tokens_of(self, batch: Batch, loss_scale: float) -> BalancedTokens:
        """Returns the tokens of a micro-batch in training. loss_scale: `StepInputs.loss_scale`."""
        own = torch.ones(batch.input_ids.shape, device=batch.input_ids.device)
        if batch.lengths is not None:
            places = torch.arange(own.shape[1], device=own.device)
            own = (places < batch.lengths.unsqueeze(1)).float()
        counted = own.new_zeros(2, len(self._layers), self._loss.experts)
        return BalancedTokens(own.reshape(-1), batch.loss_weight * loss_scale, counted)

    def watch(self, template: nn.Module, unit: str) -> None:
        """Watches the router of a template for blocks like that of `unit`, if it has one."""
        name = self._loss.routers.get(unit)
        if name is not None:
            # What the hook notes is no part of a compiled block. As a decorator, this would import
            # the compiler into every process, for a second.
            hook = torch.compiler.disable(self._routed)
            template.get_submodule(name).register_forward_hook(hook)

    def enter(self, unit: str, tokens: BalancedTokens | None, counts: bool) -> None:
        """Says which block runs next, on which tokens; without them, nothing is balanced. A forward
        `counts`, a recompute does not.
        """
        self._now = None
        if tokens is not None and unit in self._layers:
            self._now = self._layers[unit], tokens, counts

    def rows_of(self, tokens: BalancedTokens) -> torch.Tensor:
        """Returns how many tokens all routers together have seen, a float32 scalar."""
        return tokens.own.sum() * len(self._layers)

    def means(self, tokens: BalancedTokens) -> torch.Tensor:
        """Returns how often each expert was chosen, and its mean probability, over all layers:
        float32 [2, experts]. All blocks must have gone forward.
        """
        return tokens.counted.sum(1) / self.rows_of(tokens)

    def loss(self, tokens: BalancedTokens) -> torch.Tensor:
        """Returns the loss of a micro-batch, its share of that of the step: a float32 scalar. All
        blocks must have gone forward.
        """
        chosen, probable = self.means(tokens)
        return (chosen * probable).sum() * (self.scale * tokens.weight)

    def _routed(self, _router: nn.Module, _inputs: Any, out: tuple[Any, ...]) -> Any:
        """Counts what a router has chosen, and returns its result with balanced scores."""
        if self._now is None:
            return out
        layer, tokens, counts = self._now
        logits, scores, *rest = out
        if counts:
            with torch.no_grad():
                self._count(layer, tokens, logits)
        if not torch.is_grad_enabled():
            return out
        gradient = _Gradient(self, tokens)
        return (logits, _Balanced.apply(scores, logits, gradient), *rest)

    def _count(self, layer: int, tokens: BalancedTokens, logits: torch.Tensor) -> None:
        """Counts the choices of a layer by its `logits` [rows x tokens, experts]."""
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self._loss.chosen, dim=-1).indices
        own = tokens.own
        counted, probable = tokens.counted[:, layer]
        times = own.repeat_interleave(self._loss.chosen)
        counted.zero_().scatter_add_(0, chosen.reshape(-1), times)
        probable.copy_((probabilities.float() * own.unsqueeze(1)).sum(0))

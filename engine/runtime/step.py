"""A step has inputs, things that its ops leave for each other, and a result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.model.attention_documents import Documents
from engine.model.skeleton import BlockArguments


@dataclass
class DeviceBatch:
    """A `DeviceBatch` is one micro-batch on the device."""

    input_ids: torch.Tensor
    """The token ids are int64 [rows, tokens]."""
    position_ids: torch.Tensor | None
    """The positions are int64 [rows, tokens]; None where every row counts from 0."""
    loss_index: torch.Tensor
    """These flat positions carry loss: int64 [n]."""
    labels: torch.Tensor
    """These are the target tokens of the positions that carry loss: int64 [n]."""
    documents: Documents | None = None
    """The host knows the documents of `position_ids`, so that nothing is read from the device."""


@dataclass(frozen=True)
class StepInputs:
    """A step is given these inputs. No op changes them, but for `caches`."""

    number: int
    """Optimizer steps count from 1; a pass without gradients has the number 0."""
    batches: list[DeviceBatch]
    loss_scale: float
    """The scale is 1 / (tokens of the whole step that carry loss)."""
    learning_rate: float = 0.0
    max_grad_norm: float | None = None
    seed: int = 0
    training: bool = True
    logits_at: list[torch.Tensor] | None = None
    """Sampling wants the logits at these flat positions, int64 [n] for each micro-batch. No loss is
    computed then.
    """
    caches: list[Any] | None = None
    """Sampling passes the key-value cache of each micro-batch. Where it is None, the model makes
    one, which is put here.
    """
    scalars: torch.Tensor | None = None
    """An optimizer on the device gets `HostAdamW.scalars`, float32 [8], as a tensor there."""


@dataclass(frozen=True)
class StepResult:
    """The result of a training step is known before its updates begin."""

    loss: float
    grad_norm: float
    unit_norms: list[float]
    """Each unit's gradient has one norm; the order is that of the model's units."""
    clip_factor: float


@dataclass
class StepUnderWay:
    """A `StepUnderWay` is a step between its first op and its last. Most of it is kept by
    micro-batch: one op leaves it for another.
    """

    inputs: StepInputs
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    """Each micro-batch has its hidden states [rows, tokens, width] here on the way forward, and
    their gradients on the way back.
    """
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    """Each micro-batch's hidden state has this shape."""
    arguments: dict[int, list[BlockArguments]] = field(default_factory=dict)
    """Each micro-batch calls the blocks with these arguments, in forward order."""
    saved: dict[tuple[str, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """A block keeps this for its backward, by (unit, micro-batch): its input and its output where
    it keeps its activations, else its input alone.
    """
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Each micro-batch has its logits [n, vocabulary] here, where `logits_at` asks for them."""
    failure: str | None = None
    """This says why a pass with caches failed; None while it has not."""
    result: StepResult | None = None
    """The result is there once the op `clip` has run."""

    def give_up(self, failure: str) -> None:
        """Leaves out the rest of the pass, and says why."""
        self.failure = failure

    def finish(self, result: StepResult) -> None:
        """Keeps loss and norms; updates may begin."""
        self.result = result

"""One step while its ops run: what goes in, what is under way, what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.model.attention_documents import Documents
from engine.model.skeleton import BlockArguments


@dataclass
class DeviceBatch:
    """One micro-batch on the device: token ids [batch, tokens], positions or None, and where loss
    is.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    loss_index: torch.Tensor
    """Flat positions that carry loss, int64 [n]."""
    labels: torch.Tensor
    """Their target tokens, int64 [n]."""
    documents: Documents | None = None
    """Those of `position_ids`, as the host knows them."""


@dataclass(frozen=True)
class StepInputs:
    """What a step is given, and no op changes but for `caches`."""

    number: int
    """Optimizer step, from 1; 0 for passes without gradients."""
    batches: list[DeviceBatch]
    loss_scale: float
    """1 / (tokens of the whole step that carry loss)."""
    learning_rate: float = 0.0
    max_grad_norm: float | None = None
    seed: int = 0
    training: bool = True
    logits_at: list[torch.Tensor] | None = None
    """For sampling: flat positions whose logits are wanted, by micro-batch; no loss is computed
    then.
    """
    caches: list[Any] | None = None
    """For sampling: each micro-batch's key-value cache, None where the model is to make one, which
    is put here.
    """
    scalars: torch.Tensor | None = None
    """`HostAdamW.scalars` on the device, where an optimizer runs there."""


@dataclass(frozen=True)
class StepResult:
    """What a training step comes to, known before its updates begin."""

    loss: float
    grad_norm: float
    unit_norms: list[float]
    """Of each unit's gradient, as the model orders them."""
    clip_factor: float


@dataclass
class StepUnderWay:
    """A step between its first op and its last: what one op leaves for another, by micro-batch."""

    inputs: StepInputs
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    """Hidden states on the way forward, their gradients on the way back."""
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    """Shape of each micro-batch's hidden state."""
    arguments: dict[int, list[BlockArguments]] = field(default_factory=dict)
    saved: dict[tuple[str, int], tuple] = field(default_factory=dict)
    """What a block keeps for its backward."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Where `logits_at` asks for them."""
    failure: str | None = None
    """What a pass with caches could not do."""
    result: StepResult | None = None

    def give_up(self, failure: str) -> None:
        """The rest of the pass is left out."""
        self.failure = failure

    def finish(self, result: StepResult) -> None:
        """Loss and norms are known; updates may begin."""
        self.result = result

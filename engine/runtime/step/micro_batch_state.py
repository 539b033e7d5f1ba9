"""A step holds a `MicroBatchState` for each of its micro-batches: what one op of it leaves for
another.

Some of it is freed in the middle of the step, because the device needs the memory:

- `end_forward` frees the last hidden states and the arguments of the blocks once a pass without
  gradients has them no more: the next group of micro-batches takes their place.
- `end_backward` frees the gradient of the hidden states and these arguments after the lowest op
  that needs them.
- An entry of `saved` or `attention` is taken out by the backward or recompute that uses it.

The rest is small, or is the result of a pass, and is freed with the step.
"""

from __future__ import annotations

import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.model.blocks.cross_layer_values import CrossLayerValues
from engine.model.blocks.saved_attention import SavedCalls
from engine.runtime.step.embedding_grad import Lookup
from engine.runtime.step.router_aux_loss import BalancedTokens


class MicroBatchState:
    """Tensors of one micro-batch on the device. What is freed, or not there yet, is no attribute:
    reading it fails.
    """

    hidden: torch.Tensor
    """Hidden states [rows, tokens, width] in forward, and their gradient in backward."""
    shape: torch.Size
    """Shape of the hidden states."""
    arguments: list[BlockArguments]
    """Arguments with which the blocks are called, in forward order."""
    lookup: Lookup
    """Token ids, while rows of the embedding get their gradients."""
    loss: torch.Tensor
    """Loss in a pass without gradients, a float64 scalar."""
    position_losses: torch.Tensor
    """Cross-entropies of the positions in a pass without gradients, float32 [n], in the order of
    `DeviceBatch.loss_index`.
    """
    likeliest: torch.Tensor
    """Whether no token is likelier than each label of a scored pass: bool [n], in that order."""
    logits: torch.Tensor
    """Logits [n, vocabulary], if `StepInputs.logits_at` requests them."""

    def __init__(self) -> None:
        self.saved: dict[str, tuple[torch.Tensor, ...]] = {}
        """Tensors that a block, by its unit, keeps for its backward: its input and output if it
        keeps its activations, and otherwise its input alone.
        """
        self.attention: dict[str, SavedCalls] = {}
        """Calls of attention whose results a block, by its unit, keeps."""
        self.cross_layer_values: CrossLayerValues | None = None
        """Values that the blocks pass to later blocks, if any."""
        self.balanced: BalancedTokens | None = None
        """Tokens for which the routers are balanced in training; None without routers."""
        self.sequence_sums: torch.Tensor | None = None
        """Log-probabilities of the answers and of the lines of pairs in training, float32
        [lines, 2]; None for other rows.
        """

    def end_backward(self) -> None:
        """Frees the gradient of the hidden states, and what the blocks were given, such as masks
        and rotary tables, which are no longer needed.
        """
        del self.hidden
        self.forget_arguments()

    def end_forward(self) -> torch.Tensor:
        """Returns the last hidden states [rows, tokens, width], and frees them and what the blocks
        were given: the next group of micro-batches needs the memory.
        """
        self.forget_arguments()
        hidden = self.hidden
        del self.hidden
        return hidden

    def forget_arguments(self) -> None:
        """Frees what the blocks were given."""
        del self.arguments
        self.cross_layer_values = None

"""The model's own code around its blocks: the capture pass before them, the tail after them.

The Hugging Face model is built without weights and every decoder block's `forward` is replaced by a recorder. Running
the model's own `forward` then yields the first hidden state and the exact arguments of every block (masks, rotary
embeddings, whatever the family needs), with no per-family code. The tail is the same trick: the blocks hand back a
given hidden state, so that the model's own final norm, head, logit scale and soft cap turn it into logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine import attention
from engine.attention import Documents
from engine.errors import ModelError


class _Captured(Exception):
    """Raised by the last recorder, so that the norm and the head do not run in a capture pass."""


@dataclass
class BlockArguments:
    """What one block is called with, its hidden state left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_keyword: str | None

    def call(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run `block` on `hidden` [batch, tokens, width]; the block's hidden state, whether or not it returns more."""
        if self.hidden_keyword is None:
            out = block(hidden, *self.args, **self.kwargs)
        else:
            out = block(*self.args, **{self.hidden_keyword: hidden}, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


@dataclass
class Capture:
    """Result of a capture pass: the input of the first block and every block's arguments."""

    hidden: torch.Tensor
    arguments: list[BlockArguments]


class Skeleton:
    """A causal language model whose blocks are recorders; embedding, final norm and head are bound to device slots."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList):
        self.model = model
        self.blocks = list(layers)
        self.returns_tuple = [False] * len(self.blocks)
        self._recording: list[BlockArguments] | None = None
        self._hidden: torch.Tensor | None = None
        self._local_kinds: dict[int, str] = {}
        self._inputs: list[torch.Tensor] = []
        for position, block in enumerate(self.blocks):
            block.forward = self._recorder(position)

    def _recorder(self, position: int):
        last = len(self.blocks) - 1

        def forward(*args, **kwargs):
            if self._recording is None:
                hidden = self._hidden
            else:
                keyword = None if args else "hidden_states"
                if keyword is not None and keyword not in kwargs:
                    raise ModelError(f"{type(self.model).__name__} calls its blocks without a hidden state, "
                                     "which cannot be streamed; choose another model.")
                hidden = args[0] if args else kwargs[keyword]
                if len(self._recording) != position:
                    raise ModelError(f"{type(self.model).__name__} does not run its blocks once each and in order, "
                                     "which cannot be streamed; choose another model.")
                rest = {name: value for name, value in kwargs.items() if name != keyword}
                self._recording.append(BlockArguments(args[1:], rest, keyword))
                self._inputs.append(hidden)
                if position == last:
                    raise _Captured
            return (hidden,) if self.returns_tuple[position] else hidden

        return forward

    def capture(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None,
                documents: Documents | None = None) -> Capture:
        """Run the model's own forward up to its last block. input_ids, position_ids: int64 [batch, tokens].

        Gradients flow from `hidden` to the embedding when they are enabled. `documents`: those of `position_ids`, which
        are read from the device without them.
        """
        self._recording, self._inputs = [], []
        extra = {} if position_ids is None else {"position_ids": position_ids}
        try:
            attention.forward(self.model, input_ids, documents, self._local_kinds, **extra)
        except _Captured:
            return Capture(self._inputs[0], self._recording)
        finally:
            self._recording, self._inputs = None, []
        raise ModelError(f"{type(self.model).__name__} did not run its blocks, so it cannot be streamed.")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own tail on `hidden` [tokens, width] (any tokens, in any order): logits [tokens, vocabulary]."""
        self._hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        try:
            return attention.forward(self.model, ids, None, self._local_kinds).logits[0]
        finally:
            self._hidden = None


def parameters_reached(output: torch.Tensor) -> set[int]:
    """ids of the leaf tensors that `output`'s autograd graph leads to."""
    found, seen, stack = set(), set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(parent for parent, _ in node.next_functions)
    return found


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, dicts and plain objects of arguments, with where it was found."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in tensors_in(inner, f"{path}[{key!r}]")]
    if isinstance(value, (tuple, list)):
        return [item for k, inner in enumerate(value) for item in tensors_in(inner, f"{path}[{k}]")]
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        return [item for key, inner in vars(value).items() for item in tensors_in(inner, f"{path}.{key}")]
    return []

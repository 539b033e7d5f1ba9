"""The model's own code around its blocks: the capture pass before them, the tail after them.

The Hugging Face model is built without weights and every decoder block's `forward` is replaced by a
recorder. Running the model's own `forward` then yields the first hidden state and the exact
arguments of every block (masks, rotary embeddings, whatever the family needs), with no per-family
code. The tail is the same trick: the blocks hand back a given hidden state, so that the model's own
final norm, head, logit scale and soft cap turn it into logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.errors import ModelError
from engine.model import attention
from engine.model.attention import Documents
from engine.model.library import transformers


class _Captured(Exception):
    """Raised by the last recorder, so that the norm and the head do not run in a capture pass."""


@dataclass
class BlockArguments:
    """What one block is called with, its hidden state left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_keyword: str | None

    def call(self, block: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """Run `block` on `hidden` [batch, tokens, width]; the block's hidden state, whether or not
        it returns more.
        """
        if self.hidden_keyword is None:
            out = block(hidden, *self.args, **self.kwargs)
        else:
            out = block(*self.args, **{self.hidden_keyword: hidden}, **self.kwargs)
        return out[0] if isinstance(out, (tuple, list)) else out


@dataclass
class Capture:
    """Result of a capture pass: the input of the first block and every block's arguments."""

    hidden: torch.Tensor
    arguments: list[BlockArguments]


class Skeleton:
    """A causal language model whose blocks are recorders; embedding, final norm and head are bound
    to device slots.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList):
        self.model = model
        self.blocks = list(layers)
        self.extras: list[tuple | None] = [None] * len(self.blocks)
        """What stands in for what a block returns beside its hidden state; None for a block that
        returns a tensor.
        """
        self._ask: Callable[[int, BlockArguments, torch.Tensor], tuple | None] | None = None
        self._ran: list[int] = []
        self._entering: list[torch.Tensor] | None = None
        self._recording: list[BlockArguments] | None = None
        self._hidden: torch.Tensor | None = None
        self._local_kinds: dict[int, str] = {}
        self._inputs: list[torch.Tensor] = []
        self._cache_type = transformers().Cache
        accepted = inspect.signature(model.forward).parameters
        self._cache_keyword = next(
            (n for n in ("past_key_values", "cache_params") if n in accepted), "past_key_values"
        )
        for position, block in enumerate(self.blocks):
            block.forward = self._recorder(position)

    def _recorder(self, position: int):
        last = len(self.blocks) - 1

        def forward(*args, **kwargs):
            if self._recording is None:
                self._ran.append(position)
                if self._entering is not None:
                    self._entering.append(args[0] if args else kwargs["hidden_states"])
                hidden = self._hidden
            else:
                hidden = self._record(position, args, kwargs)
                if position == last:
                    raise _Captured
            extras = self.extras[position]
            return hidden if extras is None else (hidden, *extras)

        return forward

    def _record(self, position: int, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        keyword = None if args else "hidden_states"
        if keyword is not None and keyword not in kwargs:
            raise ModelError(
                f"{type(self.model).__name__} calls its blocks without a hidden state, "
                "which cannot be streamed; choose another model."
            )
        hidden = args[0] if args else kwargs[keyword]
        if len(self._recording) != position:
            raise ModelError(
                f"{type(self.model).__name__} does not run its blocks once each and in order, "
                "which cannot be streamed; choose another model."
            )
        if self._inputs and hidden is not self._inputs[-1]:
            raise ModelError(
                f"{type(self.model).__name__} changes the hidden state between block "
                f"{position - 1} and block {position}, which cannot be streamed; choose another "
                "model."
            )
        rest = {name: value for name, value in kwargs.items() if name != keyword}
        self._recording.append(BlockArguments(args[1:], rest, keyword))
        self._inputs.append(hidden)
        if self._ask is not None:
            self.extras[position] = self._ask(position, self._recording[-1], hidden)
        return hidden

    def ask_blocks(
        self,
        input_ids: torch.Tensor,
        ask: Callable[[int, BlockArguments, torch.Tensor], tuple | None],
    ) -> Capture:
        """A capture pass in which `ask(position, arguments, hidden)` says what each block returns
        beside its hidden state: placeholders, or None for a block that returns a tensor.
        """
        self._ask = ask
        try:
            return self.capture(input_ids, None)
        finally:
            self._ask = None

    def capture(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        use_cache: bool = False,
        cache: Any = None,
        documents: Documents | None = None,
    ) -> Capture:
        """Run the model's own forward up to its last block. input_ids, position_ids: int64 [batch,
        tokens].

        Gradients flow from `hidden` to the embedding when they are enabled. `use_cache`: the blocks
        are given a key-value cache: `cache`, which holds the tokens before these, or a new one that
        the model makes. `documents`: those of `position_ids`, which are read from the device
        without them.
        """
        self._recording, self._inputs = [], []
        extra = {} if position_ids is None else {"position_ids": position_ids}
        if cache is not None:
            extra[self._cache_keyword] = cache
        try:
            attention.forward(
                self.model, input_ids, documents, self._local_kinds, use_cache=use_cache, **extra
            )
        except _Captured:
            return Capture(self._inputs[0], self._recording)
        finally:
            self._recording, self._inputs = None, []
        raise ModelError(
            f"{type(self.model).__name__} did not run its blocks, so it cannot be streamed."
        )

    def caches(self, captured: Capture) -> list[Any]:
        """The key-value cache objects that the blocks are given, each once."""
        given = [value for a in captured.arguments for value in (*a.args, *a.kwargs.values())]
        return list(
            {id(value): value for value in given if isinstance(value, self._cache_type)}.values()
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own tail on `hidden` [tokens, width] (any tokens, in any order): logits
        [tokens, vocabulary].
        """
        self._hidden, self._ran = hidden.unsqueeze(0), []
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        try:
            logits = attention.forward(self.model, ids, None, self._local_kinds).logits[0]
        finally:
            self._hidden = None
        if self._ran != list(range(len(self.blocks))):
            raise ModelError(
                f"{type(self.model).__name__} does not run its blocks once each and in order, "
                "which cannot be streamed; choose another model."
            )
        return logits

    def probe_tail(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, with gradients; raises ModelError where the tail also uses what went into
        the blocks.
        """
        self._entering = []
        try:
            logits = self.logits(hidden)
            before, after = _graph(self._entering[0]), _graph(logits)
        finally:
            self._entering = None
        if any(not hasattr(node, "variable") for node in before & after):
            raise ModelError(
                f"{type(self.model).__name__} leads its embedding past the blocks into the head; "
                "that gradient would be lost, so this model is refused."
            )
        return logits


def parameters_reached(output: torch.Tensor) -> set[int]:
    """Ids of the leaf tensors that `output`'s autograd graph leads to."""
    return {id(node.variable) for node in _graph(output) if hasattr(node, "variable")}


def _graph(output: torch.Tensor) -> set:
    """All nodes of `output`'s autograd graph."""
    seen, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
    return seen


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, dicts and plain objects of arguments, with where it was
    found.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [
            item for key, inner in value.items() for item in tensors_in(inner, f"{path}[{key!r}]")
        ]
    if isinstance(value, (tuple, list)):
        return [item for k, inner in enumerate(value) for item in tensors_in(inner, f"{path}[{k}]")]
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        return [
            item
            for key, inner in vars(value).items()
            for item in tensors_in(inner, f"{path}.{key}")
        ]
    return []

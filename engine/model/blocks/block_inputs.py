"""Arguments of blocks, which the model's own code makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.blocks.hidden_layout import HiddenLayout


@dataclass
class BlockArguments:
    """Arguments of a block in addition to its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_keyword: str | None
    """The block receives its hidden state under this keyword, or as its first argument if this is
    None.
    """
    hidden_layout: HiddenLayout | None = None
    """Layout of the state that the block takes and returns; None for [rows, tokens, width]."""

    def call(self, block: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """Runs `block` on `hidden` [rows, tokens, width] and returns the block's hidden state
        [rows, tokens, width], whether or not the block returns more.
        """
        return self.state_of(self.call_for_all(block, hidden))

    def call_for_all(self, block: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Runs `block` on `hidden` [rows, tokens, width] and returns its full result."""
        state = hidden if self.hidden_layout is None else self.hidden_layout.own(hidden)
        if self.hidden_keyword is None:
            return block(state, *self.args, **self.kwargs)
        return block(*self.args, **{self.hidden_keyword: state}, **self.kwargs)

    def state_of(self, out: Any) -> torch.Tensor:
        """Returns the hidden state [rows, tokens, width] in a block's full result."""
        state = out[0] if isinstance(out, (tuple, list)) else out
        return state if self.hidden_layout is None else self.hidden_layout.flat(state)

    @property
    def nested(self) -> dict[str, Any]:
        """The arguments as nested containers, in which values have places."""
        return {"args": self.args, "kwargs": self.kwargs}

    def with_nested(self, nested: dict[str, Any]) -> BlockArguments:
        """Returns arguments with other values, given as `nested` returns them."""
        return BlockArguments(
            nested["args"], nested["kwargs"], self.hidden_keyword, self.hidden_layout
        )


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Returns every tensor in nested tuples, lists, dicts and plain objects, each with the path to
    it.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inside = [(f"{path}[{key!r}]", inner) for key, inner in value.items()]
    elif isinstance(value, (tuple, list)):
        inside = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        inside = [(f"{path}.{key}", inner) for key, inner in vars(value).items()]
    return [item for where, inner in inside for item in tensors_in(inner, where)]

"""The gradient of an embedding table is computed for some of its rows at a time, so that neither
the gradient nor its fp32 accumulator is ever whole on the device.

A backward first goes to the vectors that were looked up. Each row of the table then receives those
of its own tokens. Torch's kernel adds them in the order of the tokens, row by row, so that a row's
gradient has the same bits whether or not other rows are computed with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode

from engine.errors import ModelError

_OTHER_GRADIENTS = ("max_norm", "scale_grad_by_freq", "sparse")
"""A lookup that uses such an argument is left as it is, and then refused (`LookupWatch.only`)."""


@dataclass(frozen=True)
class Lookup:
    """Rows of a table that a capture pass used."""

    ids: torch.Tensor
    """Rows that were looked up, int64 of any shape."""
    padding: int
    """The row of this number never receives a gradient; -1 where there is none."""

    def rows_gradient(self, gradient: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """Returns the gradient [rows, width] of the rows from `first` on. gradient: that of the
        looked-up vectors, in their shape.
        """
        local = self.ids - first
        elsewhere = (local < 0) | (local >= rows) | (self.ids == self.padding)
        # One row more takes what belongs to other rows; as padding, it is skipped.
        local = local.masked_fill(elsewhere, rows)
        whole = torch.ops.aten.embedding_dense_backward(gradient, local, rows + 1, rows, False)
        return whole[:rows]


class LookupWatch(TorchFunctionMode):
    """While a `LookupWatch` is active, the vectors that a model looks up in `table` are leaves of
    its graph.
    """

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self._table = table
        self._found: list[tuple[Lookup, torch.Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found: Mapping[str, Any] = {}
        if func is embedding:
            found = inspect.signature(embedding).bind(*args, **(kwargs or {})).arguments
        is_plain = not any(map(found.get, _OTHER_GRADIENTS))
        if found.get("weight") is self._table and is_plain:
            return self._look_up(found["input"], found.get("padding_idx"))
        return func(*args, **(kwargs or {}))

    def _look_up(self, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
        with torch.no_grad():
            vectors = embedding(ids, self._table)
        vectors.requires_grad_()
        row = -1 if padding is None else padding % len(self._table)
        self._found.append((Lookup(ids, row), vectors))
        return vectors.clone()  # some models change what they look up in place

    def only(self) -> tuple[Lookup, torch.Tensor]:
        """Returns the one lookup of the pass, and its vectors [*ids.shape, width]. Raises
        ModelError where the model uses its table otherwise.
        """
        if len(self._found) != 1:
            raise ModelError(
                f"The model looks its tokens up {len(self._found)} times, so its embedding cannot "
                "be trained in chunks; set engine.gradients to host."
            )
        return self._found[0]

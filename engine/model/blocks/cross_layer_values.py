"""The cross-layer values of a micro-batch, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.model.blocks.cross_layer_inputs import (
    BEFORE,
    OUT,
    BlockCrossLayerFlow,
    CrossLayerFlow,
    Source,
)
from engine.model.blocks.pytree_paths import Place, mapped, replaced, tensors_of, value_at


class _Leaf(NamedTuple):
    """A tensor that a block has taken and that needs a gradient."""

    source: Source
    number: int
    """Index of this one among the tensors in the value of `source`."""
    tensor: torch.Tensor


class _Run(NamedTuple):
    """A block ran with gradients. This is kept for its backward."""

    leaves: list[_Leaf]
    given: dict[Source, Any]


class CrossLayerValues:
    """The cross-layer values of one micro-batch of a step or of a pass.

    Values stay on the device from the block that computes them until its backward, as masks and
    rotary tables do. A block that runs again computes them again: they are the same to the bit, so
    those of forward stay.
    """

    def __init__(self, cross_layer_flow: CrossLayerFlow, lowest: int):
        """lowest: the position of the lowest block that has a backward, `BEFORE` if the embed unit
        has one.
        """
        self._cross_layer_flow = cross_layer_flow
        self._lowest = lowest
        self._values: dict[Source, Any] = {}
        self._gradients: dict[Source, dict[int, torch.Tensor]] = {}
        self._runs: dict[int, _Run] = {}

    def value_of(self, source: Source) -> Any:
        """Returns what a block has given: nested containers of tensors of any shape."""
        return self._values[source]

    def set_value(self, source: Source, value: Any) -> None:
        """Takes `value` as what the block of `source` has given."""
        self._values[source] = value

    def run(
        self,
        position: int,
        arguments: BlockArguments,
        block: Callable[..., Any],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Runs the block at `position` on `hidden` with what earlier blocks have given it. Keeps
        what the block gives, and returns its state. Both states are [rows, tokens, width].
        """
        own = self._cross_layer_flow.blocks[position]
        leaves: list[_Leaf] = []
        nested = _with_own_containers(arguments.nested, own)
        for take in own.cross_layer_inputs:
            if take.source.block == BEFORE:
                self._values[take.source] = value_at(nested, take.place)
            taken = self._as_leaves(take.source, leaves)
            nested = replaced(nested, {take.place: taken})
        complete = arguments.with_nested(nested)
        out = complete.call_for_all(block, hidden)
        given = {
            Source(position, place): _given(place, nested, out) for place in own.cross_layer_outputs
        }
        for source, value in given.items():
            self._values.setdefault(source, mapped(value, torch.Tensor.detach))
        if torch.is_grad_enabled():
            self._runs[position] = _Run(leaves, given)
        return complete.state_of(out)

    def _as_leaves(self, source: Source, leaves: list[_Leaf]) -> Any:
        """Returns the value of `source` with leaves of a graph for its tensors. Those that need a
        gradient are added to `leaves`.
        """
        needs_gradient = torch.is_grad_enabled() and source.block >= self._lowest
        number = -1

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal number
            number += 1
            own = tensor.detach()
            if needs_gradient and tensor.is_floating_point():
                leaves.append(_Leaf(source, number, own.requires_grad_()))
            return own

        return mapped(self._values[source], leaf)

    # ------------------------------------------------------------------ backward

    def forget_run(self, position: int) -> None:
        """Frees the graph of a block that will run again before its backward."""
        self._runs.pop(position, None)

    def leaves(self, position: int) -> list[torch.Tensor]:
        """Returns what the block at `position` has taken and what needs a gradient: tensors of any
        shape.
        """
        return [leaf.tensor for leaf in self._runs[position].leaves]

    def outputs(self, position: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns what a block has given, as far as later blocks have a gradient for it, and these
        gradients, in the same shapes.
        """
        return self._with_gradients(self._runs[position].given)

    def of_embed(
        self, arguments: Sequence[BlockArguments]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns what the embed unit has computed among the `arguments` of all blocks, as far as
        blocks have a gradient for it, and these gradients, in the same shapes.
        """
        nested = [each.nested for each in arguments]
        sources = [source for source in self._gradients if source.block == BEFORE]
        return self._with_gradients({each: value_at(nested, each.place) for each in sources})

    def _with_gradients(
        self, values: dict[Source, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, gradients = [], []
        for source, value in values.items():
            tensors = tensors_of(value)
            for number, gradient in sorted(self._gradients.get(source, {}).items()):
                if tensors[number].requires_grad:
                    outputs.append(tensors[number])
                    gradients.append(gradient)
        return outputs, gradients

    def end_backward(self, position: int, found: Sequence[torch.Tensor | None]) -> None:
        """Adds `found`, the gradients of a block's `leaves`, to those of the values, and frees what
        is no longer needed.
        """
        for leaf, gradient in zip(self._runs.pop(position).leaves, found, strict=True):
            if gradient is not None:
                sums = self._gradients.setdefault(leaf.source, {})
                before = sums.get(leaf.number)
                sums[leaf.number] = gradient if before is None else before + gradient
        for place in self._cross_layer_flow.blocks[position].cross_layer_outputs:
            self._gradients.pop(Source(position, place), None)
            self._values.pop(Source(position, place), None)


def _with_own_containers(nested: dict[str, Any], own: BlockCrossLayerFlow) -> dict[str, Any]:
    """Returns a block's arguments in which it may write: the containers that it writes to are
    copies, since all blocks share them.
    """
    for place in own.cross_layer_outputs:
        if place[0] != OUT:
            nested = replaced(nested, {place[:-1]: replaced(value_at(nested, place[:-1]), {})})
    return nested


def _given(place: Place, nested: dict[str, Any], out: Any) -> Any:
    """Returns what a block has given at a place, among its arguments or in its result."""
    return value_at(out, place[1:]) if place[0] == OUT else value_at(nested, place)

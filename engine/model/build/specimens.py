"""Runs of blocks on the meta device, where tensors have shapes but no contents. The values that
such a block passes on have the right shapes for the blocks that take them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from engine.model.blocks.block_inputs import BlockArguments
from engine.model.blocks.cross_layer_inputs import BEFORE, Source
from engine.model.blocks.cross_layer_values import CrossLayerValues
from engine.model.blocks.pytree_paths import Place, mapped, tensors_of, value_at
from engine.model.build.units import StreamedModel, Unit


class Specimens:
    """Runs blocks of a model on the meta device, earlier ones first. kinds: for each block, what is
    equal for blocks of the same shapes that hand on the same.
    """

    def __init__(self, model: StreamedModel, kinds: Sequence[Hashable]):
        self._model = model
        self._kinds = kinds
        self._values: dict[tuple[Hashable, Place], Any] = {}

    def run(
        self, position: int, arguments: BlockArguments, block: nn.Module, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Runs `block`, a copy on the meta device of the block at `position`, on `hidden`. Returns
        its state; both are [rows, tokens, width]. `arguments` are on the meta device.
        """
        cross_layer_flow = self._model.cross_layer_flow
        if cross_layer_flow is None:
            return arguments.call(block, hidden)
        own = cross_layer_flow.blocks[position]
        values = CrossLayerValues(cross_layer_flow, BEFORE)
        for take in own.cross_layer_inputs:
            if take.source.block != BEFORE:
                values.set_value(take.source, self._value(take.source))
        out = values.run(position, arguments, block, hidden)
        for place in own.cross_layer_outputs:
            value = values.value_of(Source(position, place))
            self._values[self._kinds[position], place] = value
        return out

    def _value(self, source: Source) -> Any:
        return self._values[self._kinds[source.block], source.place]

    def cross_layer_inputs_of(self, position: int) -> list[torch.Tensor]:
        """Returns what earlier blocks pass to the block at `position`, tensors of any shape."""
        if self._model.cross_layer_flow is None:
            return []
        cross_layer_inputs = self._model.cross_layer_flow.blocks[position].cross_layer_inputs
        values = [
            self._value(take.source) for take in cross_layer_inputs if take.source.block != BEFORE
        ]
        return [tensor for value in values for tensor in tensors_of(value)]

    def cross_layer_bytes(self, arguments: Sequence[BlockArguments]) -> int:
        """Returns the bytes of all values that blocks take, and of their gradients. Values that the
        embed unit computes are among the `arguments` of the blocks: theirs are gradients alone.
        """
        cross_layer_flow = self._model.cross_layer_flow
        total = 0
        for position, own in enumerate(
            cross_layer_flow.blocks if cross_layer_flow is not None else ()
        ):
            for take in own.cross_layer_inputs:
                if take.source.block == BEFORE:
                    given = tensors_of(value_at(arguments[position].nested, take.place))
                    total += sum(map(_bytes_of, given))
            for place in own.cross_layer_outputs:
                for tensor in tensors_of(self._value(Source(position, place))):
                    total += _bytes_of(tensor) * (2 if tensor.is_floating_point() else 1)
        return total


def _bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor of any shape, without what it shares with others."""
    return tensor.numel() * tensor.dtype.itemsize


def on_meta(model: StreamedModel, unit: Unit) -> nn.Module:
    """Returns a copy of a block on the meta device, in training mode."""
    template: Any = unit.block
    config = getattr(template, "config", None) or model.config
    # The memo makes the copy share the configuration, which may be large.
    block = copy.deepcopy(template, {id(config): config}).to("meta")
    block.__dict__.pop("forward", None)  # drops the recorder
    return block.train()


def arguments_on_meta(arguments: BlockArguments) -> BlockArguments:
    """Returns a block's arguments on the meta device."""
    return arguments.with_nested(mapped(arguments.nested, lambda tensor: tensor.to("meta")))

"""Cross-layer values: in some families, blocks take more than a hidden state that is trained, or
pass results on to later blocks.

- Gemma 4 computes an input for each block from the tokens, and late blocks read the keys and values
  of an earlier one, which it leaves in a dict that all of them are given.
- GLM-5 returns the tokens that its indexer chose from one block, and gives them to the next.
A `CrossLayerFlow` has the inputs and outputs of each block. `engine.model.build.block_trial` finds
it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engine.model.blocks.pytree_paths import Place

OUT = "out"
"""First key of a place that is in the result of a block, and not in its arguments."""
BEFORE = -1
"""The embed unit computes what it computes before all blocks, at this position among them."""


@dataclass(frozen=True)
class Source:
    """A value that later blocks take."""

    block: int
    """The block at this position computes it, or the embed unit at `BEFORE`."""
    place: Place
    """A block leaves the value here: in its result, or in one of its arguments. A value of the
    embed unit is among the arguments of the block whose position comes first in the place.
    """


@dataclass(frozen=True)
class CrossLayerInput:
    """A block finds the value of `source` at a place among its arguments."""

    place: Place
    source: Source


@dataclass(frozen=True)
class BlockCrossLayerFlow:
    """Cross-layer values that a block takes, and the places of those that it passes on."""

    cross_layer_inputs: tuple[CrossLayerInput, ...] = ()
    cross_layer_outputs: tuple[Place, ...] = ()


@dataclass(frozen=True)
class CrossLayerFlow:
    """What passes between the blocks of a model, for each block in order."""

    blocks: tuple[BlockCrossLayerFlow, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the hidden state passes from block to block."""
        return not any(
            block.cross_layer_inputs or block.cross_layer_outputs for block in self.blocks
        )


def cross_layer_flow_of(
    cross_layer_inputs: dict[int, list[CrossLayerInput]], blocks: int
) -> CrossLayerFlow:
    """Returns the cross-layer values of a model with this number of blocks. A value that no block
    takes is not passed on.
    """
    cross_layer_outputs: dict[int, dict[Place, None]] = {
        block: {} for block in range(BEFORE, blocks)
    }
    for take in itertools.chain.from_iterable(cross_layer_inputs.values()):
        cross_layer_outputs[take.source.block][take.source.place] = None  # each once, in order
    return CrossLayerFlow(
        tuple(
            BlockCrossLayerFlow(
                tuple(cross_layer_inputs.get(block, ())), tuple(cross_layer_outputs[block])
            )
            for block in range(blocks)
        )
    )

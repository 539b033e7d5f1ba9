"""A `BlockSizes` is asked what the first or the last blocks of a model take together. The planner
asks a hundred thousand times, so nothing is added up twice.

Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from engine.planning.layout.layout import FP32_ITEM_BYTES


class BlockSizes:
    """Has the sizes of one model's blocks.

    numels: the elements of each block's gradient. weights: those of its weights, of which so many
    `fp32_numels` are in fp32 on the device, beside the others. item: an element takes this many
    bytes there.
    """

    def __init__(
        self,
        numels: Sequence[int],
        weights: Sequence[int],
        fp32_numels: Sequence[int],
        item: int,
    ):
        self._numels = numels
        self._weights = weights
        self._fp32_numels = fp32_numels
        self._item = item
        self._slots: dict[tuple[int, int], int] = {}
        self._largest = [*accumulate(reversed(numels), max, initial=0)][::-1]
        each = [
            numel * item + keep_in_fp32 * FP32_ITEM_BYTES
            for numel, keep_in_fp32 in zip(weights, fp32_numels)
        ]
        self._last = list(accumulate(reversed(each), initial=0))
        self._sums: dict[range, tuple[int, int]] = {}
        self.numel = sum(numels)
        """Number of elements of the gradients of all blocks together."""
        self.main_grad_bytes = tuple(4 * numel for numel in reversed(numels))
        """Bytes of the accumulator of each block, the last block first."""

    def slot_bytes(self, start: int, stop: int) -> int:
        """Returns the bytes of a slot that can hold each of the blocks from `start` to `stop`."""
        if (start, stop) not in self._slots:
            numel = max(self._weights[start:stop], default=0)
            keep_in_fp32 = max(self._fp32_numels[start:stop], default=0)
            self._slots[start, stop] = numel * self._item + keep_in_fp32 * FP32_ITEM_BYTES
        return self._slots[start, stop]

    def largest_from(self, start: int) -> int:
        """Returns the elements of the largest gradient of a block from `start` on; 0 where there is
        none.
        """
        return self._largest[start]

    def resident_bytes(self, count: int) -> int:
        """Returns the bytes of the last `count` blocks, each in a slot of its own."""
        return self._last[count]

    def largest_main_grads(self, seconds: range) -> tuple[int, int]:
        """Returns the elements of the largest gradient of these blocks, and of the others.
        `seconds` counts blocks from 0; without any, the first number is 0, and without others the
        second.
        """
        if seconds not in self._sums:
            some = [self._numels[at] for at in seconds]
            others = [numel for at, numel in enumerate(self._numels) if at not in seconds]
            self._sums[seconds] = max(some, default=0), max(others, default=0)
        return self._sums[seconds]


class BlockBytes(NamedTuple):
    """Bytes that blocks need for one micro-batch. All but the first table are looked up by a number
    of blocks.
    """

    activations: list[int]
    """Bytes that autograd keeps of each block."""
    kept_by_last: list[int]
    """Bytes that it keeps of the last blocks together."""
    by_backward: list[int]
    """Most bytes that the backward of one of the last blocks needs in addition."""
    by_recompute: list[int]
    """Most bytes that recompute and backward of one of the first blocks need."""
    by_pairs: list[int]
    """Most bytes that recompute and backward of one of the first pairs need."""

    @classmethod
    def of(
        cls, activations: list[int], backward: list[int], inputs: list[int] | None = None
    ) -> BlockBytes:
        """Returns the tables. `backward`: each block's backward needs so much in addition. inputs:
        so much of the activations is the block's input, which a recompute has from elsewhere.
        """
        again = map(sub, activations, inputs) if inputs is not None else activations
        pairs = [
            activations[second - 1] + activations[second] + backward[second]
            for second in range(1, len(backward), 2)
        ]
        return cls(
            activations,
            list(accumulate(reversed(activations), initial=0)),
            list(accumulate(reversed(backward), max, initial=0)),
            list(accumulate(map(add, again, backward), max, initial=0)),
            list(accumulate(pairs, max, initial=0)),
        )

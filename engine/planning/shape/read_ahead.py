"""These functions count how much of a checkpoint is in memory beside the planes while it is read.

This file needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.text import MIB

_MERGED_TIMES = 3
"""Most copies in memory of the parameters of experts that are merged."""
_MOST_ITEM_BYTES = 4
"""Most bytes of a parameter in a checkpoint, which is stored in fp32, bf16 or fp16. (Only the rare
one in fp64 takes more.)
"""
_BUFFER_BYTES = 32 * MIB
"""Most bytes of the buffer for values that are not stored in bf16, with the pages of the file that
lie around a tensor. It is no larger than the tensor.
"""


def read_ahead_numel(units: Iterable[int], has_experts: bool) -> int:
    """Returns how many parameters of a checkpoint are at most in memory beside their planes at the
    same time. `units` has the number of parameters of each unit.

    A tensor is read when it is written to its plane, and none is larger than its unit. The experts
    of a block may be tensors of their own in the files, which the library merges. Then there are
    these tensors, those stacked by kind, all in one, and the tensor that was merged before: less
    than three times the block.
    """
    return max(units) * (_MERGED_TIMES if has_experts else 1)


def most_read_ahead_bytes(numel: int) -> int:
    """Returns the bytes that reading a checkpoint takes at most beside the planes, in whatever
    dtype it is stored, where `numel` is the result of `read_ahead_numel`.
    """
    size = numel * _MOST_ITEM_BYTES
    return size + min(size, _BUFFER_BYTES)

"""What attention returned in a block's forward may wait for the block's backward behind the block's
input, in the same memory: its output and its log-sums. How much room that takes is said here. No
torch.
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as those do that the device allocates."""
MORE_BYTES = 1 << 16
"""Bytes of the room more, for the gaps between tensors and for kernels that fill up their log-sums.
Where it does not suffice for a tensor, attention is computed again.
"""


LOG_SUM_BYTES = 4
"""Bytes of a log-sum, fp32, for each token and head."""


class BoundarySizes(NamedTuple):
    """Most elements of a block input, alone and with what attention returned."""

    alone: int
    with_attention: int


def returned_bytes(width: int, heads: int, item: int) -> int:
    """Returns the bytes of what attention returns for a token: `width` features of `item` bytes,
    and the log-sums of all heads.
    """
    return width * item + LOG_SUM_BYTES * heads


def aligned(nbytes: int) -> int:
    """Returns the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def attention_room(bytes_of_token: int, tokens: int) -> int:
    """Returns the bytes of the room for what attention returned for `tokens` tokens, each of which
    has `bytes_of_token`; 0 where that is not kept.
    """
    return aligned(bytes_of_token * tokens) + MORE_BYTES if bytes_of_token else 0


def with_room(block_input_bytes: int, bytes_of_token: int, tokens: int) -> int:
    """Returns the bytes of a block input of `tokens` tokens with that room behind it."""
    if not bytes_of_token:
        return block_input_bytes
    return aligned(block_input_bytes) + attention_room(bytes_of_token, tokens)

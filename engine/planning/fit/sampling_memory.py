"""How sampling shares the memory of a device among weights, caches and the pass under way. The file
is pure arithmetic, without torch.

Where weights do not fit, each step of sampling brings the others over the bus, and its time hardly
depends on the number of rows. So memory for more rows is worth more than memory for more blocks as
long as many rows wait, and less where one row is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_ROWS = 512
"""Rows of a cache at most. More of them would make a step longer by as much as they add."""
POSITIONS = 64
"""The number of positions of a cache that all rows share is a multiple of this."""
PASS_TOKENS = 16384
"""Most positions of a micro-batch for sampling, unless it is a single row."""
_LEAST_PASS_TOKENS = 1024
"""A pass computes so many tokens of prompts in any case."""
_UNDER_WAY = 2
"""Blocks under way at once, each in a slot of its own."""


class PassBytes(NamedTuple):
    """Memory of a pass beside weights and caches."""

    per_token: int
    """What a block computes for a token."""
    logits: int
    """The logits of the most rows, and what drawing from some of them takes."""


@dataclass(frozen=True)
class CacheCost:
    """The fields give the bytes that the cache of one row takes on the device."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        """Returns the most bytes that the cache of a row of `tokens` takes. A sliding window keeps
        the whole prompt until the first step.
        """
        return self.fixed + self.per_token * tokens


def positions_for(tokens: int) -> int:
    """Returns the positions of a shared cache for rows of so many tokens. A step that begins before
    a row is known to have ended writes one further.
    """
    return -(-(tokens + 1) // POSITIONS) * POSITIONS


def shared_bytes(cost: CacheCost, rows: int, tokens: int) -> int:
    """Returns the bytes of a cache that so many rows of `tokens` tokens share."""
    return rows * cost.of(positions_for(tokens))


class CacheRoom(NamedTuple):
    """Memory for caches, in bytes, and how many tokens of prompts one pass may compute beside."""

    budget: int
    pass_tokens: int

    def holds(self, cost: CacheCost, rows: int, tokens: int) -> bool:
        """Returns whether so many rows of `tokens` tokens have a shared cache."""
        return rows <= MOST_ROWS and shared_bytes(cost, rows, tokens) <= self.budget

    def at_once(self, cost: CacheCost, rows: int, tokens: int) -> int:
        """Returns how many of `rows` rows of `tokens` tokens share a cache."""
        return min(rows, MOST_ROWS, self.budget // max(1, shared_bytes(cost, 1, tokens)))

    def allocated(self, cost: CacheCost, rows: int, tokens: int) -> int:
        """Returns the rows that a new cache for `rows` rows has. Rows come one after another where
        a server asks, so a cache grows by halves of the room.
        """
        wanted = min(MOST_ROWS, 1 << (rows - 1).bit_length())
        return wanted if shared_bytes(cost, wanted, tokens) <= self.budget else rows


def pass_bytes_of_config(config: Any, item: int) -> PassBytes:
    """Returns the memory of a pass of a model with this text config and numbers of `item` bytes:
    hidden states in two precisions, queries, keys, values and the widest products of a block.
    """
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        width = max(width, experts * (getattr(config, "moe_intermediate_size", None) or width))
    return pass_bytes(config.hidden_size, width, config.vocab_size, item)


def pass_bytes(hidden: int, width: int, vocabulary: int, item: int) -> PassBytes:
    """Returns the same for hidden states of `hidden` numbers and a widest product of `width`."""
    per_token = item * (3 * width + 8 * hidden) + 2 * 4 * hidden
    return PassBytes(per_token, 2 * 4 * MOST_ROWS * vocabulary)


def blocks_kept(free: int, ends: int, blocks: Sequence[int], many_rows: bool) -> int:
    """Returns how many blocks stay on a device with `free` bytes, counted from the last.

    ends: bytes of the embedding and the head. blocks: bytes of each block. All stay if a quarter of
    the memory is left then. If not, none stay where many rows wait, and otherwise as many as fit
    into half of the memory.
    """
    if sum(blocks) + ends <= free - free // 4:
        return len(blocks)
    if many_rows:
        return 0
    room = free // 2 - ends
    return max(0, min(len(blocks) - 1, room // max(blocks) - _UNDER_WAY))


def cache_room(free: int, token_bytes: int, of_pass: PassBytes) -> CacheRoom:
    """Returns the memory for caches of `token_bytes` a token, out of `free` bytes.

    A pass over as many prompts as it takes at most is left room for, with the cache that it makes,
    but no more than half of the memory. Where that is less, a pass computes fewer prompts.
    """
    a_token = token_bytes + of_pass.per_token
    apart = min(free // 2, PASS_TOKENS * a_token + of_pass.logits)
    tokens = max(0, apart - of_pass.logits) // a_token
    return CacheRoom(free - apart, max(_LEAST_PASS_TOKENS, min(PASS_TOKENS, tokens)))


def host_cache_room(free: int) -> CacheRoom:
    """Returns the memory for caches out of `free` bytes of RAM. Other programs use it, too, so half
    of it is left alone.
    """
    return CacheRoom(free // 2, PASS_TOKENS)

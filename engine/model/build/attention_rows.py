"""Attention of one new token in each of many rows whose caches have different lengths.

The rows lie in one cache of keys and values, [rows, heads, positions, width], each from position 0
on. In place of a mask tensor that transformers would make, blocks are given a `RowsMask`.
"""

from __future__ import annotations

from typing import Any

import torch


class RowsMask:
    """Takes the place of a mask: which positions of its row each new token sees, bool or a number
    that is added, [rows, 1, 1, positions].
    """

    __slots__ = ("seen",)

    def __init__(self, seen: torch.Tensor):
        self.seen = seen

    def __getitem__(self, parts: tuple[Any, ...]) -> RowsMask:
        """Returns the mask itself for parts that leave nothing out, as `Pattern` does."""
        if any(part not in (slice(None), slice(0, None)) for part in parts):
            raise NotImplementedError("a mask is of whole rows")
        return self


class CachedRows:
    """Rows in a cache, and the positions of their new tokens.

    at: the position of each row's new token, int64 [rows]. positions: the number of positions of
    the cache that any row uses, the new tokens included.
    """

    def __init__(self, at: torch.Tensor, positions: int):
        self.at = at
        self.positions = positions
        self._masks: dict[tuple[int | None, int | None, torch.dtype], RowsMask] = {}

    def forget(self) -> None:
        """Drops the masks, since `at` has changed."""
        self._masks.clear()

    def mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> RowsMask:
        """Returns the mask of a causal attention, of a sliding `window` or of chunks.

        On a GPU it is added to scores of `dtype`, which spares each block a conversion.
        """
        key = window, chunk, dtype
        if key not in self._masks:
            place = torch.arange(self.positions, device=self.at.device)[None]
            at = self.at[:, None]
            seen = place <= at
            if window is not None:
                seen &= place > at - window
            if chunk is not None:
                seen &= place // chunk == at // chunk
            if self.at.is_cuda:
                blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                seen = blank.masked_fill_(~seen, -torch.inf)
            self._masks[key] = RowsMask(seen[:, None, None])
        return self._masks[key]

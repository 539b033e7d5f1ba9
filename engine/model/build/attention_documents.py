"""Bounds of the documents that share a row, for attention.

`Documents` has which tokens of a micro-batch belong together. `Pattern` also has how far a token
attends back inside its document. Both are kept on the host, so that no step waits for the device to
find out where a document ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Documents:
    """An instance lists the documents of a micro-batch, row by row.

    Tensors made from the documents are cached, because every block requests the same ones in its
    forward pass and again in its backward pass.
    """

    lengths: tuple[tuple[int, ...], ...]
    """For each row, this lists the lengths of its documents in tokens. Padding counts as a
    document.
    """
    upload: Callable[[np.ndarray], torch.Tensor]
    """Copies a host array to the device and does not wait for the device."""
    _starts: dict[int | None, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, position_ids: np.ndarray, upload: Callable[[np.ndarray], torch.Tensor]
    ) -> Documents:
        """Reads the documents from positions [rows, tokens] that restart with every document."""
        lengths = []
        for row in np.asarray(position_ids):
            starts = np.flatnonzero(np.append(True, np.diff(row) != 1))
            lengths.append(tuple(int(length) for length in np.diff(np.append(starts, len(row)))))
        return cls(tuple(lengths), upload)

    @classmethod
    def whole_rows(
        cls, rows: int, tokens: int, upload: Callable[[np.ndarray], torch.Tensor]
    ) -> Documents:
        """Returns documents that each fill one of `rows` rows of `tokens` tokens."""
        return cls(((tokens,),) * rows, upload)

    @property
    def whole(self) -> bool:
        """Whether every row is one document."""
        return all(len(row) == 1 for row in self.lengths)

    @property
    def count(self) -> int:
        """Number of documents of the rows together."""
        return sum(len(row) for row in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(max(row) for row in self.lengths)

    def segments(self, chunk: int | None) -> Iterator[tuple[slice, int, int]]:
        """Yields every segment whose tokens attend only to each other, as (rows, first token, token
        after the last). A segment is a document or, if attention is chunked, `chunk` tokens of a
        document.

        If every row is a single document, one slice covers all rows.
        """
        if self.whole:
            rows = [(slice(None), self.lengths[0])]
        else:
            rows = [(slice(k, k + 1), lengths) for k, lengths in enumerate(self.lengths)]
        for row, lengths in rows:
            start = 0
            for length in lengths:
                step = chunk or length
                for first in range(start, start + length, step):
                    yield row, first, min(first + step, start + length)
                start += length

    def bounds(self, chunk: int | None) -> np.ndarray:
        """Returns int32[segments + 1]: where each segment starts when the rows are concatenated,
        and where the last segment ends.
        """
        sizes = [0]
        for row in self.lengths:
            for length in row:
                step = chunk or length
                sizes += [min(step, length - first) for first in range(0, length, step)]
        return np.cumsum(sizes, dtype=np.int32)

    def starts(self, chunk: int | None) -> torch.Tensor:
        """Returns the bounds of the segments, int32[segments + 1], on the device."""
        if chunk not in self._starts:
            self._starts[chunk] = self.upload(self.bounds(chunk))
        return self._starts[chunk]

    def mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Returns a mask [rows, 1, tokens, tokens]: 0 where a token sees another one, and -inf
        elsewhere.
        """
        key = window, chunk, dtype
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, chunk, dtype)
        return self._masks[key]

    def _make_mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> torch.Tensor:
        lengths = np.array([length for row in self.lengths for length in row])
        rows, tokens = len(self.lengths), sum(self.lengths[0])
        numbers = np.arange(len(lengths))
        starts = np.cumsum(lengths) - lengths
        # Each token gets its document's number and start, in one upload. Starts are counted across
        # all rows.
        of_token = np.repeat(np.stack([numbers, starts]), lengths, axis=1)
        document, first = self.upload(of_token.astype(np.int32).reshape(2, rows, tokens))
        at = torch.arange(tokens, device=document.device)
        back = at[:, None] - at[None, :]
        seen = (document[:, :, None] == document[:, None, :]) & (back >= 0)
        if window is not None:
            seen &= back < window
        if chunk is not None:
            places = torch.arange(rows * tokens, device=document.device).view(rows, tokens)
            chunk_of = (places - first) // chunk
            seen &= chunk_of[:, :, None] == chunk_of[:, None, :]
        blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return blank.masked_fill_(~seen, -torch.inf)[:, None]


class Pattern:
    """Takes the place of a mask: attention is causal inside each document.

    With `window`, a token sees only the last `window` tokens, including itself. With `chunk`, it
    sees only tokens of its own chunk of `chunk` tokens. Both count within the document.
    """

    # This is not a dataclass, because torch 2.11 recompiles code that receives a frozen dataclass
    # for each new value of a field, which would mean at every step.
    __slots__ = ("chunk", "documents", "window")

    def __init__(self, documents: Documents, window: int | None = None, chunk: int | None = None):
        self.documents = documents
        self.window = window
        self.chunk = chunk

    def __getitem__(self, parts: tuple[Any, ...]) -> Pattern:
        """Returns the pattern itself for parts that leave nothing out. Gemma 4 cuts its masks to
        the tokens whose logits are wanted, which are all of them here.
        """
        if any(part not in (slice(None), slice(0, None)) for part in parts):
            raise NotImplementedError("a pattern is of whole rows")
        return self

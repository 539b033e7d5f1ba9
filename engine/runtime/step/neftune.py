"""NEFTune adds uniform noise to the vectors that a model looks up, in training alone (arXiv
2310.05914).

The noise of a number depends on the run's seed, the step, the row's place in the step, the token
and the column, and on nothing else. So it is the same under any plan, in any micro-batch and on any
rank, in a recompute and after a resume, on the CPU and on a GPU:

- Two random words for each token are hashes of its position and of the row's key.
- A hash of the column and of these two words is a whole number of 24 bits.
- Scaled to -1 to 1, it is multiplied by `alpha / sqrt(tokens * width)`. The row's own tokens count,
  as in the paper; padding does not, since its length depends on the rows of the micro-batch.

The hash is "lowbias32" of Chris Wellons (public domain), with a word added in its middle.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.errors import ModelError

_CHUNK_NUMEL = 1 << 22
"""Approximate count of numbers whose noise is drawn at once, since whole numbers of 32 bits are
kept meanwhile.
"""
_GOLDEN = 0x9E3779B9
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True)
class StepNoise:
    """Noise of the rows of a step."""

    alpha: float
    seed: int
    step: int

    def of_rows(self, batch: Any) -> np.ndarray:
        """Returns for each row of a micro-batch its key and the bits of `alpha / sqrt(tokens)` in
        float32, int64 [2, rows].
        """
        keys = [self._key(place) for place in batch.places.tolist()]
        scales = np.float32(self.alpha / np.sqrt(np.maximum(batch.lengths, 1)))
        return np.stack([np.array(keys, np.int64), scales.view(np.int32).astype(np.int64)])

    def _key(self, place: int) -> int:
        """Returns 64 random bits for the row at `place` of the step."""
        content = struct.pack("<qqq", self.seed, self.step, place)
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


class RowNoise:
    """Noise of one micro-batch on the device, which is drawn when it is added.

    `of_rows` is that of `StepNoise`, int64 [2, rows], on the device.
    """

    def __init__(self, of_rows: torch.Tensor):
        keys, scales = of_rows
        self._keys = keys.contiguous().view(torch.int32).view(-1, 2)
        self._scales = scales.to(torch.int32).view(torch.float32)

    @contextlib.contextmanager
    def in_lookups_of(self, model: Any) -> Iterator[None]:
        """Gives a scope in which `model`, a causal language model from transformers, gets the noise
        with what it looks up. Raises ModelError unless it looks its tokens up once.
        """
        count = 0

        def noisy(_module: nn.Module, _inputs: Any, vectors: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return self.added_to(vectors)

        hook = model.get_input_embeddings().register_forward_hook(noisy)
        try:
            yield
        finally:
            hook.remove()
        if count != 1:
            raise ModelError(
                f"{type(model).__name__} looks its tokens up {count} times, so there is no one "
                "place for noise on embeddings; set train.neftune_alpha to 0."
            )

    def added_to(self, vectors: torch.Tensor) -> torch.Tensor:
        """Returns `vectors` [rows, tokens, width] with the noise of their rows, which is rounded to
        their data type first. The gradient of the sum is that of `vectors`.
        """
        with torch.no_grad():
            noise = self._drawn(vectors)
        return noise.add_(vectors)

    def _drawn(self, vectors: torch.Tensor) -> torch.Tensor:
        """Returns the noise for `vectors` [rows, tokens, width], in their shape and data type."""
        rows, tokens, width = vectors.shape
        device = vectors.device
        places = torch.arange(tokens, dtype=torch.int32, device=device)
        columns = torch.arange(width, dtype=torch.int32, device=device).mul_(_int32(_GOLDEN))
        first = _hashed(places + self._keys[:, :1]).reshape(-1, 1)
        second = _hashed(places ^ self._keys[:, 1:]).reshape(-1, 1)
        scales = (self._scales * (1 / math.sqrt(width))).repeat_interleave(tokens).unsqueeze(1)
        noise = torch.empty_like(vectors, memory_format=torch.contiguous_format)
        flat = noise.view(rows * tokens, width)
        at_once = max(1, _CHUNK_NUMEL // width)
        for start in range(0, rows * tokens, at_once):
            chunk = slice(start, start + at_once)
            words = _hashed(columns + first[chunk], second[chunk])
            # Halves of odd numbers of 24 bits are exact in float32, and their mean is 0.
            numbers = words.bitwise_right_shift_(8).float().add_(0.5).mul_(2.0**-23)
            flat[chunk] = numbers.mul_(scales[chunk])
        return noise


def _hashed(words: torch.Tensor, middle: torch.Tensor | None = None) -> torch.Tensor:
    """Returns hashes of `words`, int32 of any shape, which it overwrites. `middle`, int32 that can
    be broadcast to that shape, makes them others.
    """
    # Numbers are signed here, so what a shift to the right fills in is masked.
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _int32(_FIRST)
    if middle is not None:
        words += middle
    words ^= (words >> 15).bitwise_and_(0x1FFFF)
    words *= _int32(_SECOND)
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


def _int32(word: int) -> int:
    """Returns the signed number that has the 32 bits of `word`."""
    return word - (1 << 32) if word >= 1 << 31 else word
